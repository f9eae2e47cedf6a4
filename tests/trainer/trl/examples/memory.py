"""Options that save memory and time: accumulation, checkpointing of activations, attention, chunks of the head."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def long(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


args = GRPOConfig(
    output_dir="Qwen-GRPO",
    gradient_checkpointing=True,
    gradient_checkpointing_kwargs={"use_reentrant": False},
    gradient_accumulation_steps=2,
    model_init_kwargs={"attn_implementation": "sdpa", "dtype": "float32"},
    generation_batch_size=8,
    optim="adamw_torch",
    save_only_model=True,
    save_total_limit=1,
    max_steps=2,
    num_generations=4,
    per_device_train_batch_size=4,
    max_completion_length=8,
    use_vllm=False,
    bf16=False,
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=long,
    args=args,
    train_dataset=load_dataset("trl-lib/tldr", split="train"),
)
trainer.train()
