"""Training against a real vLLM server: it follows, its death is an error with a way back, and the way back is exact."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from fused_grpo.errors import UnavailableError, WeightSyncError
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.checkpoint import newest_checkpoint, verify_checkpoint

pytestmark = pytest.mark.engine


def letters(completions: list[str], **columns: Any) -> list[float]:
    return [sum(letter.isalpha() for letter in text) / (len(text) + 1) for text in completions]


@pytest.fixture
def make_trainer(build_model, tokenizer, server, tmp_path):
    def make(name: str, **options: Any) -> GRPOTrainer:
        args = GRPOConfig(
            str(tmp_path / name),
            vllm_mode="server",
            vllm_server_base_url=server.url,
            vllm_server_timeout=500.0,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=8,
            max_steps=5,
            save_steps=2,
            learning_rate=1e-3,
            **options,
        )
        rows = [{"prompt": f"{a}+{b}="} for a in range(4) for b in range(4)]
        return GRPOTrainer(build_model("qwen2", tied=True), letters, args, rows, processing_class=tokenizer)

    return make


def killing_server_after(trainer: GRPOTrainer, server: Any, step: int) -> GRPOTrainer:
    record = trainer._record

    def recording(*arguments: Any) -> None:
        record(*arguments)
        if trainer.step == step:
            server.kill()

    trainer._record = recording
    return trainer


def test_a_server_that_dies_ends_the_run_and_a_new_one_goes_on_with_it(make_trainer, server, tmp_path) -> None:
    if server.process is None:
        server.start()
    whole = make_trainer("whole")
    metrics = whole.train().metrics
    assert metrics["rollout_engine"] == "vllm-server"
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-3
    start = time.monotonic()
    # Found out while sampling, or while weights are handed over.
    with pytest.raises((UnavailableError, WeightSyncError), match=server.url):
        killing_server_after(make_trainer("cut"), server, step=3).train()
    assert time.monotonic() - start < 60
    verify_checkpoint(newest_checkpoint(tmp_path / "cut"))
    server.start()
    resumed = make_trainer("cut", resume_from_checkpoint=True)
    assert resumed.train().steps == 5
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
