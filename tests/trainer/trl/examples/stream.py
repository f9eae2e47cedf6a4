"""A data set that is streamed, for training and for evaluation."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

args = GRPOConfig(
    output_dir="Qwen-GRPO",
    eval_strategy="steps",
    eval_steps=2,
    per_device_eval_batch_size=4,
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
    train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train", streaming=True),
    eval_dataset=load_dataset("trl-lib/DeepMath-103K", split="test", streaming=True),
)
trainer.train()
