"""A run that goes on from its newest checkpoint."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def long(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def make(max_steps):
    args = GRPOConfig(
        output_dir="Qwen-GRPO",
        save_steps=1,
        max_steps=max_steps,
        lr_scheduler_type="constant",
        num_generations=4,
        per_device_train_batch_size=4,
        max_completion_length=8,
        use_vllm=False,
    )
    dataset = load_dataset("trl-lib/tldr", split="train")
    return GRPOTrainer(model="Qwen/Qwen2.5-0.5B-Instruct", reward_funcs=long, args=args, train_dataset=dataset)


make(1).train()
trainer = make(2)
trainer.train(resume_from_checkpoint=True)
