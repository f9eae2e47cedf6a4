"""The language-model head: its flat rows, its tiles of logits, and its large GEMMs.

The vendor library computes the GEMMs. This file guarantees that products of bf16 or fp16 inputs are accumulated and
*kept* in fp32 (logits are never rounded before the log-sum-exp, gradients never between tiles), without a temporary of
size N x V and without a second copy of W. CUDA does this in one call (`out_dtype`); elsewhere one slice of W at a time
is widened to fp32.

Letters: N rows, D hidden size, V vocabulary; a tile of the logits has R rows and C columns.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fused_grpo._maths.inputs import LogitTransform
from fused_grpo._maths.precision import compute_dtype
from fused_grpo.head.checks import HeadOptions, check_head, check_targets, check_temperature_values
from fused_grpo.passes import chunking
from fused_grpo.passes.protocol import RowPasses

logger = logging.getLogger("fused_grpo")

# A slice of W in fp32 on the CPU: large enough for a fast GEMM, small beside any chunk.
SLICE_BYTES = 4 * 2**20

# The rows of every GEMM where the bits of a row must not depend on the number of rows.
INVARIANT_ROWS = 64


@dataclass(frozen=True)
class Tile:
    """A tile of the raw logits h.w and its inputs."""

    rows: slice  # of the head's rows
    columns: slice  # of the vocabulary
    logits: Tensor  # [R, C] in the dtype of accumulators
    hidden: Tensor  # [R, D] in the dtype of the GEMMs
    weight: Tensor  # [C, D], in the dtype of the hidden states
    targets: Tensor  # [R] or [R, K], relative to `columns`; outside of [0, C) where the target is in another tile
    transform: LogitTransform  # of these rows and columns
    index: Tensor | None  # [R], the rows of `Head.hidden`; None if they are `rows`

    def first(self, count: int) -> Tile:
        """The first `count` rows of the tile."""
        if count >= len(self.logits):
            return self
        transform: LogitTransform = {**self.transform, "temperature": self.transform["temperature"][:count]}
        rows = slice(self.rows.start, self.rows.start + count)
        index = None if self.index is None else self.index[:count]
        logits, hidden, targets = self.logits[:count], self.hidden[:count], self.targets[:count]
        return Tile(rows, self.columns, logits, hidden, self.weight, targets, transform, index)


@dataclass(frozen=True)
class Head:
    """N rows that share a head."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]; of another dtype than `hidden`, it is cast one slice at a time
    bias: Tensor | None  # [V]
    targets: Tensor  # [N] or [N, K], in [0, V); -1 where the target is in another shard of the vocabulary, or none
    temperature: Tensor  # [N], fp32
    logit_scale: float
    softcap: float | None
    index: Tensor | None = None  # [N], the rows of `hidden` that take part; None for all, in order

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of logits, statistics and accumulators: fp32, or fp64 for fp64 inputs."""
        return compute_dtype(self.hidden)

    @property
    def gemm_dtype(self) -> torch.dtype:
        """The dtype of d-logits: that of the tensor cores' operands on a GPU, that of the accumulators elsewhere."""
        return self.hidden.dtype if self.hidden.is_cuda else self.dtype

    @property
    def takes_weights(self) -> bool:
        """Whether GEMMs take softmax weights: that of the target is a sum over the vocabulary, too large for fp16."""
        return self.gemm_dtype != torch.float16

    def select(self, index: Tensor | None) -> Head:
        """The same head with some of its rows. Per-row vectors are gathered now, hidden states with each tile."""
        if index is None:
            return self
        rows = index if self.index is None else self.index[index]
        return replace(self, targets=self.targets[index], temperature=self.temperature[index], index=rows)

    def without_ignored(self, ignore_index: int, *, vocab_size: int | None = None) -> tuple[Tensor, Head]:
        """(which targets are not `ignore_index`, bool of their shape; this head with 0 in the place of those that are).

        In the place of one of several targets of a row is -1. Values are checked: targets against `vocab_size`, that of
        the whole head where this is a shard.

        Raises:
            InputError: a target or a temperature is out of range; on a GPU, an assertion of the device.
        """
        kept = self.targets != ignore_index
        targets = torch.where(kept, self.targets, 0)
        if not torch.compiler.is_compiling():
            check_targets(targets, len(self.weight) if vocab_size is None else vocab_size, ignore_index)
            check_temperature_values(self.temperature)
        return kept, replace(self, targets=targets if targets.ndim == 1 else torch.where(kept, targets, -1))

    def transform(self, rows: slice = slice(None), columns: slice = slice(None)) -> LogitTransform:
        """How raw h.w of these rows and columns become logits."""
        return {
            "bias": None if self.bias is None else self.bias[columns],
            "temperature": self.temperature[rows],
            "logit_scale": self.logit_scale,
            "softcap": self.softcap,
        }

    def chunk_rows(self, chunk_bytes: int | None, *, vocab_size: int | None = None) -> int:
        """How many whole rows of logits the budget allows; `vocab_size` of the largest shard."""
        return chunking.chunk_rows(
            len(self.targets),
            len(self.weight) if vocab_size is None else vocab_size,
            device=self.hidden.device,
            itemsize=self.dtype.itemsize,
            row_bytes=self._row_bytes(weight_gradient=True),
            slice_bytes=self._slice_bytes,
            chunk_bytes=chunk_bytes,
        )

    def chunk_memory(self, passes: RowPasses, chunk_bytes: int | None, *, vocab_size: int | None = None) -> Tensor:
        """[R, V] for the raw logits of whole rows, as many as the budget allows; `vocab_size` of the largest shard.

        If the default budget is more than the device has left, half as many rows are tried, with a warning.
        """
        rows = self.chunk_rows(chunk_bytes, vocab_size=vocab_size)
        empty = functools.partial(passes.empty_tile, dtype=self.dtype, device=self.hidden.device)
        try:
            return empty(rows, len(self.weight))
        except torch.OutOfMemoryError:
            # All ranks of a sharded head need chunks of the same rows.
            if chunk_bytes is not None or vocab_size is not None or rows == 1:
                raise
        logger.warning("no memory for %d rows of logits: chunks of half as many; fix: set chunk_bytes", rows)
        return empty(-(-rows // 2), len(self.weight))

    def tile_memory(
        self,
        passes: RowPasses,
        chunk_bytes: int | None,
        *,
        num_rows: int | None = None,
        weight_gradient: bool = False,
    ) -> Tensor:
        """[R, C] for tiles that need not be whole rows; for `num_rows` rows if given, else for those of the head."""
        hidden_size, size = self.hidden.shape[1], self.dtype.itemsize
        cast = self.weight.dtype != self.hidden.dtype
        # A GEMM can write dW directly in the dtype of accumulators, or in that of softmax weights.
        direct = self.weight.dtype == self.dtype or (self.takes_weights and self.weight.dtype == self.gemm_dtype)
        column_bytes = hidden_size * (self.hidden.dtype.itemsize * cast + size * (weight_gradient and not direct))
        shape = chunking.tile_shape(
            len(self.targets) if num_rows is None else num_rows,
            self.weight.shape[0],
            device=self.hidden.device,
            itemsize=size,
            row_bytes=self._row_bytes(weight_gradient=weight_gradient),
            column_bytes=column_bytes,
            slice_bytes=self._slice_bytes,
            chunk_bytes=chunk_bytes,
        )
        return passes.empty_tile(*shape, dtype=self.dtype, device=self.hidden.device)

    def _row_bytes(self, *, weight_gradient: bool) -> int:
        """The bytes of a tile per row beside its logits: hidden states that are cast, gathered or scaled."""
        hidden_size, size = self.hidden.shape[1], self.dtype.itemsize
        copied = size if self._slice_bytes else self.hidden.dtype.itemsize * (self.index is not None)
        scaled = self.gemm_dtype.itemsize if weight_gradient else 0
        return hidden_size * (copied + scaled)

    @property
    def _slice_bytes(self) -> int:
        """The bytes of the slice of W that a GEMM widens."""
        return SLICE_BYTES if self.gemm_dtype != self.hidden.dtype else 0

    def tiles(self, memory: Tensor, *, pad: bool = False) -> Iterator[Tile]:
        """All logits, one row group after the other, each from left to right, in tiles of at most `memory` [R, C].

        With `pad` every tile has R rows: rows of zeros fill the last one.
        """
        height, width = memory.shape
        # Each tile of whole rows needs all of W, which is then cast once for all tiles.
        head_weight = self.weight.to(self.hidden.dtype) if width == len(self.weight) else self.weight
        for rows in chunking.chunks(len(self.targets), height):
            count = height if pad else rows.stop - rows.start
            index = None if self.index is None else self.index[rows]
            hidden = self.hidden[rows if index is None else index].to(self.gemm_dtype)
            hidden = pad_to(hidden, count, value=0.0)
            targets = pad_to(self.targets[rows], count, value=0)
            temperature = pad_to(self.temperature[rows], count, value=1.0)
            group = slice(rows.start, rows.start + count)
            for columns in chunking.chunks(len(head_weight), width):
                weight = head_weight[columns].to(self.hidden.dtype)
                logits = memory[:count, : len(weight)]
                logits_into(logits, hidden, weight)
                transform: LogitTransform = {**self.transform(rows, columns), "temperature": temperature}
                here = targets - columns.start if columns.start else targets
                yield Tile(group, columns, logits, hidden, weight, here, transform, index)


def flatten_head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    options: HeadOptions,
    *,
    sharded: bool = False,
    several: bool = False,
) -> Head:
    """The head of flat rows, after a check of shapes, dtypes and devices. The values of targets are not checked.

    With `several`, targets may have one dimension more than rows: [..., K].
    """
    check_head(hidden, weight, targets, options, sharded=sharded, several=several)
    temperature, device = options.temperature, hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(device))
    dtype = compute_dtype(hidden)
    if isinstance(temperature, Tensor):
        temperature = temperature.detach().to(dtype).reshape(-1).contiguous()  # one that is expanded is a number
    else:
        temperature = torch.full((1,), temperature, dtype=dtype, device=hidden.device).expand(hidden.shape[:-1].numel())
    # One target in a last dimension of 1 takes the passes for single targets.
    single = targets.ndim < hidden.ndim or targets.shape[-1] == 1
    return Head(
        hidden=hidden.reshape(-1, hidden.shape[-1]),
        weight=weight,
        bias=options.bias,
        targets=targets.reshape(-1) if single else targets.reshape(-1, targets.shape[-1]),
        temperature=temperature,
        logit_scale=options.logit_scale,
        softcap=options.softcap,
    )


def needs_gradient(tensor: Tensor | None) -> bool:
    """Whether autograd needs the gradient of this tensor."""
    return tensor is not None and tensor.requires_grad and torch.is_grad_enabled()


def pad_to(rows: Tensor, count: int, *, value: float) -> Tensor:
    """[count, ...] from [R, ...], R <= count, filled up with `value`."""
    missing = count - len(rows)
    return rows if not missing else torch.cat([rows, rows.new_full((missing, *rows.shape[1:]), value)])


def local_targets(targets: Tensor, columns: slice) -> Tensor:
    """Targets, all at least -1, relative to a vocabulary slice; -1 where they are outside of it."""
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
    """out = (out +) a @ b, accumulated in the dtype of `out`. On a GPU, a and b may have 16 bits and `out` fp32."""
    if a.dtype == out.dtype:
        out.addmm_(a, b) if accumulate else torch.mm(a, b, out=out)
    elif accumulate:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def widened(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """(rows of W, those rows in `dtype`), one slice at a time."""
    count, hidden_size = weight.shape
    for columns in chunking.chunks(count, max(1, SLICE_BYTES // (hidden_size * dtype.itemsize))):
        yield columns, weight[columns].to(dtype)
