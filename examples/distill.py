"""On-policy distillation: one student learns from rewards, another from a teacher.

    python examples/distill.py [seed]

The task is the built-in one: sums of two-digit numbers, scored by exact match on sums that no run has seen. The base
model adds and rarely carries. The teacher is the base model after GRPO with many completions; the students start from
the base model and get an eighth of them. The teacher says something about every token, the reward one number about a
whole answer; the student of the teacher is only measured by it. The report of each run is in runs/distill-*.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.recipes import arithmetic

STEPS, EVERY = 12, 4


def train(name: str, completions: int, seed: int, teacher: Any = None) -> tuple[Any, list[float]]:
    """The trained model of a run with so many completions a step, and its held-out accuracies, every EVERY steps."""
    args = GRPOConfig(
        f"runs/distill-{name}",
        overwrite_output_dir=True,
        seed=seed,
        max_steps=STEPS,
        per_device_train_batch_size=completions,
        num_generations=8,
        max_completion_length=5,
        learning_rate=5e-4,
        reward_weights=[1.0 if teacher is None else 0.0],
        distillation_coef=0.0 if teacher is None else 1.0,  # the weight of the divergence from the teacher
        distillation_kind="forward_kl",
        eval_steps=EVERY,
        logging_steps=EVERY,
        save_strategy="no",
        gradient_checkpointing=False,
        use_vllm=False,
    )
    splits = arithmetic.build_splits()
    student, tokenizer = arithmetic.load_base_model()
    trainer = GRPOTrainer(
        student,
        arithmetic.sum_reward,
        args,
        splits.train,
        eval_dataset=splits.heldout,
        processing_class=tokenizer,
        teacher_model=teacher,
    )
    trainer.train()
    evaluations = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
    return student, [entry["eval_rewards/sum_reward/mean"] for entry in evaluations]


def main(seed: int = 0) -> None:
    torch.set_num_threads(1)  # models this small gain nothing from a second thread
    teacher, _ = train("the-teacher", 512, seed)
    curves = {"rewards": train("rewards", 64, seed)[1], "teacher": train("teacher", 64, seed, teacher)[1]}
    print("held-out accuracy after", *(f"{step:5}" for step in range(0, STEPS + 1, EVERY)), "steps")
    for name, values in curves.items():
        print(f"{name:23}", *(f"{value:5.2f}" for value in values))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
