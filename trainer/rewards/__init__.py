"""Reward functions and reward models: called on completions, with their results checked.

reward_functions  `Rewards`: all functions of a run, called on a batch; retries, dropped groups; reward models
reward_call       one function: its name, its arguments, its timeout, checks of what it returns
isolation         a function in a process of its own (worker.py is that process)
builtin_rewards   ready-made rewards and their short names (math_answers.py is the part that runs isolated)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fused_grpo.trainer.rewards.builtin_rewards import (
    accuracy,
    accuracy_reward,
    format_reward,
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    length_reward,
    reasoning_accuracy_reward,
    soft_overlong_punishment,
    think_format_reward,
)
from fused_grpo.trainer.rewards.isolation import isolated
from fused_grpo.trainer.rewards.reward_call import RewardFunction, load_reward

if TYPE_CHECKING:
    from fused_grpo.trainer.rewards.reward_functions import RewardModel, RewardOutput, Rewards

__all__ = [
    "RewardFunction",
    "RewardModel",
    "RewardOutput",
    "Rewards",
    "accuracy",
    "accuracy_reward",
    "format_reward",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "isolated",
    "length_reward",
    "load_reward",
    "reasoning_accuracy_reward",
    "soft_overlong_punishment",
    "think_format_reward",
]


def __getattr__(name: str) -> Any:
    if name in __all__:  # imported when used: it imports torch, and the process of an isolated reward this package
        return getattr(importlib.import_module("fused_grpo.trainer.rewards.reward_functions"), name)
    raise AttributeError(f"module 'fused_grpo.trainer.rewards' has no attribute {name!r}")
