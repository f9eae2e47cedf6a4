"""On-policy distillation: a student learns to carry digits, from rewards alone and with a teacher beside them.

    python examples/distill.py

The task is the built-in one: sums of two-digit numbers, scored by exact match on sums that no run has seen. The student
adds well and carries badly; the teacher is half as wide again and was trained supervised until it carries, too. The
teacher says something about every token, the reward one number about a whole answer. The report of each run, with its
curve, is in runs/distill-*.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.recipes import arithmetic

STEPS, EVERY = 40, 8
# The weights of the divergence from the teacher.
RUNS = {"rewards": 0.0, "teacher": 1.0}


def accuracies(name: str, student: Any, teacher: Any, tokenizer: Any) -> list[float]:
    """The held-out accuracies of a run, every EVERY steps."""
    args = GRPOConfig(
        f"runs/distill-{name}",
        overwrite_output_dir=True,
        max_steps=STEPS,
        per_device_train_batch_size=512,
        num_generations=8,
        max_completion_length=5,
        learning_rate=1e-3,
        warmup_steps=5,
        distillation_coef=RUNS[name],
        distillation_kind="forward_kl",
        eval_steps=EVERY,
        logging_steps=EVERY,
        save_strategy="no",
        gradient_checkpointing=False,
        use_vllm=False,
    )
    splits = arithmetic.build_splits()
    trainer = GRPOTrainer(
        copy.deepcopy(student),
        arithmetic.accuracy_reward,
        args,
        splits.train,
        eval_dataset=splits.heldout,
        processing_class=tokenizer,
        teacher_model=teacher if RUNS[name] else None,
    )
    trainer.train()
    return [entry["eval_reward"] for entry in trainer.state.log_history if "eval_reward" in entry]


def main() -> None:
    torch.set_num_threads(1)  # models this small gain nothing from a second thread
    print("training the student and the teacher, supervised: a minute")
    student, tokenizer = arithmetic.make_base_model()
    teacher, _ = arithmetic.make_base_model(seed=2, target=0.9, hidden_size=96)
    found = {name: accuracies(name, student, teacher, tokenizer) for name in RUNS}
    print("held-out accuracy after", *(f"{step:5}" for step in range(0, STEPS + 1, EVERY)), "steps")
    for name, values in found.items():
        print(f"{name:23}", *(f"{value:5.2f}" for value in values))


if __name__ == "__main__":
    main()
