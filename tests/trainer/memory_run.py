"""Two steps of a model, and what its memory was said to be beside what it was. Run by test_memory_estimate.py.

    python memory_run.py <out.json> <options as JSON>

In the file are, in bytes: what the process held before (`held`), what the banner said (`said`), and the peak of its
resident memory (`peak`).
"""

import json
import sys
from pathlib import Path
from typing import Any

from transformers import Qwen2Config, Qwen2ForCausalLM

from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.models.memory_estimate import process_memory
from fused_grpo.trainer.recipes.arithmetic import build_tokenizer

SHAPE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "vocab_size": 4096}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 1, "pad_token_id": 0}
UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9}


def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Differs within groups, so that no sequence is left out."""
    return [float(sum(ids) % 97 + index) for index, ids in enumerate(completion_ids)]


def peak() -> int:
    """Of this process's resident memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main(out: str, options: str) -> None:
    held = process_memory()
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True))
    args = GRPOConfig(
        str(Path(out).with_suffix("")), bf16=False, save_strategy="no", max_steps=2, **json.loads(options)
    )
    rows = [{"prompt": f"{number:03}+" * 30} for number in range(16)]
    trainer = GRPOTrainer(model, reward, args, rows, processing_class=build_tokenizer())
    _, size, unit, *_ = trainer.facts["memory"].split()
    trainer.train()
    Path(out).write_text(json.dumps({"held": held, "said": float(size) * UNITS[unit], "peak": peak()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
