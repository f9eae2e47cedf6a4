"""The language-model head as the ops see it: flat rows, its big GEMMs, and where its gradients are written.

The GEMMs belong to the vendor library. What this file guarantees around them: products of bf16 or fp16 inputs are
accumulated and *kept* in fp32 (logits are never rounded before the log-sum-exp, gradients never between tiles), and
nothing of size N x V and no second copy of W is made on the way. CUDA does this in one call (`out_dtype`); elsewhere
W is widened a slice at a time.

Letters: N rows, D hidden size, V vocabulary; a tile of the logits has R rows and C columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fused_grpo import _pages, planner
from fused_grpo.planner import BLOCK_BYTES, TileShape
from fused_grpo.reference import compute_dtype

# A slice of W as fp32 on the CPU: large enough for a good GEMM, small beside any chunk.
_SLICE_BYTES = 4 * 2**20

# The rows of every GEMM where a row's bits must not depend on how many others there are.
INVARIANT_ROWS = 64


def full_precision(tensor: Tensor) -> torch.autocast:
    """No autocast in here: it would round logits and gradients behind our back."""
    return torch.autocast(tensor.device.type, enabled=False)


@dataclass(frozen=True)
class Tile:
    """A piece of the raw logits h.w and what made it."""

    rows: slice  # of the head's rows
    columns: slice  # of the vocabulary
    logits: Tensor  # [R, C] in the dtype of accumulators
    hidden: Tensor  # [R, D], as the GEMMs take it
    weight: Tensor  # [C, D], in the dtype of the hidden states
    targets: Tensor  # [R], relative to `columns`; -1 where the target is in another tile
    arguments: dict[str, Any]  # what a row pass needs to know besides
    index: Tensor | None  # [R], which of the hidden states these are; None for `rows` of them

    def make_(self) -> Tile:
        """Put the raw logits where they belong."""
        logits_into(self.logits, self.hidden, self.weight)
        return self

    def select(self, order: Tensor) -> Tile:
        """The first rows of the logits, which have come from the rows in `order` [K]."""
        index = order + self.rows.start if self.index is None else self.index[order]
        arguments = {**self.arguments, "temperature": self.arguments["temperature"][order]}
        logits, hidden, targets = self.logits[: len(order)], self.hidden[order], self.targets[order]
        return replace(self, logits=logits, hidden=hidden, targets=targets, arguments=arguments, index=index)


@dataclass(frozen=True)
class Head:
    """N rows that share a head."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D], cast to the dtype of `hidden` a slice at a time where it differs
    bias: Tensor | None  # [V]
    targets: Tensor  # [N], in [0, V); -1 where the target is in another shard of the vocabulary
    temperature: Tensor  # [N], fp32
    logit_scale: float
    softcap: float | None
    index: Tensor | None = None  # [N], the rows of `hidden` that take part; None for all, in order

    @property
    def dtype(self) -> torch.dtype:
        """fp32, or fp64 for fp64 inputs: of logits, statistics and accumulators."""
        return compute_dtype(self.hidden)

    @property
    def gemm_dtype(self) -> torch.dtype:
        """What d-logits should be for the GEMMs: the tensor cores' width on a GPU, the accumulators' elsewhere."""
        return self.hidden.dtype if self.hidden.is_cuda else self.dtype

    def select(self, index: Tensor | None) -> Head:
        """The same head for these of its rows. Per-row vectors are gathered at once, hidden states a tile at a time."""
        if index is None:
            return self
        rows = index if self.index is None else self.index[index]
        return replace(self, targets=self.targets[index], temperature=self.temperature[index], index=rows)

    def row_arguments(self, rows: slice, columns: slice = slice(None)) -> dict[str, Any]:
        """What a row pass needs to know of these rows besides their raw logits."""
        return {
            "bias": None if self.bias is None else self.bias[columns],
            "temperature": self.temperature[rows],
            "logit_scale": self.logit_scale,
            "softcap": self.softcap,
        }

    def chunk_shape(
        self, chunk_bytes: int | None, *, vocab_size: int | None = None, in_columns: bool = False
    ) -> TileShape:
        """Whole rows, as many as the budget allows; as many as if they had `vocab_size` columns, if given."""
        shape = planner.chunk_shape(
            len(self.targets),
            len(self.weight) if vocab_size is None else vocab_size,
            device=self.hidden.device,
            itemsize=self.dtype.itemsize,
            row_bytes=self._row_bytes(weight_gradient=True),
            slice_bytes=self._slice_bytes,
            chunk_bytes=chunk_bytes,
            in_columns=in_columns,
        )
        return shape._replace(columns=len(self.weight))

    def tile_shape(
        self,
        chunk_bytes: int | None,
        *,
        num_rows: int | None = None,
        weight_gradient: bool = False,
        in_columns: bool = False,
    ) -> TileShape:
        """Tiles for passes that need not see a whole row at once; for `num_rows` rows, not the head's own, if given."""
        hidden_size, size = self.hidden.shape[1], self.dtype.itemsize
        cast, narrow = self.weight.dtype != self.hidden.dtype, self.weight.dtype != self.dtype
        column_bytes = hidden_size * (self.hidden.dtype.itemsize * cast + size * (weight_gradient and narrow))
        return planner.tile_shape(
            len(self.targets) if num_rows is None else num_rows,
            self.weight.shape[0],
            device=self.hidden.device,
            itemsize=size,
            row_bytes=self._row_bytes(weight_gradient=weight_gradient),
            column_bytes=column_bytes,
            slice_bytes=self._slice_bytes,
            chunk_bytes=chunk_bytes,
            in_columns=in_columns,
        )

    def _row_bytes(self, *, weight_gradient: bool) -> int:
        """What a tile holds of each row beside its logits: hidden states cast or gathered, and those times a factor."""
        hidden_size, size = self.hidden.shape[1], self.dtype.itemsize
        copied = size if self._slice_bytes else self.hidden.dtype.itemsize * (self.index is not None)
        pushed = size if weight_gradient and not self.hidden.is_cuda else 0
        return hidden_size * (copied + pushed)

    @property
    def _slice_bytes(self) -> int:
        """What a GEMM holds of W in a wider dtype."""
        return _SLICE_BYTES if self.gemm_dtype != self.hidden.dtype else 0

    def weight_at(self, targets: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """(rows, W at their `targets` [r, D]), a small block at a time."""
        height = max(1, BLOCK_BYTES // max(1, 2 * self.weight.shape[1] * dtype.itemsize))
        for rows in planner.chunks(len(targets), height):
            yield rows, self.weight[targets[rows]].to(self.hidden.dtype).to(dtype)

    def tiles(self, shape: TileShape, *, pad: bool = False) -> Iterator[Tile]:
        """All logits, row group by row group, each from left to right. Every tile lives in the same buffer.

        With `pad` every tile has `shape.rows` rows, however few there are: those past the end are of zeros.
        """
        buffer = _pages.empty((shape.size,), dtype=self.dtype, device=self.hidden.device)
        # Where tiles are whole rows, each meets all of W: a cast happens once, not for each of them.
        head_weight = self.weight.to(self.hidden.dtype) if shape.columns == len(self.weight) else self.weight
        for rows in planner.chunks(len(self.targets), shape.rows):
            count = shape.rows if pad else rows.stop - rows.start
            index = None if self.index is None else self.index[rows]
            hidden = self.hidden[rows if index is None else index].to(self.gemm_dtype)
            hidden = pad_to(hidden, count, value=0.0)
            targets = pad_to(self.targets[rows], count, value=0)
            temperature = pad_to(self.temperature[rows], count, value=1.0)
            group = slice(rows.start, rows.start + count)
            stride = planner.column_stride(count) if shape.stride and count < shape.rows else shape.stride
            for columns in planner.chunks(len(head_weight), shape.columns):
                weight = head_weight[columns].to(self.hidden.dtype)
                logits = _piece(buffer, count, len(weight), stride)
                arguments = {**self.row_arguments(rows, columns), "temperature": temperature}
                local = local_targets(targets, columns)
                yield Tile(group, columns, logits, hidden, weight, local, arguments, index).make_()


def _piece(buffer: Tensor, rows: int, columns: int, stride: int) -> Tensor:
    """[R, C] in a flat buffer: row after row, or with a `stride` column after column, that far apart."""
    if not stride:
        return buffer[: rows * columns].view(rows, columns)
    return buffer[: columns * stride].view(columns, stride)[:, :rows].t()


def pad_to(rows: Tensor, count: int, *, value: float) -> Tensor:
    """[count, ...] from [R, ...], R <= count; the rows themselves where there is nothing to add."""
    missing = count - len(rows)
    return rows if not missing else torch.cat([rows, rows.new_full((missing, *rows.shape[1:]), value)])


def local_targets(targets: Tensor, columns: slice) -> Tensor:
    """Targets relative to a stretch of the vocabulary; -1 where they are outside."""
    return torch.where((targets >= columns.start) & (targets < columns.stop), targets - columns.start, -1)


def logits_into(out: Tensor, hidden: Tensor, weight: Tensor) -> None:
    """out [R, C] = hidden [R, D] @ weight.T [D, C]."""
    if hidden.dtype == weight.dtype:
        multiply_into(out, hidden, weight.t())
        return
    for columns, wide in widened(weight, out.dtype):
        torch.mm(hidden, wide.t(), out=out[:, columns])


def weighted_sum_into(out: Tensor, weights: Tensor, vectors: Tensor, *, accumulate: bool) -> None:
    """out [R, D] = (out +) weights [R, C] @ vectors [C, D]."""
    if weights.dtype == vectors.dtype:
        multiply_into(out, weights, vectors, accumulate=accumulate)
        return
    for columns, wide in widened(vectors, out.dtype):
        multiply_into(out, weights[:, columns], wide, accumulate=accumulate or columns.start > 0)


def multiply_into(out: Tensor, a: Tensor, b: Tensor, *, accumulate: bool = False) -> None:
    """out = (out +) a @ b, accumulated in the dtype of `out`, which a and b share or, on a GPU, fall short of."""
    if a.dtype == out.dtype:
        out.addmm_(a, b) if accumulate else torch.mm(a, b, out=out)
    elif accumulate:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def widened(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """(rows of W, those rows in `dtype`), a slice at a time."""
    count, hidden_size = weight.shape
    for columns in planner.chunks(count, max(1, _SLICE_BYTES // (hidden_size * dtype.itemsize))):
        yield columns, weight[columns].to(dtype)
