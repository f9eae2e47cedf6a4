"""The standalone GRPO trainer: rollout, reward, advantage, batch, step, sync, log.

`GRPOTrainer` and `GRPOConfig` take TRL's names. Exports are lazy: reading a config does not import transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fused_grpo.trainer.config import GRPOConfig
    from fused_grpo.trainer.loop import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]

_HOME = {"GRPOConfig": "config", "GRPOTrainer": "loop"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fused_grpo.trainer' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fused_grpo.trainer.{_HOME[name]}"), name)
