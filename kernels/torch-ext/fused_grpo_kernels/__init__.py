"""Triton kernels for GRPO without the logits, one pass per file, and the launchers that call them.

Imports torch and triton and nothing else. The launchers are thin: they take tensors that are already right (shapes,
dtypes, targets inside the vocabulary) and do no autograd. `fused_grpo` validates, differentiates and picks among them.
"""

from ._device import is_available
from .fold_tile import fold_tile_
from .grpo_loss import grpo_token_loss
from .logits_gradient import logits_gradient_
from .logprob_forward import logprob_forward
from .row_statistics import row_statistics

__all__ = ["fold_tile_", "grpo_token_loss", "is_available", "logits_gradient_", "logprob_forward", "row_statistics"]
