"""A reward that depends on the progress of the run."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

seen = []


def longer_and_longer(completions, trainer_state, **kwargs):
    seen.append(trainer_state.global_step)
    target = 8 * (trainer_state.global_step + 1) / trainer_state.max_steps
    return [-abs(len(completion) - target) for completion in completions]


args = GRPOConfig(
    "Qwen-GRPO", max_steps=2, num_generations=4, per_device_train_batch_size=4, max_completion_length=8, use_vllm=False
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=longer_and_longer,
    args=args,
    train_dataset=load_dataset("trl-lib/tldr", split="train"),
)
trainer.train()
assert seen == [0, 1]
