"""Rewards: what a completion was worth, asked of functions and models, checked before an advantage is computed from it.

    scorer        `Rewards`: all functions of a run, called on a batch
    calling       one function, called with what it names, and what it returned, checked
    failures      what becomes of a call that failed: fail, retry, drop the groups it touches
    loading       functions by name
    models        sequence-classification models as reward functions
    isolation     a function in a process that can be killed (its other end: worker)
    library       ready-made rewards; math_answers is the part of them that runs isolated

Exports are lazy: the isolated process imports this package and should not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fused_grpo.trainer.rewards.calling import RewardFunction
    from fused_grpo.trainer.rewards.isolation import isolated
    from fused_grpo.trainer.rewards.library import (
        accuracy_reward,
        format_reward,
        length_reward,
        soft_overlong_punishment,
    )
    from fused_grpo.trainer.rewards.loading import load_reward
    from fused_grpo.trainer.rewards.models import RewardModel
    from fused_grpo.trainer.rewards.scorer import RewardOutput, Rewards

_HOME = {
    "RewardFunction": "calling",
    "RewardModel": "models",
    "RewardOutput": "scorer",
    "Rewards": "scorer",
    "accuracy_reward": "library",
    "format_reward": "library",
    "isolated": "isolation",
    "length_reward": "library",
    "load_reward": "loading",
    "soft_overlong_punishment": "library",
}

__all__ = [
    "RewardFunction",
    "RewardModel",
    "RewardOutput",
    "Rewards",
    "accuracy_reward",
    "format_reward",
    "isolated",
    "length_reward",
    "load_reward",
    "soft_overlong_punishment",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fused_grpo.trainer.rewards' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fused_grpo.trainer.rewards.{_HOME[name]}"), name)
