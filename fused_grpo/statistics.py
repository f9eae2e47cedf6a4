"""What is known of a row's softmax while it is still in parts: tiles that are folded in, shards that are merged.

All of it leaves the target t out. With z_t the target's logit, m the largest logit of the others,
s = sum_v e^(z_v - m), w = sum_v e^(z_v - m) (z_v - m) and d = m + log s - z_t,

    log p = -softplus(d)        1 - p = -expm1(log p)        p_v = (1 - p) e^(z_v - m) / s
    H = -p log p + (1 - p) (softplus(-d) + log s - w / s)

so log p is never positive, a token of probability 1 - 1e-9 keeps a log-prob of -1e-9 and its gradient, where a
log-sum-exp minus z_t would round to 0, and the entropy is a sum of terms that are all >= 0: nothing cancels. The
log-sum-exp itself is never formed: next to logits near 1e4 it would be rounded to 1e-3, and every p_v with it.

Any m near the largest logit gives the same, and one that is known beforehand spares the pass that looks for it: an
**anchor**, which is 0, or the largest of a row's first few logits where that is far from 0. A row whose s leaves the
range of exact sums all the same, as logits 50 above the anchor do, is folded again with the largest logit. Where the
entropy is asked for there is no anchor: w / s would cancel against log s.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

ANCHOR_HOLDS = math.exp(-70.0), math.exp(50.0)
"""The sums s that are exact in fp32, and leave room for what is multiplied by them."""

_NEAR_ZERO = 20.0  # leaves 30 for what is above the few logits that are looked at

# Up to here both factors of e^d are numbers: s >= e^-70, and e^(m - z_t) is no more than e^86.
_SMALL_D = 16.0


class RowState(NamedTuple):
    """What is known of some rows while tiles are folded in: each [N], over all tokens but the target."""

    shift: Tensor
    """m, the largest logit so far, or the anchor."""
    total: Tensor
    """s."""
    weighted: Tensor
    """w, where the entropy is asked for."""
    target_logit: Tensor

    def rows(self, rows: slice) -> RowState:
        """Views of these rows."""
        return RowState(*(value[rows] for value in self))

    def put(self, rows: Tensor, state: RowState) -> None:
        """In the place of these rows."""
        for mine, theirs in zip(self, state, strict=True):
            mine[rows] = theirs


def start_rows(count: int, *, dtype: torch.dtype, device: torch.device) -> RowState:
    """The state of `count` rows that have seen no logit; m is -inf."""
    values = torch.zeros((4, count), dtype=dtype, device=device)
    values[::3] = -torch.inf
    return RowState(*values)


def anchors(few: Tensor) -> Tensor:
    """The anchor of each row, from the largest of its first logits; 0 spares the pass that subtracts it."""
    return torch.where((few.abs() > _NEAR_ZERO) & few.isfinite(), few, 0.0)


def adrift(state: RowState) -> Tensor | None:
    """The rows, an index, whose anchor is too far from the other logits for their sums to be exact; None for none."""
    low, high = ANCHOR_HOLDS
    held = (state.total > low) & (state.total < high)
    return None if held.all() else (~held).nonzero()[:, 0]


def finish_rows(state: RowState) -> tuple[Tensor, Tensor]:
    """(log p, entropy) of rows whose every logit was folded in; -inf and H of the rest where no tile had the target.

    The entropy means nothing unless all tiles were folded with `entropy`.
    """
    alone = state.total == 0.0
    total = state.total.masked_fill(alone, 1.0)
    # (m - target) first: the difference of two large numbers is exact, their sums with log(total) are not.
    gap = state.shift - state.target_logit
    d = (gap + total.log()).masked_fill(alone, -torch.inf)
    # A small d that is the difference of larger numbers has their rounding; the logarithm of a product has its own.
    d = torch.where(d.abs() < _SMALL_D, (total * gap.exp()).log(), d)
    logprobs = -softplus(d)
    rest = softplus(-d).masked_fill(alone, 0.0) + (total.log() - state.weighted / total)
    entropy = -torch.expm1(logprobs) * rest - logprobs.exp() * logprobs.clamp_min(-128.0)
    return logprobs, entropy


def merge_rows(parts: RowState) -> RowState:
    """The state [N] of rows from those of S parts of the vocabulary, each [S, N]."""
    shift = parts.shift.amax(0)
    drop = parts.shift - finite(shift)
    rescale = drop.exp()
    total = (rescale * parts.total).sum(0)
    weighted = (rescale * (parts.weighted + drop.clamp_min(-128.0) * parts.total)).sum(0)
    return RowState(shift, total, weighted, parts.target_logit.amax(0))


def share_of_others(logprobs: Tensor, total: Tensor) -> Tensor:
    """(1 - p) / s, the factor of e^(z_v - m) in p_v."""
    return -torch.expm1(logprobs) / total.masked_fill(total == 0.0, 1.0)


def finite(shift: Tensor) -> Tensor:
    """A shift for exp: where there is nothing but -inf, any finite one keeps -inf - shift out of NaN."""
    return shift.masked_fill(shift == -torch.inf, 0.0)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), to a few ulp in both tails; torch.logaddexp rounds by where in the tensor an element lies."""
    return x.clamp_min(0.0) + torch.log1p(torch.exp(-x.abs()))
