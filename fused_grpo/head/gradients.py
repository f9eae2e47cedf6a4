"""The gradients of the head: dH, dW and db, accumulated in a sweep over tiles of its logits.

A tile is given as d-logits or, where no entropy has a gradient, as the softmax weights E of `softmax_weights_` and a
factor per row: its upstream gradient times its scale. Then no further pass over the tile is needed, since the factors
multiply smaller tensors:

    dH = factor (E W)        dW = E^T (factor h)        db = E^T factor
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fused_grpo._maths.statistics import Statistics, Upstream
from fused_grpo.head.head import Head, Tile, multiply_into, needs_gradient, weighted_sum_into
from fused_grpo.passes import cpu_buffers
from fused_grpo.passes.protocol import RowPasses


class Wanted(NamedTuple):
    """Which of the three gradients are wanted."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False

    @staticmethod
    def of(head: Head) -> Wanted:
        """Those that autograd needs."""
        return Wanted(*map(needs_gradient, (head.hidden, head.weight, head.bias)))


NOTHING = Wanted()
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Those of hidden, weight and bias."""


class HeadGradients:
    """dH, dW and db of one sweep over tiles, each on request, and rounded to the dtype of its input once, at the end.

    With `one_group` of rows, one GEMM writes each slice of dW, without an accumulator. With more row groups dW
    accumulates in fp32 (fp64 for fp64). db always does, and dH where a row has more than one tile. `scale` multiplies
    the d-logits, and the gradients are multiplied by its inverse. `hidden_dtype` is the dtype of dH if it will be
    summed further before it is rounded. Without `every_row`, some rows may be missing in the sweep. Unless `rounded`,
    dW stays in the dtype of its accumulator.
    """

    def __init__(
        self,
        head: Head,
        wanted: Wanted,
        *,
        one_group: bool,
        scale: Tensor | None = None,
        hidden_dtype: torch.dtype | None = None,
        every_row: bool = True,
        rounded: bool = True,
    ) -> None:
        self._head, self.scale, self._rounded = head, scale, rounded
        # No tile writes the gradient of rows that take no part, nor of any row of an empty shard.
        every_row = every_row and head.index is None and len(head.weight) > 0
        allocate = torch.empty_like if every_row else torch.zeros_like
        self._hidden = allocate(head.hidden, dtype=hidden_dtype) if wanted.hidden else None
        self._rows: Tensor | None = None  # the accumulator of the current row group
        self._factor: Tensor | None = None  # its upstream gradients times the scale of its weights
        self._scaled_hidden: Tensor | None = None  # its hidden states, times that factor
        self._started: set[int] = set()  # first columns of the slices of dW that have been written
        weight_dtype = None if one_group and rounded else head.dtype
        self._weight = cpu_buffers.empty_like(head.weight, dtype=weight_dtype) if wanted.weight else None
        self._bias = head.weight.new_zeros(head.weight.shape[0], dtype=head.dtype) if wanted.bias else None

    def add_known(self, tile: Tile, passes: RowPasses, known: Statistics, upstream: Upstream) -> None:
        """Add a tile of raw logits whose statistics are known, for the upstream gradients of its rows."""
        grad_logprobs, grad_entropy = upstream
        if grad_entropy is None and self._head.takes_weights:
            weights, scale, _ = passes.softmax_weights_(
                tile.logits, tile.targets, known=known, dtype=self._head.gemm_dtype, **tile.transform
            )
            self.add_weights(tile, passes, weights, scale, grad_logprobs)
            return
        if self.scale is not None:
            grad_logprobs = grad_logprobs * self.scale
            grad_entropy = None if grad_entropy is None else grad_entropy * self.scale
        gradient = passes.logits_gradient_(
            tile.logits,
            tile.targets,
            known=known,
            grad_logprobs=grad_logprobs,
            grad_entropy=grad_entropy,
            dtype=self._head.gemm_dtype,
            **tile.transform,
        )
        self._add(tile, gradient)

    def add_gradient(self, tile: Tile, gradient: Tensor) -> None:
        """Add d-logits [R, C], which include the scale."""
        self._add(tile, gradient)

    def add_weights(self, tile: Tile, passes: RowPasses, weights: Tensor, scale: Tensor, grad_logprobs: Tensor) -> None:
        """Add softmax weights [R, C], with d log p / d(h.w) = scale * weights, for the upstream gradients [R]."""
        if tile.columns.start == 0:  # once for a row group, not for each of its tiles
            hidden = None if self._weight is None else tile.hidden
            self._factor, self._scaled_hidden = passes.scale_hidden(hidden, scale, grad_logprobs)
        self._add(tile, weights, self._factor)

    def _add(self, tile: Tile, values: Tensor, factor: Tensor | None = None) -> None:
        """Add d(h.w) [R, C] of a tile, or its weights and their factors [R]."""
        if self._hidden is not None:
            self._add_hidden_gradient(tile, values, factor)
        if self._weight is not None:
            self._add_weight_gradient(tile, values, tile.hidden if factor is None else self._scaled_hidden)
        if self._bias is not None:
            self._add_bias_gradient(tile, values, factor)

    def _add_hidden_gradient(self, tile: Tile, values: Tensor, factor: Tensor | None) -> None:
        assert self._hidden is not None
        index, first = tile.index, tile.columns.start == 0
        in_place = index is None and self._hidden.dtype == self._head.dtype
        if first:
            self._rows = self._hidden[tile.rows] if in_place else torch.empty_like(tile.hidden, dtype=self._head.dtype)
        assert self._rows is not None
        weighted_sum_into(self._rows, values, tile.weight, accumulate=not first)
        if tile.columns.stop == len(self._head.weight):
            d_rows = self._rows
            if factor is not None:
                # A GPU rounds the product as it writes it; elsewhere another dtype takes a temporary.
                at_once = index is None and d_rows.is_cuda
                d_rows = torch.mul(d_rows, factor[:, None], out=self._hidden[tile.rows] if at_once else d_rows)
            self._unscale(d_rows)
            if index is not None:
                self._hidden[index] = d_rows.to(self._hidden.dtype)
            elif d_rows.dtype != self._hidden.dtype:
                self._hidden[tile.rows].copy_(d_rows)
            self._rows = None

    def _add_weight_gradient(self, tile: Tile, values: Tensor, hidden: Tensor | None) -> None:
        assert self._weight is not None
        assert hidden is not None
        out = self._weight[tile.columns]
        # A GEMM on tensor cores accumulates in fp32 and rounds its result once.
        direct = out.dtype == self._head.dtype or (out.dtype == values.dtype and self.scale is None)
        product = out if direct else torch.empty_like(out, dtype=self._head.dtype)
        multiply_into(product, values.t(), hidden, accumulate=tile.columns.start in self._started)
        self._started.add(tile.columns.start)
        if not direct:
            self._unscale(product)
            out.copy_(product)

    def _add_bias_gradient(self, tile: Tile, values: Tensor, factor: Tensor | None) -> None:
        assert self._bias is not None
        columns = self._bias[tile.columns]
        if factor is None:
            columns += values.sum(0, dtype=columns.dtype)
        elif values.dtype == columns.dtype:
            columns.addmv_(values.t(), factor)
        else:
            multiply_into(columns[:, None], values.t(), factor[:, None].to(values.dtype), accumulate=True)

    def _unscale(self, gradient: Tensor | None) -> None:
        if self.scale is not None and gradient is not None and gradient.dtype == self._head.dtype:
            gradient.div_(self.scale)

    def finish(self) -> Gradients:
        """(dH, dW, db), each in the dtype of its input unless the constructor said otherwise. To be called once."""
        if self._weight is not None and not self._started:
            self._weight.zero_()
        self._unscale(self._weight)
        self._unscale(self._bias)
        head, self._head = self._head, None  # type: ignore[assignment]
        weight = None if self._weight is None else self._weight.to(head.weight.dtype if self._rounded else head.dtype)
        bias = None if self._bias is None or head.bias is None else self._bias.to(head.bias.dtype)
        hidden, self._hidden, self._weight, self._bias = self._hidden, None, None, None
        return hidden, weight, bias
