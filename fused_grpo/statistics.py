"""What is known of a row's softmax while it is still in parts: blocks, tiles and shards that are merged.

All of it leaves the target t out. With z_t the target's logit, m the shift, s = sum_v e^(z_v - m) and
w = sum_v e^(z_v - m) (z_v - m) over the others, and d = m + log s - z_t,

    log p = -softplus(d)        1 - p = -expm1(log p)        p_v = (1 - p) e^(z_v - m) / s
    H = -p log p + (1 - p) (softplus(-d) + log s - w / s)

so log p is never positive, a token of probability 1 - 1e-9 keeps a log-prob of -1e-9 and its gradient, where a
log-sum-exp minus z_t would round to 0, and the entropy is a sum of terms that are all >= 0: nothing cancels. The
log-sum-exp itself is never formed: next to logits near 1e4 it would be rounded to 1e-3, and every p_v with it.

Any m near the largest of the other logits gives the same, so a pass that reads a row once need not know the largest
beforehand: its shift is the largest of the first columns, and is raised where a later logit is `HEADROOM` above it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

HEADROOM = 16.0
"""How far above the shift of its row a logit may be, in nats, before the shift is raised to it."""

# Up to here both factors of e^d are numbers: s >= 1, and e^(m - z_t) is no more than e^86.
_SMALL_D = 16.0


class RowState(NamedTuple):
    """Of some rows and some of their columns, each [N], over all tokens but the target."""

    shift: Tensor
    """m; -inf where there is nothing but -inf."""
    total: Tensor
    """s."""
    weighted: Tensor
    """w, where the entropy is asked for; else of no meaning."""
    target_logit: Tensor
    """z_t; -inf where the target is not among these columns."""


class Statistics(NamedTuple):
    """Of whole rows, each [N]: what is asked for, and what a gradient needs besides."""

    logprobs: Tensor
    entropy: Tensor | None
    shift: Tensor
    total: Tensor

    def rows(self, rows: slice | Tensor) -> Statistics:
        """Those of some rows."""
        return Statistics(*(None if x is None else x[rows] for x in self))  # type: ignore[arg-type]

    @staticmethod
    def joined(groups: Sequence[Statistics]) -> Statistics:
        """Of consecutive groups of rows."""
        if len(groups) == 1:
            return groups[0]
        columns = zip(*groups, strict=True)
        return Statistics(*(None if some[0] is None else torch.cat(some) for some in columns))  # type: ignore[arg-type]


def no_columns(count: int, *, dtype: torch.dtype, device: torch.device) -> RowState:
    """The state of `count` rows without any column."""
    values = torch.zeros((4, count), dtype=dtype, device=device)
    values[::3] = -torch.inf
    return RowState(*values)


def merge_rows(parts: Sequence[RowState]) -> RowState:
    """The state of rows from those of disjoint parts of their columns."""
    if len(parts) == 1:
        return parts[0]
    shifts, totals, weighted, targets = map(torch.stack, zip(*parts, strict=True))
    shift = shifts.amax(0)
    drop = shifts - finite(shift)
    rescale = drop.exp()
    moved = weighted + drop.clamp_min(-128.0) * totals
    return RowState(shift, (rescale * totals).sum(0), (rescale * moved).sum(0), targets.amax(0))


def with_part(parts: list[RowState], part: RowState) -> list[RowState]:
    """Parts of the same rows and one more, merged eight at a time: few numbers of each row, and few of small sums."""
    return [*parts, part] if len(parts) < 7 else [merge_rows([*parts, part])]


def join_rows(groups: Sequence[RowState]) -> RowState:
    """The state of all rows from those of consecutive groups of them."""
    return groups[0] if len(groups) == 1 else RowState(*map(torch.cat, zip(*groups, strict=True)))


def finish_rows(parts: Sequence[RowState], *, entropy: bool) -> Statistics:
    """The statistics of rows whose every column is in one of these states; log p is -inf where none was the target.

    The states must have been made with the entropy if it is asked for.
    """
    state = merge_rows(parts)
    alone = state.total == 0.0
    total = state.total.masked_fill(alone, 1.0)
    # (m - target) first: the difference of two large numbers is exact, their sums with log(total) are not.
    gap = state.shift - state.target_logit
    d = (gap + total.log()).masked_fill(alone, -torch.inf)
    # A small d that is the difference of larger numbers has their rounding; the logarithm of a product has its own.
    d = torch.where(d.abs() < _SMALL_D, (total * gap.exp()).log(), d)
    logprobs = -softplus(d)
    if not entropy:
        return Statistics(logprobs, None, state.shift, state.total)
    rest = softplus(-d).masked_fill(alone, 0.0) + (total.log() - state.weighted / total)
    entropies = -torch.expm1(logprobs) * rest - logprobs.exp() * logprobs.clamp_min(-128.0)
    return Statistics(logprobs, entropies, state.shift, state.total)


def share_of_others(logprobs: Tensor, total: Tensor) -> Tensor:
    """(1 - p) / s, the factor of e^(z_v - m) in p_v."""
    return -torch.expm1(logprobs) / total.masked_fill(total == 0.0, 1.0)


def finite(shift: Tensor) -> Tensor:
    """A shift for exp: where there is nothing but -inf, any finite one keeps -inf - shift out of NaN."""
    return shift.masked_fill(shift == -torch.inf, 0.0)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), to a few ulp in both tails; torch.logaddexp rounds by where in the tensor an element lies."""
    return x.clamp_min(0.0) + torch.log1p(torch.exp(-x.abs()))
