"""What else the logits of a row give: the sum of squared probabilities, the mean logit, whether the target leads.

With z the logits of a row, t its target, and m and s as in `statistics.py`, of all tokens but the target, and

    s2 = sum_v e^(2 (z_v - m))
    sum_v p_v^2 = p^2 + (1 - p)^2 s2 / s^2

which is a sum of terms that are all >= 0. With it, the gradient of log p in the logits has the squared norm

    sum_v (1[v = t] - p_v)^2 = 1 - 2 p + sum_v p_v^2 = (1 - p)^2 + (sum_v p_v^2 - p^2)

Parts of the columns merge as those of s do: s2 of each is rescaled by e^(2 (m_part - m)). The mean logit is the sum of
all z, the target's too, divided by V.

The target leads (`is_top1`) if it is what `z.argmax()` returns, the first of the largest logits: z_t is at least the
largest of the others, and more than the largest of the columns before it. Nothing here is differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fused_grpo._maths.statistics import MOST_PARTS, Statistics, finite, joined, share_of_others


class Moments(NamedTuple):
    """What some rows have over some of their columns. Each field is [N]."""

    shift: Tensor
    """m of `squares`, which need not be that of the statistics; -inf where all logits but the target's are."""
    squares: Tensor
    """s2."""
    logits: Tensor
    """The sum of all logits."""
    largest: Tensor
    """The largest logit but the target's."""
    before: Tensor
    """The largest logit before the target. Only a tie asks for it: without one it may be `largest` as well."""
    target_logit: Tensor
    """z_t; -inf where the target is not among these columns."""


TakesMoments = Callable[[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], int], None]
"""Is given the moments of a tile and how many columns it has."""


def merge_moments(parts: Sequence[Moments]) -> Moments:
    """The moments of rows from those of disjoint parts of their columns."""
    if len(parts) == 1:
        return parts[0]
    shifts, squares, logits, *others = map(torch.stack, zip(*parts, strict=True))
    return Moments(*merge_squares(shifts, squares), logits.sum(0), *(x.amax(0) for x in others))


def merge_squares(shifts: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    """(shift [N], s2 [N]) of rows from those of disjoint parts of their columns, [parts, N] each."""
    shift = shifts.amax(0)
    return shift, (squares * torch.exp(2 * (shifts - finite(shift)))).sum(0)


def finish_moments(moments: Moments, statistics: Statistics, *, vocab_size: int) -> Tensor:
    """(sum p^2, mean logit, 1 where the target leads) [3, N] of whole rows, from their moments and their statistics.

    Of a target with probability 1/2 beside two tokens of 1/4, whose logits are their log-probs:

    >>> half, quarter = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
    >>> moments = Moments(quarter, torch.tensor([2.0]), half + 2 * quarter, quarter, quarter, half)
    >>> statistics = Statistics(half, None, shift=quarter, total=torch.tensor([2.0]))
    >>> [round(x, 4) for x in finish_moments(moments, statistics, vocab_size=3)[:, 0].tolist()]
    [0.375, -1.1552, 1.0]
    """
    log_p, _, shift, total = statistics
    share = share_of_others(log_p, total) * torch.exp(moments.shift - finite(shift))
    squares = torch.exp(2 * log_p) + (share.square() * moments.squares).masked_fill(total == 0.0, 0.0)
    leads = (moments.target_logit >= moments.largest) & (moments.target_logit > moments.before)
    return torch.stack([squares, moments.logits / vocab_size, leads.to(total.dtype)])


def score_norms(logprobs: Tensor, squares: Tensor) -> Tensor:
    """Squared norms [N] of d log p / d logits, from log p and sum p^2.

    Of a target with probability 1/2 beside two tokens of 1/4, 1/4 + 1/16 + 1/16:

    >>> score_norms(torch.tensor([0.5]).log(), torch.tensor([0.375])).item()
    0.375
    """
    return torch.expm1(logprobs).square() + (squares - torch.exp(2 * logprobs)).clamp_min(0.0)


class RowsMoments:
    """Takes the moments of the tiles of a head: one row group after the other, each from left to right."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size, self._parts, self._groups = vocab_size, list[Moments](), list[Moments]()
        self._columns = 0  # of the current row group

    def __call__(self, fields: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], columns: int) -> None:
        self._parts.append(Moments(*fields))
        if len(self._parts) == MOST_PARTS:
            self._parts = [merge_moments(self._parts)]
        self._columns += columns
        if self._columns == self._vocab_size:
            self._groups.append(merge_moments(self._parts))
            self._parts, self._columns = [], 0

    def finish(self, statistics: Statistics) -> Tensor:
        """(sum p^2, mean logit, 1 where the target leads) [3, N] of the rows of these statistics."""
        rows = (values[: len(statistics.shift)] for values in joined(self._groups))  # tiles may be padded
        return finish_moments(Moments(*rows), statistics, vocab_size=self._vocab_size)
