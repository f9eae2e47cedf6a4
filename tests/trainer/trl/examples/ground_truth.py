"""A custom reward that compares with a column of the data set."""

import re

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

dataset = load_dataset("trl-lib/tldr", split="train").rename_column("solution", "ground_truth")


def correct(completions, ground_truth, **kwargs):
    answers = [re.search(r"(\d+)", completion) for completion in completions]
    given = [match.group(1) if match else "" for match in answers]
    return [1.0 if answer in truth else 0.0 for answer, truth in zip(given, ground_truth, strict=True)]


args = GRPOConfig(
    "Qwen-GRPO", max_steps=2, num_generations=4, per_device_train_batch_size=4, max_completion_length=8, use_vllm=False
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=correct,
    args=args,
    train_dataset=dataset,
)
trainer.train()
