"""Triton kernels for GRPO without the logits, one pass per file, and the launchers that call them.

This package imports torch and triton and nothing else. The launchers are thin: they take tensors that are already
checked (shapes, dtypes, targets inside the vocabulary) and do no autograd. `fused_grpo` checks arguments,
differentiates, and selects among them.
"""

from ._device import is_available
from .divergence import Divergence, divergence_gradient_
from .finish_rows import finish_rows
from .grpo_loss import grpo_token_loss, token_statistics
from .logits_gradient import logits_gradient_
from .logprob_forward import logprob_forward
from .scale_hidden import scale_, scale_hidden
from .softmax_weights import empty_tile, row_statistics, softmax_weights_
from .softmax_weights_forward import softmax_weights_forward
from .support import entry_logits, weighted_rows_
from .targets import clean_targets
from .tuning import prefers_softmax_weights, prefers_tiles

__all__ = [
    "Divergence",
    "clean_targets",
    "divergence_gradient_",
    "empty_tile",
    "entry_logits",
    "finish_rows",
    "grpo_token_loss",
    "is_available",
    "logits_gradient_",
    "logprob_forward",
    "prefers_softmax_weights",
    "prefers_tiles",
    "row_statistics",
    "scale_",
    "scale_hidden",
    "softmax_weights_",
    "softmax_weights_forward",
    "token_statistics",
    "weighted_rows_",
]
