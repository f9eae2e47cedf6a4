"""A custom reward in conversations: the completion has tags in a certain order."""

import re

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def format_reward(prompts, completions, **kwargs):
    assert all(prompt[0]["role"] == "user" for prompt in prompts)
    contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(r"^<think>.*?</think><answer>.*?</answer>$", content) for content in contents]
    return [1.0 if match else float(len(content)) / 100 for match, content in zip(matches, contents, strict=True)]


args = GRPOConfig(
    "Qwen-GRPO", max_steps=2, num_generations=4, per_device_train_batch_size=4, max_completion_length=8, use_vllm=False
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=format_reward,
    args=args,
    train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
)
trainer.train()
