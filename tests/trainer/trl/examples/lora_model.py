"""A model that has its adapter already, which a KL term keeps near where it was."""

from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct", dtype="float32")
model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian"))


def long(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


args = GRPOConfig(
    output_dir="Qwen-GRPO-LoRA",
    beta=0.04,
    gradient_checkpointing=False,
    max_steps=2,
    num_generations=4,
    per_device_train_batch_size=4,
    max_completion_length=8,
    use_vllm=False,
)
trainer = GRPOTrainer(model=model, reward_funcs=long, args=args, train_dataset=load_dataset("trl-lib/tldr")["train"])
trainer.train()
