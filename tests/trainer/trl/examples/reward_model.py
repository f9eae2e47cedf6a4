"""A reward model by its name, beside a function."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def short(completions, **kwargs):
    return [-float(len(completion[0]["content"])) for completion in completions]


args = GRPOConfig(
    "Qwen-GRPO", max_steps=2, num_generations=4, per_device_train_batch_size=4, max_completion_length=8, use_vllm=False
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=["trl-lib/Qwen2-0.5B-Reward", short],
    args=args,
    train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
)
trainer.train()
