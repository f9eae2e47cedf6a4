"""GRPO without the logits: fused log-prob and loss ops (the trainer is `fused_grpo.trainer`).

The ops (`linear_logprobs`, `grpo_loss`, `fused_linear_grpo_loss`, `fused_linear_divergence`) work from hidden states
and the `lm_head` weight; the `[tokens, vocab]` logits never exist. Exports are lazy: importing this package imports
torch and nothing else. Triton, vLLM and transformers are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fused_grpo.config import GRPOLossConfig as GRPOLossConfig
    from fused_grpo.divergence import Distillation as Distillation
    from fused_grpo.divergence import DivergenceOutput as DivergenceOutput
    from fused_grpo.divergence import fused_linear_divergence as fused_linear_divergence
    from fused_grpo.errors import FusedGRPOError as FusedGRPOError
    from fused_grpo.fused_loss import FusedLinearGRPOLoss as FusedLinearGRPOLoss
    from fused_grpo.fused_loss import fused_linear_grpo_loss as fused_linear_grpo_loss
    from fused_grpo.logprobs import LogProbOutputs as LogProbOutputs
    from fused_grpo.logprobs import LogProbs as LogProbs
    from fused_grpo.logprobs import linear_logprobs as linear_logprobs
    from fused_grpo.logprobs import linear_logprobs_and_entropy as linear_logprobs_and_entropy
    from fused_grpo.loss import GRPOLossOutput as GRPOLossOutput
    from fused_grpo.loss import grpo_loss as grpo_loss

__version__ = "0.1.0.dev0"

_HOME = {
    "Distillation": "divergence",
    "DivergenceOutput": "divergence",
    "FusedGRPOError": "errors",
    "FusedLinearGRPOLoss": "fused_loss",
    "GRPOLossConfig": "config",
    "GRPOLossOutput": "loss",
    "LogProbOutputs": "logprobs",
    "LogProbs": "logprobs",
    "fused_linear_divergence": "divergence",
    "fused_linear_grpo_loss": "fused_loss",
    "grpo_loss": "loss",
    "linear_logprobs": "logprobs",
    "linear_logprobs_and_entropy": "logprobs",
}

__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fused_grpo' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"fused_grpo.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
