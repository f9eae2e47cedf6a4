"""Ranks that share one vLLM server, a fake one, with batches in flight. Run by test_batch_queue.py.

    python queue_run.py <out folder> <k> <seconds that each rank samples, or ""> [<batch at which the last rank fails>]

Every process leaves what it saw in <out>/rank-<rank>.json.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parent / "engines"))
from fake_vllm import FakeServer

from fused_grpo.errors import UnavailableError
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.engines.server.server_engine import VLLMServerEngine
from fused_grpo.trainer.recipes.arithmetic import build_tokenizer

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class SlowEngine(VLLMServerEngine):
    """Samples for a while, and fails with a batch."""

    pause, fails_at, calls = 0.0, -1, 0

    def generate(self, *arguments, **options):
        self.calls += 1
        if self.calls > self.fails_at > -1:
            raise UnavailableError("out of order")
        time.sleep(self.pause)
        return super().generate(*arguments, **options)


def main(out: Path, k: int, pauses: str, fails_at: int = -1) -> None:
    out.mkdir(exist_ok=True)
    torch.manual_seed(0)
    sizes = {"vocab_size": 14, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
    model, tokenizer = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads)), build_tokenizer()
    address = out / "address"
    if RANK == 0:
        address.with_suffix(".new").write_text(FakeServer().url)
        address.with_suffix(".new").rename(address)
    while not address.exists():
        time.sleep(0.01)
    engine = SlowEngine(model, tokenizer, base_urls=[address.read_text()], timeout=20)
    engine.pause = float(pauses.split()[RANK]) if pauses else 0.0
    engine.fails_at = fails_at if RANK == RANKS - 1 else -1
    options = {"use_cpu": True, "bf16": False, "logprob_mismatch": "warn", "save_strategy": "no", "max_steps": 6}
    batch = {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 6}
    args = GRPOConfig(str(out / "run"), generate_ahead=k, vllm_mode="server", learning_rate=1e-2, **batch, **options)
    rows = [{"prompt": f"{a}+1="} for a in range(8)]
    reward = lambda completion_ids, **_: [float(ids[-1]) for ids in completion_ids]  # noqa: E731
    trainer = GRPOTrainer(model, reward, args, rows, processing_class=tokenizer, rollout_engine=engine)
    result = {"versions": [], "error": ""}
    record = trainer._record
    trainer._record = lambda metrics, phases: (
        result["versions"].append(metrics["weight_version"]),
        record(metrics, phases),
    )
    try:
        trainer.train()
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
    weights = b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())
    result |= {"calls": engine.calls, "step": trainer.step, "weights": hashlib.sha256(weights).hexdigest()}
    result["sync"] = dict(engine.sync_metrics)
    (out / f"rank-{RANK}.json").write_text(json.dumps(result))
    if not result["error"]:
        trainer.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:]))
