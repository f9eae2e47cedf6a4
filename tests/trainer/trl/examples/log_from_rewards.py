"""A reward that logs a metric and a column of the table of completions."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def digits(completions, log_extra=None, log_metric=None, **kwargs):
    counts = [sum(letter.isdigit() for letter in completion) for completion in completions]
    if log_extra:
        log_extra("digits", counts)
    if log_metric:
        log_metric("mean_digits", sum(counts) / len(counts))
    return [float(count) for count in counts]


args = GRPOConfig(
    output_dir="Qwen-GRPO",
    log_completions=True,
    num_completions_to_print=2,
    logging_steps=1,
    max_steps=2,
    num_generations=4,
    per_device_train_batch_size=4,
    max_completion_length=8,
    use_vllm=False,
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=digits,
    args=args,
    train_dataset=load_dataset("trl-lib/tldr", split="train"),
)
trainer.train()
assert "mean_digits" in trainer.state.log_history[0]
