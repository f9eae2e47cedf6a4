"""Rewards of several tasks: a function returns None for the rows of another task."""

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

dataset = Dataset.from_list(
    [
        {"prompt": "What is 2+2?", "task": "math"},
        {"prompt": "Write a function that returns a sum.", "task": "code"},
        {"prompt": "What is 3*4?", "task": "math"},
        {"prompt": "Write a function that returns a product.", "task": "code"},
    ]
)


def math_reward(completions, task, **kwargs):
    pairs = zip(completions, task, strict=True)
    return [sum(letter.isdigit() for letter in text) / 8 if kind == "math" else None for text, kind in pairs]


def code_reward(completions, task, **kwargs):
    pairs = zip(completions, task, strict=True)
    return [sum(letter.isalpha() for letter in text) / 8 if kind == "code" else None for text, kind in pairs]


args = GRPOConfig(
    "Qwen-GRPO", max_steps=2, num_generations=4, per_device_train_batch_size=8, max_completion_length=8, use_vllm=False
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=[math_reward, code_reward],
    args=args,
    train_dataset=dataset,
)
trainer.train()
