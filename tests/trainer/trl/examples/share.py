"""After training: the result, the model and its card."""

from pathlib import Path

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

args = GRPOConfig(
    "Qwen-GRPO", max_steps=2, num_generations=4, per_device_train_batch_size=4, max_completion_length=8, use_vllm=False
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=accuracy_reward,
    args=args,
    train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
)
result = trainer.train()
trainer.log_metrics("train", result.metrics)
trainer.save_metrics("train", result.metrics)
trainer.save_state()
if trainer.is_world_process_zero():
    trainer.create_model_card(model_name="sums", dataset_name="trl-lib/DeepMath-103K", tags=["math"])
trainer.save_model(args.output_dir)
assert result.metrics["train_runtime"] > 0
assert "math" in Path("Qwen-GRPO/README.md").read_text()
