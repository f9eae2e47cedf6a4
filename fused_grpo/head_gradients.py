"""Where the gradients of the head are written: dH, dW and db of a sweep over tiles of its logits.

A tile comes as d-logits, or, where no entropy has a gradient, as the softmax's weights e^(z - m) with what turns them
into d-logits: row n is push_n times its weights, and pull_n at the target. Then no pass over the tile is needed, since
the factors can be taken where they are small:

    dH_n = push_n sum_v e_nv w_v + pull_n w_t        dW_v = sum_n e_nv (push_n h_n) + sum_{n: t = v} pull_n h_n
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fused_grpo import _pages, planner
from fused_grpo.head import Head, Tile, multiply_into, weighted_sum_into
from fused_grpo.planner import BLOCK_BYTES, TileShape


class Factors(NamedTuple):
    """What turns the weights of rows into their d-logits, each [R]."""

    push: Tensor
    pull: Tensor
    targets: Tensor  # in the whole of the head's columns, -1 where they are not among them


class HeadGradients:
    """dH, dW and db of one sweep over tiles: only those asked for, each rounded to its input's dtype once, at the end.

    With tiles that hold all rows, each slice of dW comes out of one GEMM and no accumulator stands beside it; with more
    row groups W accumulates in fp32 (fp64 for fp64). So does b, always, and H where a row has more than one tile.
    `scale` is what the d-logits are multiplied by; the gradients are not. `hidden_dtype` is that of dH, where it is to
    be summed further before it is rounded. Without `every_row`, some rows may never come. Unless `rounded`, dW stays as
    it was summed.
    """

    def __init__(
        self,
        head: Head,
        shape: TileShape,
        *,
        hidden: bool,
        weight: bool,
        bias: bool,
        scale: Tensor | None = None,
        hidden_dtype: torch.dtype | None = None,
        every_row: bool = True,
        rounded: bool = True,
    ) -> None:
        self._head, self._scale, self._rounded = head, scale, rounded
        # Rows that take no part, and all rows of an empty shard, have no tile to write their gradient.
        every_row = every_row and head.index is None and len(head.weight) > 0
        allocate = torch.empty_like if every_row else torch.zeros_like
        self._hidden = allocate(head.hidden, dtype=hidden_dtype) if hidden else None
        self._rows: Tensor | None = None  # the accumulator of the row group at hand
        self._pushed: Tensor | None = None  # its hidden states, times push
        self._started: set[int] = set()  # the columns of which dW has been written
        weight_dtype = None if shape.rows >= len(head.targets) and rounded else head.dtype
        self._weight = _pages.empty_like(head.weight, dtype=weight_dtype) if weight else None
        self._bias = head.weight.new_zeros(head.weight.shape[0], dtype=head.dtype) if bias else None

    def scaled(self, upstream: Tensor) -> Tensor:
        """What the d-logits are to be made from."""
        return upstream if self._scale is None else upstream * self._scale

    def add(self, tile: Tile, values: Tensor, factors: Factors | None = None) -> None:
        """Take in d(h.w) [R, C] of a tile, or its weights e^(z - m), 0 at the target, and their factors."""
        if self._hidden is not None:
            self._add_hidden_gradient(tile, values, factors)
        if self._weight is not None:
            self._add_weight_gradient(tile, values, factors)
        if self._bias is not None:
            self._add_bias_gradient(tile, values, factors)

    def _add_hidden_gradient(self, tile: Tile, values: Tensor, factors: Factors | None) -> None:
        assert self._hidden is not None
        index, first = tile.index, tile.columns.start == 0
        in_place = index is None and self._hidden.dtype == self._head.dtype
        if first:
            self._rows = self._hidden[tile.rows] if in_place else self._hidden.new_empty(0)
            if not in_place:
                self._rows = torch.empty_like(tile.hidden, dtype=self._head.dtype)
        assert self._rows is not None
        weighted_sum_into(self._rows, values, tile.weight, accumulate=not first)
        if tile.columns.stop == len(self._head.weight):
            if factors is not None:
                apply_factors_(self._rows, self._head, factors)
            self._unscale(self._rows)
            if not in_place:
                self._hidden[tile.rows if index is None else index] = self._rows.to(self._hidden.dtype)
            self._rows = None

    def _add_weight_gradient(self, tile: Tile, values: Tensor, factors: Factors | None) -> None:
        assert self._weight is not None
        out, hidden = self._weight[tile.columns], tile.hidden.to(values.dtype)
        exact = out.dtype == self._head.dtype
        product = out if exact else torch.empty_like(out, dtype=self._head.dtype)
        if factors is not None and tile.columns.start == 0:
            self._pushed = hidden * factors.push[:, None]
        operand = hidden if factors is None else self._pushed
        assert operand is not None
        multiply_into(product, values.t(), operand, accumulate=tile.columns.start in self._started)
        self._started.add(tile.columns.start)
        if factors is not None:
            _add_targets_(product, tile, factors.pull)
        if tile.columns.stop == len(self._head.weight):
            self._pushed = None
        if not exact:
            self._unscale(product)
            out.copy_(product)

    def _add_bias_gradient(self, tile: Tile, values: Tensor, factors: Factors | None) -> None:
        assert self._bias is not None
        columns = self._bias[tile.columns]
        if factors is None:
            columns += values.sum(0, dtype=columns.dtype)
        else:
            columns.addmv_(values.t(), factors.push)
            here = tile.targets >= 0
            columns.index_add_(0, tile.targets[here], factors.pull[here])

    def _unscale(self, gradient: Tensor | None) -> None:
        if self._scale is not None and gradient is not None and gradient.dtype == self._head.dtype:
            gradient.div_(self._scale)

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(dH, dW, db), each in its input's dtype unless it said otherwise. The accumulators are given away."""
        if self._weight is not None and not self._started:
            self._weight.zero_()
        self._unscale(self._weight)
        self._unscale(self._bias)
        head, self._head = self._head, None  # type: ignore[assignment]
        weight = None if self._weight is None else self._weight.to(head.weight.dtype if self._rounded else head.dtype)
        bias = None if self._bias is None or head.bias is None else self._bias.to(head.bias.dtype)
        hidden, self._hidden, self._weight, self._bias = self._hidden, None, None, None
        return hidden, weight, bias


def softmax_factors(
    head: Head, tile: Tile, targets: Tensor, *, logprobs: Tensor, total: Tensor, upstream: Tensor | None = None
) -> Factors:
    """The factors of the rows of a tile, for upstream gradients of their log-probs (None: of 1).

    With s the sum of all weights of a row: push = -(1 - p) / s, pull = (1 - p) times the soft cap's slope at the
    target, both times logit_scale / temperature. `targets` [R] count over all columns of the head, -1 where they are
    not there.
    """
    pull = head.logit_scale / tile.arguments["temperature"] * -torch.expm1(logprobs)
    pull = pull if upstream is None else pull * upstream
    push = -pull / total.masked_fill(total == 0.0, 1.0)
    here = targets >= 0
    if head.softcap is not None:
        pull = pull * _slope_at(head, tile, targets.clamp_min(0))
    return Factors(push, torch.where(here, pull, 0.0), targets)


def _slope_at(head: Head, tile: Tile, targets: Tensor) -> Tensor:
    """1 - tanh^2 of the target's logit, [R], as 4 e / (1 + e)^2: nothing cancels where the cap saturates."""
    assert head.softcap is not None
    raw = tile.hidden.new_empty(len(targets), dtype=head.dtype)
    for rows, at_target in head.weight_at(targets, head.dtype):
        raw[rows] = (tile.hidden[rows].to(head.dtype) * at_target).sum(1)
    raw = raw if head.bias is None else raw + head.bias[targets]
    e = torch.exp(-2 * (raw * (head.logit_scale / head.softcap)).abs())
    return 4 * e / (1 + e).square()


def apply_factors_(sums: Tensor, head: Head, factors: Factors) -> None:
    """dH [R, D], in place, from the weighted sums of the rows of W."""
    if not len(head.weight):
        return
    for rows, at_target in head.weight_at(factors.targets.clamp_min(0), sums.dtype):
        sums[rows].mul_(factors.push[rows, None]).addcmul_(at_target, factors.pull[rows, None])


def _add_targets_(product: Tensor, tile: Tile, pull: Tensor) -> None:
    """product [C, D] += pull_n h_n at each row's target."""
    here = (tile.targets >= 0).nonzero()[:, 0]
    height = max(1, BLOCK_BYTES // max(1, 2 * product.shape[1] * product.dtype.itemsize))
    for some in planner.chunks(len(here), height):
        rows = here[some]
        product.index_add_(0, tile.targets[rows], tile.hidden[rows].to(product.dtype) * pull[rows, None])
