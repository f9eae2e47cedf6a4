"""Asynchronous rewards, which are awaited at the same time, beside one that is not."""

import asyncio

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


async def remote(prompts, completions, **kwargs):
    await asyncio.sleep(0.01)
    return [1.0 if completion else 0.0 for completion in completions]


async def remote_too(prompts, completions, **kwargs):
    await asyncio.sleep(0.01)
    return [float(len(set(completion))) for completion in completions]


def local(prompts, completions, **kwargs):
    return [float(len(completion)) for completion in completions]


args = GRPOConfig(
    "Qwen-GRPO", max_steps=2, num_generations=4, per_device_train_batch_size=4, max_completion_length=8, use_vllm=False
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=[local, remote, remote_too],
    args=args,
    train_dataset=load_dataset("trl-lib/tldr", split="train"),
)
trainer.train()
