"""On-policy distillation: a student learns from rewards alone, and again with the first run's model as its teacher.

    python examples/distill.py

The task is the built-in one: sums of two-digit numbers, scored by exact match on sums that no run has seen. The base
model adds and rarely carries. The first run finds out from rewards how to carry; the second starts again from the base
model, and learns from what the first has become: a teacher says something about every token, a reward one number about
a whole answer. The report of each run, with its curve, is in runs/distill-*.
"""

from __future__ import annotations

from typing import Any

import torch

from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.recipes import arithmetic

STEPS, EVERY = 24, 4


def train(name: str, seed: int, teacher: Any = None) -> tuple[Any, list[float]]:
    """The trained model of a run, and its held-out accuracies, every EVERY steps."""
    args = GRPOConfig(
        f"runs/distill-{name}",
        overwrite_output_dir=True,
        seed=seed,
        max_steps=STEPS,
        per_device_train_batch_size=512,
        num_generations=8,
        max_completion_length=5,
        learning_rate=1e-3,
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
        arithmetic.accuracy_reward,
        args,
        splits.train,
        eval_dataset=splits.heldout,
        processing_class=tokenizer,
        teacher_model=teacher,
    )
    trainer.train()
    return student, [entry["eval_reward"] for entry in trainer.state.log_history if "eval_reward" in entry]


def main(seed: int = 0) -> dict[str, list[float]]:
    torch.set_num_threads(1)  # models this small gain nothing from a second thread
    teacher, rewards = train("rewards", seed)
    _, distilled = train("teacher", seed, teacher)
    print("held-out accuracy after", *(f"{step:5}" for step in range(0, STEPS + 1, EVERY)), "steps")
    for name, values in (("rewards", rewards), ("teacher", distilled)):
        print(f"{name:23}", *(f"{value:5.2f}" for value in values))
    return {"rewards": rewards, "teacher": distilled}


if __name__ == "__main__":
    main()
