"""On-policy distillation: a student learns to carry digits from rewards alone, from a teacher alone, and from both.

    python examples/distill.py

The task is the built-in one: sums of two-digit numbers, scored by exact match on sums that no run has seen. The student
adds well and carries badly; the teacher was trained supervised until it carries, too. The teacher says something about
every token, and the reward one number about a whole answer. The report of each run is in runs/distill-*.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.recipes import arithmetic

STEPS, EVERY = 40, 8
# The weights of the reward and of the divergence from the teacher.
RUNS = {"rewards": (1.0, 0.0), "teacher": (0.0, 1.0), "both": (1.0, 1.0)}


def accuracies(name: str, student: Any, teacher: Any, tokenizer: Any) -> list[float]:
    """The held-out accuracies of a run, every EVERY steps."""
    of_reward, of_teacher = RUNS[name]
    args = GRPOConfig(
        f"runs/distill-{name}",
        overwrite_output_dir=True,
        max_steps=STEPS,
        per_device_train_batch_size=256,
        num_generations=8,
        max_completion_length=5,
        learning_rate=1e-3,
        reward_weights=[of_reward],  # a reward of weight 0 is measured, and nothing is learnt from it
        distillation_coef=of_teacher,
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
        teacher_model=teacher if of_teacher else None,
    )
    trainer.train()
    history = trainer.state.log_history
    return [entry[key] for entry in history for key in ("eval_rewards/accuracy_reward/mean",) if key in entry]


def main() -> dict[str, list[float]]:
    torch.set_num_threads(1)  # models this small gain nothing from a second thread
    print("training the student and the teacher, supervised: half a minute")
    student, tokenizer = arithmetic.make_base_model()
    teacher, _ = arithmetic.make_base_model(seed=2, target=0.97)
    found = {name: accuracies(name, student, teacher, tokenizer) for name in RUNS}
    print("held-out accuracy after", *(f"{step:5}" for step in range(0, STEPS + 1, EVERY)), "steps")
    for name, values in found.items():
        print(f"{name:23}", *(f"{value:5.2f}" for value in values))
    return found


if __name__ == "__main__":
    main()
