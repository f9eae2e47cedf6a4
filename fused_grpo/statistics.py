"""What is known of a row's softmax while it is still in parts: tiles that are folded in, shards that are merged.

All of it leaves the target t out. With z_t the target's logit, m the maximum of the others, s = sum_v e^(z_v - m),
w = sum_v e^(z_v - m) (z_v - m) and d = m + log s - z_t,

    log p = -softplus(d)        1 - p = -expm1(log p)        p_v = (1 - p) e^(z_v - m) / s
    H = -p log p + (1 - p) (softplus(-d) + log s - w / s)

so log p is never positive, a token of probability 1 - 1e-9 keeps a log-prob of -1e-9 and its gradient, where a
log-sum-exp minus z_t would round to 0, and the entropy is a sum of terms that are all >= 0: nothing cancels. The
log-sum-exp itself is never formed: next to logits near 1e4 it would be rounded to 1e-3, and every p_v with it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RowState(NamedTuple):
    """What is known of some rows while tiles are folded in: each [N], over all tokens but the target."""

    maximum: Tensor
    """m, the largest logit so far."""
    total: Tensor
    """s."""
    weighted: Tensor
    """w, where the entropy is asked for."""
    target_logit: Tensor

    def rows(self, rows: slice) -> RowState:
        """Views of these rows."""
        return RowState(*(value[rows] for value in self))


def start_rows(count: int, *, dtype: torch.dtype, device: torch.device) -> RowState:
    """The state of `count` rows that have seen no logit."""
    values = torch.zeros((4, count), dtype=dtype, device=device)
    values[::3] = -torch.inf
    return RowState(*values)


def finish_rows(state: RowState) -> tuple[Tensor, Tensor]:
    """(log p, entropy) of rows whose every logit was folded in; -inf and H of the rest where no tile had the target.

    The entropy means nothing unless all tiles were folded with `entropy`.
    """
    alone = state.total == 0.0
    total = state.total.masked_fill(alone, 1.0)
    # (maximum - target) first: the difference of two large numbers is exact, their sums with log(total) are not.
    d = ((state.maximum - state.target_logit) + total.log()).masked_fill(alone, -torch.inf)
    logprobs = -softplus(d)
    rest = softplus(-d).masked_fill(alone, 0.0) + (total.log() - state.weighted / total)
    entropy = -torch.expm1(logprobs) * rest - logprobs.exp() * logprobs.clamp_min(-128.0)
    return logprobs, entropy


def merge_rows(parts: RowState) -> RowState:
    """The state [N] of rows from those of S parts of the vocabulary, each [S, N]."""
    maximum = parts.maximum.amax(0)
    drop = parts.maximum - finite(maximum)
    rescale = drop.exp()
    total = (rescale * parts.total).sum(0)
    weighted = (rescale * (parts.weighted + drop.clamp_min(-128.0) * parts.total)).sum(0)
    return RowState(maximum, total, weighted, parts.target_logit.amax(0))


def share_of_others(logprobs: Tensor, total: Tensor) -> Tensor:
    """(1 - p) / s, the factor of e^(z_v - m) in p_v."""
    return -torch.expm1(logprobs) / total.masked_fill(total == 0.0, 1.0)


def finite(maximum: Tensor) -> Tensor:
    """A shift for exp: where there is nothing but -inf, any finite one keeps -inf - shift out of NaN."""
    return maximum.masked_fill(maximum == -torch.inf, 0.0)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), to a few ulp in both tails; torch.logaddexp rounds by where in the tensor an element lies."""
    return x.clamp_min(0.0) + torch.log1p(torch.exp(-x.abs()))
