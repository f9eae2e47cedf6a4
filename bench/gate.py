"""Nothing wrong is timed: every contender answers a small version of the question first, against an oracle in fp64.

What is allowed follows from the dtype alone: a share of its rounding, times room for sums. In bf16 and fp16 a contender
may be as far off as one that rounds its logits to that dtype, as most do; a wrong formula is far beyond it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fused_grpo.bench.contenders import Contender, exact
from fused_grpo.bench.work import Work, batch_of

# Of the log-probs, absolutely, and of the gradients, relative to their norm: where a model is sure of itself, 1 - p
# loses digits if it is taken as a difference.
ALLOWED = {"float32": (2e-5, 1e-4), "bfloat16": (0.15, 0.05), "float16": (0.02, 0.02), "float64": (1e-10, 1e-10)}


class Errors(NamedTuple):
    """How far a contender is from fp64."""

    value: float
    """Largest error of a log-prob in nats, or that of the loss."""
    d_hidden: float | None
    """Length of the error over the length of the gradient."""
    d_weight: float | None

    def too_large(self, work: Work) -> bool:
        """Whether the contender is to be turned away. NaN is."""
        most, most_of_gradients = ALLOWED[work.dtype]
        most = most / 5 if work.kind == "loss" else most  # errors of its tokens are of either sign
        gradients = [x for x in (self.d_hidden, self.d_weight) if x is not None]
        return not (self.value <= most and all(x <= most_of_gradients for x in gradients))


def errors_of(contender: Contender, work: Work, device: str) -> Errors:
    """On the work at its small size."""
    small = work.small()
    batch = batch_of(small, device)
    right, result = exact(batch, small), contender.run(batch, small)
    value = (result.value.double() - right.value).abs().max().item()
    return Errors(value, _relative(result.d_hidden, right.d_hidden), _relative(result.d_weight, right.d_weight))


def _relative(gradient: Tensor | None, right: Tensor | None) -> float | None:
    if right is None:
        return None
    if gradient is None:
        return float("nan")
    off, length = torch.linalg.vector_norm(gradient.double() - right), torch.linalg.vector_norm(right)
    return float(off / length.clamp_min(torch.finfo(torch.float64).tiny))
