"""A custom reward: longer completions, in tokens and in characters."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def tokens(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def characters(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


args = GRPOConfig(
    "Qwen-GRPO", max_steps=2, num_generations=4, per_device_train_batch_size=4, max_completion_length=8, use_vllm=False
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=[tokens, characters],
    args=args,
    train_dataset=load_dataset("trl-lib/tldr", split="train"),
)
trainer.train()
