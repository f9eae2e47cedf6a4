"""The trainer with the real engine: what vLLM samples from is what the trainer trains, sync after sync."""

from __future__ import annotations

import json

import pytest
import torch

from fused_grpo.trainer import GRPOConfig, GRPOTrainer

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("tied", [False, True])
def test_vllm_and_trainer_agree_after_every_sync(make_model, tokenizer, tmp_path, tied):
    model = make_model(tie_word_embeddings=tied, hidden_size=64)
    start = model.lm_head.weight.detach().clone()
    args = GRPOConfig(
        output_dir=str(tmp_path / "run"),
        max_steps=6,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        learning_rate=5e-3,
        lr_scheduler_type="constant",
        use_vllm=True,
        log_completions=False,
    )
    rows = [{"prompt": f"{a}+{a}="} for a in range(4)]
    trainer = GRPOTrainer(
        model, lambda completions, **_: [float(len(c)) for c in completions], args, rows, processing_class=tokenizer
    )
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["weight_version"] for line in lines] == list(range(6))
    assert {line["rollout_engine"] for line in lines} == {"vllm"}
    assert max(line["sampling/sampling_logp_difference/max"] for line in lines) < 1e-4
    # Far enough that stale weights would have shown.
    assert (model.lm_head.weight - start).abs().max() > 1e-2
    if tied:
        assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert torch.isfinite(model.lm_head.weight).all()
