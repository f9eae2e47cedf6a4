"""The row passes in plain torch: the path for CPUs, and for any device without Triton.

They are the same passes as those of `fused_grpo.kernels`, so the algorithms are written once, over either module.
`logits` [R, C] is always a tile of raw h.w: some rows, and the whole vocabulary or a slice of it. The passes visit it
in blocks of columns that fit the caches. A block is exponentiated, summed and differentiated while it is in cache, in
place or in scratch memory of its size. That keeps the peak at one tile, and it is fast on a CPU. The numerics are those
of `statistics.py`.

A tile is column-major: a GEMM then packs the hidden states, which fit a cache, for each block of W, and not W.
"""

from torch import Tensor

from fused_grpo._maths.formulas import token_statistics
from fused_grpo._maths.statistics import finish_rows
from fused_grpo.passes.protocol import LogprobForward, SoftmaxWeightsForward
from fused_grpo.passes.torch_passes.divergence import Divergence, divergence_gradient_
from fused_grpo.passes.torch_passes.kept_tokens import entry_logits, weighted_rows_
from fused_grpo.passes.torch_passes.row_passes import (
    clean_targets,
    grpo_token_loss,
    logits_gradient_,
    row_statistics,
    scale_,
    scale_hidden,
    softmax_weights_,
)
from fused_grpo.passes.torch_passes.tile import empty_tile

__all__ = [
    "Divergence",
    "clean_targets",
    "divergence_gradient_",
    "empty_tile",
    "entry_logits",
    "finish_rows",
    "grpo_token_loss",
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

# Both are GEMMs that reduce or exponentiate what they multiply, which torch has none of.
logprob_forward: LogprobForward | None = None
softmax_weights_forward: SoftmaxWeightsForward | None = None


def prefers_tiles(hidden: Tensor) -> bool:
    """Always: there is no `logprob_forward`."""
    return True


def prefers_softmax_weights(hidden: Tensor, weight: Tensor, rows: int) -> bool:
    """Never: there is no `softmax_weights_forward`."""
    return False
