"""Evaluation during training and after it."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

dataset = load_dataset("trl-lib/DeepMath-103K")

args = GRPOConfig(
    output_dir="Qwen-GRPO",
    eval_strategy="steps",
    eval_steps=1,
    per_device_eval_batch_size=4,
    num_generations_eval=2,
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
    train_dataset=dataset["train"],
    eval_dataset={"easy": dataset["test"].select([0]), "hard": dataset["test"].select([1])},
)
trainer.train()
metrics = trainer.evaluate(eval_dataset=dataset["test"])
assert "eval_reward" in metrics
assert any("eval_easy_runtime" in entry for entry in trainer.state.log_history)
