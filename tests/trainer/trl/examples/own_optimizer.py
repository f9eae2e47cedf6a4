"""An optimizer and a schedule of one's own, a model and a tokenizer that are loaded already."""

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup
from trl import GRPOConfig, GRPOTrainer

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct", dtype="float32")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct", padding_side="left")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)


def long(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


args = GRPOConfig(
    "Qwen-GRPO", max_steps=2, num_generations=4, per_device_train_batch_size=4, max_completion_length=8, use_vllm=False
)
trainer = GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    reward_funcs=long,
    args=args,
    train_dataset=load_dataset("trl-lib/tldr", split="train"),
    optimizers=(optimizer, get_cosine_schedule_with_warmup(optimizer, 1, 2)),
)
trainer.train()
