"""Batches of a curriculum on however many processes it is started on. Run by test_curriculum.py.

    python curriculum_run.py <model folder> <out folder> <sequences of a process>

Every process leaves in <out>/rank-<rank>.json the rows of each batch, its own rewards, and the sampler's position.
"""

import json
import sys
from pathlib import Path

from accelerate import Accelerator
from shared_work_run import RANK, Engine

from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.logging.console import Phases
from fused_grpo.trainer.recipes.arithmetic import build_tokenizer


def is_long(completion_ids: list[list[int]], **columns: object) -> list[float]:
    """1 for a fifth of the completions, so that about half of the groups have equal rewards."""
    return [float(len(ids) > 4) for ids in completion_ids]


def main(folder: str, out: Path, sequences: str) -> None:
    args = GRPOConfig(
        str(out / "run"),
        num_generations=4,
        max_completion_length=6,
        per_device_train_batch_size=int(sequences),
        max_steps=1,
        use_cpu=True,
        bf16=False,
        curriculum="unequal_rewards",
    )
    rows, engine = [{"prompt": f"{number}+1="} for number in range(8)], Engine()
    trainer = GRPOTrainer(folder, is_long, args, rows, processing_class=build_tokenizer(), rollout_engine=engine)
    engine.prompts, batches, rewards = [], list[list[int]](), list[list[float]]()
    for _ in range(8):
        scored = trainer.collector.collect(trainer.engine, Phases())
        batches.append(trainer.sampler.batch)
        rewards.append([sample.reward for sample in scored.samples])
    out.mkdir(exist_ok=True)
    seen = {"batches": batches, "rewards": rewards, "position": trainer.sampler.position()}
    (out / f"rank-{RANK}.json").write_text(json.dumps(seen))
    Accelerator(cpu=True).end_training()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
