"""The correctness check: an implementation is timed only after a small version of its work agrees with fp64.

The allowed error follows from the dtype alone: a share of its rounding, with room for sums. In bf16 and fp16 it allows
the error of logits that are rounded to that dtype, as most implementations do; a wrong formula exceeds it by far.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fused_grpo.bench.heads.implementations import Implementation, exact
from fused_grpo.bench.heads.work import Work, batch_of

# The allowed absolute error of log-probs, and error of gradients relative to their norm: where p is near 1, 1 - p loses
# digits if it is computed as a difference.
ALLOWED = {"float32": (2e-5, 1e-4), "bfloat16": (0.15, 0.05), "float16": (0.02, 0.02), "float64": (1e-10, 1e-10)}


class Errors(NamedTuple):
    """Errors of an implementation against fp64."""

    value: float
    """Largest error of a log-prob in nats, or the error of the loss."""
    d_hidden: float | None
    """Norm of the error over the norm of the gradient."""
    d_weight: float | None

    def too_large(self, work: Work) -> bool:
        """Whether the implementation fails the check; NaN does."""
        most, most_of_gradients = ALLOWED[work.dtype]
        most = most / 5 if work.kind != "logprobs" else most  # errors of tokens cancel in part
        gradients = [x for x in (self.d_hidden, self.d_weight) if x is not None]
        return not (self.value <= most and all(x <= most_of_gradients for x in gradients))


def errors_of(implementation: Implementation, work: Work, device: str) -> Errors:
    """Errors on the work at its small size."""
    small = work.small()
    batch = batch_of(small, device)
    right, result = exact(batch, small), implementation.run(batch, small)
    value = (result.value.double() - right.value).abs().max().item()
    return Errors(value, _relative(result.d_hidden, right.d_hidden), _relative(result.d_weight, right.d_weight))


def _relative(gradient: Tensor | None, right: Tensor | None) -> float | None:
    if right is None:
        return None
    if gradient is None:
        return float("nan")
    off, length = torch.linalg.vector_norm(gradient.double() - right), torch.linalg.vector_norm(right)
    return float(off / length.clamp_min(torch.finfo(torch.float64).tiny))
