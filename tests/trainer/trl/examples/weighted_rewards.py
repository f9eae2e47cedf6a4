"""Several rewards with weights, each normalised before they are summed (GDPO)."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import get_soft_overlong_punishment, think_format_reward

args = GRPOConfig(
    output_dir="Qwen-GRPO",
    reward_weights=[1.0, 0.5],
    multi_objective_aggregation="normalize_then_sum",
    scale_rewards="batch",
    max_steps=2,
    num_generations=4,
    per_device_train_batch_size=4,
    max_completion_length=8,
    use_vllm=False,
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=[think_format_reward, get_soft_overlong_punishment(max_completion_len=8, soft_punish_cache=6)],
    args=args,
    train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
)
trainer.train()
