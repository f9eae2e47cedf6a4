"""Batches of a curriculum on however many processes it is started on. Run by test_curriculum.py.

    python curriculum_run.py <model folder> <out folder> <sequences of a process>

Every process leaves in <out>/rank-<rank>.json the rows of each batch, its own rewards, and the sampler's position.
"""

import json
import sys
from pathlib import Path

from accelerate import Accelerator
from shared_work_run import RANK, make

from fused_grpo.trainer.logging.console import Phases


def main(folder: str, out: Path, sequences: str) -> None:
    trainer = make(folder, out, curriculum="unequal_rewards", per_device_train_batch_size=int(sequences), max_steps=1)
    trainer.engine.prompts, batches, rewards = [], [], []
    for _ in range(4):
        scored = trainer.collector.collect(trainer.engine, Phases())
        batches.append(trainer.sampler.batch)
        rewards.append([sample.reward for sample in scored.samples])
    out.mkdir(exist_ok=True)
    seen = {"batches": batches, "rewards": rewards, "position": trainer.sampler.position()}
    (out / f"rank-{RANK}.json").write_text(json.dumps(seen))
    Accelerator(cpu=True).end_training()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
