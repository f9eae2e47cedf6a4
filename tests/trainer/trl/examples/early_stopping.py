"""transformers' EarlyStoppingCallback, on the reward of an eval set that cannot rise."""

from datasets import load_dataset
from transformers import EarlyStoppingCallback
from trl import GRPOConfig, GRPOTrainer


def same(completions, **kwargs):
    return [1.0 for _ in completions]


dataset = load_dataset("trl-lib/tldr")
args = GRPOConfig(
    output_dir="Qwen-GRPO",
    eval_strategy="steps",
    eval_steps=1,
    save_steps=1,
    per_device_eval_batch_size=4,
    metric_for_best_model="eval_reward",
    greater_is_better=True,
    load_best_model_at_end=True,
    max_steps=50,
    num_generations=4,
    per_device_train_batch_size=4,
    max_completion_length=8,
    use_vllm=False,
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=same,
    args=args,
    train_dataset=dataset["train"],
    eval_dataset=dataset["test"],
    callbacks=[EarlyStoppingCallback(early_stopping_patience=1)],
)
trainer.train()
assert trainer.state.best_metric == 1.0
assert trainer.state.best_global_step == 1
