"""LoRA: an adapter alone is trained, and saved."""

from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

args = GRPOConfig(
    "Qwen-GRPO-LoRA",
    learning_rate=1e-5,
    max_steps=2,
    num_generations=4,
    per_device_train_batch_size=4,
    max_completion_length=8,
    use_vllm=False,
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=accuracy_reward,
    args=args,
    train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    peft_config=LoraConfig(r=32, lora_alpha=16, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
trainer.save_model("adapter")
