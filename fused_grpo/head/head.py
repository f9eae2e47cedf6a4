"""The language-model head: its flat rows, its tiles of logits, and its large GEMMs.

The vendor library computes the GEMMs, without a temporary of size N x V, and without a second copy of W, unless it has
another dtype than the hidden states and tiles are whole rows. Products of 16-bit inputs are accumulated and *kept* in
fp32, so that logits are never rounded before the log-sum-exp, nor gradients between tiles. CUDA does this in one call
(`out_dtype`); elsewhere, and where a build of torch refuses that, one slice of W at a time is widened to fp32.

Letters: N rows, D hidden size, V vocabulary; a tile of the logits has R rows and C columns.

dH, dW and db accumulate in a sweep over tiles. A tile is given as d-logits or, where no entropy has a gradient, as the
softmax weights E of `softmax_weights_` and a factor per row, its upstream gradient times its scale. Then no further
pass over the tile is needed, since the factors multiply smaller tensors:

    dH = factor (E W)        dW = E^T (factor h)        db = E^T factor
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_grpo._maths.distributions import LogitTransform
from fused_grpo._maths.moments import TakesMoments
from fused_grpo._maths.statistics import Statistics, Upstream, compute_dtype, keeps_sums, picked
from fused_grpo.head.checks import HeadOptions, check_head, check_temperature_values, check_tensors
from fused_grpo.passes import buffers, torch_passes
from fused_grpo.passes.protocol import RowPasses, SoftmaxWeightsForward

logger = logging.getLogger("fused_grpo")

# The rows of every GEMM where the bits of a row must not depend on the number of rows.
INVARIANT_ROWS = 64

# A slice of W in fp32 on the CPU: large enough for a fast GEMM, small beside any chunk.
SLICE_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Tile:
    """A tile of the raw logits h.w and its inputs."""

    rows: slice  # of the head's rows
    columns: slice  # of the vocabulary
    logits: Tensor  # [R, C] in the dtype of accumulators; or memory for softmax weights of whole rows
    hidden: Tensor  # [R, D] in the dtype of the GEMMs
    weight: Tensor  # [C, D], in the dtype of the hidden states
    targets: Tensor  # [R] or [R, K], relative to `columns`; outside of [0, C) where the target is in another tile
    transform: LogitTransform  # of these rows and columns
    index: Tensor | None  # [R], the rows of `Head.hidden`; None if they are `rows`

    @property
    def rows_of_head(self) -> slice | Tensor:
        """The rows of `Head.hidden`."""
        return self.rows if self.index is None else self.index

    def first(self, count: int) -> Tile:
        """The first `count` rows of the tile."""
        if count >= self.logits.shape[0]:
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

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of logits, statistics and accumulators: fp32, or fp64 for fp64 inputs."""
        return compute_dtype(self.hidden)

    @functools.cached_property
    def gemm_dtype(self) -> torch.dtype:
        """The dtype of d-logits: that of the tensor cores' operands on a GPU, that of the accumulators elsewhere."""
        narrow = self.hidden.is_cuda and keeps_sums(self.hidden.device, self.hidden.dtype)
        return self.hidden.dtype if narrow else self.dtype

    @functools.cached_property
    def gemm_on_softmax(self) -> bool:
        """Whether GEMMs take softmax weights: that of the target is a sum over the vocabulary, too large for fp16."""
        return self.gemm_dtype != torch.float16

    @property
    def writes_weight_gradient(self) -> bool:
        """Whether a GEMM can write dW directly: in the dtype of accumulators, or in that of softmax weights."""
        return self.weight.dtype == self.dtype or (self.gemm_on_softmax and self.weight.dtype == self.gemm_dtype)

    def select(self, index: Tensor | None) -> Head:
        """The same head with some of its rows. Per-row vectors are gathered now, hidden states with each tile."""
        if index is None:
            return self
        rows = index if self.index is None else self.index[index]
        return replace(self, targets=self.targets[index], temperature=self.temperature[index], index=rows)

    def hidden_of(self, rows: slice | None = None) -> Tensor:
        """The hidden states of some of the N rows that take part."""
        return picked(self.hidden, rows) if self.index is None else self.hidden[picked(self.index, rows)]

    def blank(self, kept: Tensor) -> Head:
        """The same head, all of whose rows take part, with hidden states of 0 in those that are not `kept` [N]."""
        assert self.index is None
        return replace(self, hidden=torch.where(kept[:, None], self.hidden, 0.0))

    def without_ignored(
        self, passes: RowPasses, ignore_index: int, *, vocab_size: int | None = None
    ) -> tuple[Tensor, Head]:
        """(which targets are not `ignore_index`, bool of their shape; this head with 0 in the place of those that are).

        In the place of one of several targets of a row is -1. Values are checked: targets against `vocab_size`, that of
        the whole head where this is a shard.

        Raises:
            InputError: a target or a temperature is out of range; on a GPU, an assertion of the device.
        """
        vocab_size = self.weight.shape[0] if vocab_size is None else vocab_size
        # Where the host can see a target that is wrong, its error says which.
        clean_targets = (passes if self.targets.is_cuda else torch_passes).clean_targets
        kept, targets = clean_targets(self.targets, ignore_index=ignore_index, vocab_size=vocab_size)
        # One number, expanded, was checked before.
        one_number = self.temperature.stride() == (0,) and self.temperature.shape[0] > 1
        if not (one_number or torch.compiler.is_compiling()):
            check_temperature_values(self.temperature)
        return kept, replace(self, targets=targets if targets.ndim == 1 else torch.where(kept, targets, -1))

    def transform(self, rows: slice | None = None, columns: slice | None = None) -> LogitTransform:
        """How raw h.w of these rows and columns become logits."""
        return {
            "bias": None if self.bias is None else picked(self.bias, columns),
            "temperature": picked(self.temperature, rows),
            "logit_scale": self.logit_scale,
            "softcap": self.softcap,
        }

    def softmax_weights_kernel(
        self, passes: RowPasses, chunk_bytes: int | None, wanted: Wanted
    ) -> SoftmaxWeightsForward | None:
        """The kernel for the softmax weights of a chunk without its logits, where it is faster than those."""
        if self.gemm_dtype != self.hidden.dtype or not self.gemm_on_softmax or self.targets.ndim == 2:
            return None  # operands would be cast, weights are too narrow, or a row has several targets
        rows = buffers.chunk_rows(self.sizes(self.gemm_dtype, spares=wanted.weight), chunk_bytes)
        return (
            passes.softmax_weights_forward if passes.prefers_softmax_weights(self.hidden, self.weight, rows) else None
        )

    def chunk_memory(
        self, passes: RowPasses, chunk_bytes: int | None, wanted: Wanted, dtype: torch.dtype, vocab_size: int = 0
    ) -> Tensor:
        """[R, V] for a chunk of logits, or of weights, of this dtype; `vocab_size` of the largest shard, if any.

        If the default budget is more than the device has left, half as many rows are tried, with a warning.
        """
        sizes = self.sizes(dtype, spares=wanted.weight, vocab_size=vocab_size)
        rows = buffers.chunk_rows(sizes, chunk_bytes)
        empty = functools.partial(passes.empty_tile, dtype=dtype, device=self.hidden.device)
        try:
            return empty(rows, self.weight.shape[0])
        except torch.OutOfMemoryError:
            # All ranks of a sharded head need chunks of the same rows.
            if chunk_bytes is not None or vocab_size or rows == 1:
                raise
        logger.warning("no memory for %d rows of logits: chunks of half as many; fix: set chunk_bytes", rows)
        return empty(-(-rows // 2), self.weight.shape[0])

    def sizes(
        self,
        dtype: torch.dtype | None = None,
        *,
        weight_gradient: bool = True,
        gathers: bool = False,
        spares: bool = False,
        vocab_size: int = 0,
    ) -> buffers.Sizes:
        """Of the logits, or of weights of this dtype, whose hidden states may be cast, gathered or scaled.

        A chunk that `spares` an accumulator of dW may be larger for it, but not with the `vocab_size` of the
        largest shard: ranks, whose chunks are the same, may differ in what they want.
        """
        device, hidden_size, widens = self.hidden.device, self.hidden.shape[1], self.gemm_dtype != self.hidden.dtype
        copied = self.dtype.itemsize if widens else self.hidden.dtype.itemsize * (gathers or self.index is not None)
        scaled = self.gemm_dtype.itemsize if weight_gradient else 0
        spared = self.dtype.itemsize - self.weight.dtype.itemsize if spares and not vocab_size else 0
        return buffers.Sizes(
            self.targets.shape[0],  # len() would specialise a compiled graph to this number
            vocab_size or self.weight.shape[0],
            device,
            (dtype or self.dtype).itemsize,
            row_bytes=hidden_size * (copied + scaled),
            once_bytes=buffers.SCRATCH_BYTES * (device.type == "cpu") + SLICE_BYTES * widens,
            spared_bytes=hidden_size * spared,
        )

    def tiles(self, memory: Tensor, *, pad: bool = False, multiply: bool = True) -> Iterator[Tile]:
        """All logits, one row group after the other, each from left to right, in tiles of at most `memory` [R, C].

        With `pad` every tile has R rows: rows of zeros fill the last one. Unless `multiply`, the logits are undefined.
        """
        (height, width), gemm_dtype = memory.shape, self.gemm_dtype
        # Each tile of whole rows needs all of W, which is then cast once for all tiles.
        head_weight = self.weight.to(self.hidden.dtype) if width == self.weight.shape[0] else self.weight
        for rows in buffers.chunks(self.targets.shape[0], height):
            count = height if pad else rows.stop - rows.start
            index = None if self.index is None else picked(self.index, rows)
            hidden = (picked(self.hidden, rows) if index is None else self.hidden[index]).to(gemm_dtype)
            targets, temperature = picked(self.targets, rows), picked(self.temperature, rows)
            if pad:
                hidden, targets, temperature = (
                    _padded(values, count, fill) for values, fill in ((hidden, 0.0), (targets, 0), (temperature, 1.0))
                )
            group = slice(rows.start, rows.start + count)
            for columns in buffers.chunks(head_weight.shape[0], width):
                bias = None if self.bias is None else picked(self.bias, columns)
                transform = LogitTransform(
                    bias=bias, temperature=temperature, logit_scale=self.logit_scale, softcap=self.softcap
                )
                weight = picked(head_weight, columns).to(self.hidden.dtype)
                logits = memory if weight.shape[0] == width and count == height else memory[:count, : weight.shape[0]]
                if not multiply:
                    pass
                elif hidden.dtype == weight.dtype:
                    multiply_into(logits, hidden, weight.t())
                else:
                    for part, wide in widened(weight, logits.dtype):
                        torch.mm(hidden, wide.t(), out=logits[:, part])
                tile_targets = targets - columns.start if columns.start else targets
                yield Tile(group, columns, logits, hidden, weight, tile_targets, transform, index)


def flatten_head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    options: HeadOptions,
    *,
    sharded: bool = False,
    several: bool = False,
    ignore_index: int | None = None,
    mask: Any = None,
) -> Head:
    """The head of flat rows, after a check of shapes, dtypes and devices. The values of targets are not checked.

    With `several`, targets may have one dimension more than rows: [..., K]. Rows that do not count, by `ignore_index`
    or a mask, may have any temperature: here it is 1.
    """
    check_head(hidden, weight, targets, options, sharded=sharded, several=several)
    temperature, device = options.temperature, hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(device))
    dtype, bias = compute_dtype(hidden), options.bias
    if bias is not None and bias.dtype.itemsize > dtype.itemsize:
        bias = bias.to(dtype)  # one of fp64 would widen the fp32 logits that it is added to
    if isinstance(temperature, Tensor):
        temperature = temperature.detach().to(dtype).reshape(-1).contiguous()  # one that is expanded is a number
        if ignore_index is not None:
            kept = targets != ignore_index
            kept = kept if targets.ndim < hidden.ndim else kept.any(-1)
            temperature = torch.where(kept.reshape(-1), temperature, 1.0)
        if mask is not None:
            check_tensors(targets=targets, mask=mask)
            if mask.shape == targets.shape:  # else the loss refuses it
                temperature = torch.where(mask.reshape(-1) != 0, temperature, 1.0)
    else:
        count = math.prod(hidden.shape[:-1])  # `numel()` would be a constant of an exported graph
        temperature = torch.full((1,), temperature, dtype=dtype, device=hidden.device).expand(count)
    # One target in a last dimension of 1 takes the passes for single targets.
    single = targets.ndim < hidden.ndim or targets.shape[-1] == 1
    return Head(
        hidden=hidden.reshape(-1, hidden.shape[-1]),
        weight=weight,
        bias=bias,
        targets=targets.reshape(-1) if single else targets.reshape(-1, targets.shape[-1]),
        temperature=temperature,
        logit_scale=float(options.logit_scale),
        softcap=None if options.softcap is None else float(options.softcap),
    )


def multiply_into(out: Tensor, a: Tensor, b: Tensor, *, accumulate: bool = False) -> None:
    """out = (out +) a @ b, accumulated in the dtype of `out`. On a GPU, a and b may have 16 bits and `out` fp32."""
    wide: Any = {} if a.dtype == out.dtype else {"out_dtype": out.dtype}
    torch.addmm(out, a, b, out=out, **wide) if accumulate else torch.mm(a, b, out=out, **wide)


def widened(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """(rows of W, those rows in `dtype`), one slice at a time."""
    count, hidden_size = weight.shape
    for columns in buffers.chunks(count, max(1, SLICE_BYTES // (hidden_size * dtype.itemsize))):
        yield columns, weight[columns].to(dtype)


def _padded(rows: Tensor, count: int, value: float) -> Tensor:
    """[count, ...] from [R, ...], R <= count, filled up with `value`."""
    missing = count - len(rows)
    return rows if not missing else torch.cat([rows, rows.new_full((missing, *rows.shape[1:]), value)])


def local_targets(targets: Tensor, columns: slice) -> Tensor:
    """Targets, all at least -1, relative to a vocabulary slice; -1 where they are outside of it."""
    return torch.where((targets >= columns.start) & (targets < columns.stop), targets - columns.start, -1)


def softmax_weights_of(
    tile: Tile,
    passes: RowPasses,
    kernel: SoftmaxWeightsForward | None,
    *,
    entropy: bool,
    dtype: torch.dtype,
    moments: TakesMoments | None = None,
) -> tuple[Tensor, Tensor, Statistics]:
    """(E [R, V] in the memory of a tile of whole rows, its scale, the statistics), by the kernel or from raw logits."""
    if kernel is None:
        weights, scale, statistics = passes.softmax_weights_(
            tile.logits, tile.targets, entropy=entropy, moments=moments, dtype=dtype, **tile.transform
        )
    else:
        rows = tile.hidden, tile.weight, tile.targets
        weights, scale, statistics = kernel(*rows, out=tile.logits, entropy=entropy, **tile.transform)
    return weights, scale, Statistics(*statistics)


class Wanted(NamedTuple):
    """Which of the three gradients are wanted."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False

    @staticmethod
    def of(head: Head) -> Wanted:
        """Those that autograd needs."""
        tensors = (head.hidden, head.weight, head.bias)
        return Wanted(*(torch.is_grad_enabled() and x is not None and x.requires_grad for x in tensors))


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
        every_row = every_row and head.index is None and head.weight.shape[0] > 0
        allocate = torch.empty_like if every_row else torch.zeros_like
        self._hidden = allocate(head.hidden, dtype=hidden_dtype) if wanted.hidden else None
        self._rows: Tensor | None = None  # the accumulator of the current row group
        self._factor: Tensor | None = None  # its upstream gradients times the scale of its weights
        self._scaled_hidden: Tensor | None = None  # its hidden states, times that factor
        self._started: set[int] = set()  # first columns of the slices of dW that have been written
        weight_dtype = None if one_group and rounded else head.dtype
        self._weight = buffers.empty_like(head.weight, weight_dtype) if wanted.weight else None
        self._bias = head.weight.new_zeros(head.weight.shape[0], dtype=head.dtype) if wanted.bias else None

    def add_known(self, tile: Tile, passes: RowPasses, statistics: Statistics, upstream: Upstream) -> None:
        """Add a tile of raw logits whose statistics are known, for the upstream gradients of its rows."""
        grad_logprobs, grad_entropy = upstream
        if grad_entropy is None and self._head.gemm_on_softmax:
            weights, scale, _ = passes.softmax_weights_(
                tile.logits, tile.targets, statistics=statistics, dtype=self._head.gemm_dtype, **tile.transform
            )
            self.add_softmax_weights(tile, passes, weights, scale, grad_logprobs)
            return
        if self.scale is not None:
            grad_logprobs = grad_logprobs * self.scale
            grad_entropy = None if grad_entropy is None else grad_entropy * self.scale
        gradient = passes.logits_gradient_(
            tile.logits,
            tile.targets,
            statistics=statistics,
            grad_logprobs=grad_logprobs,
            grad_entropy=grad_entropy,
            dtype=self._head.gemm_dtype,
            **tile.transform,
        )
        self.add_logits_gradient(tile, gradient)

    def add_softmax_weights(
        self, tile: Tile, passes: RowPasses, weights: Tensor, scale: Tensor, grad_logprobs: Tensor
    ) -> None:
        """Add softmax weights [R, C], with d log p / d(h.w) = scale * weights, for the upstream gradients [R]."""
        if tile.columns.start == 0:  # once for a row group, not for each of its tiles
            hidden = None if self._weight is None else tile.hidden
            self._factor, self._scaled_hidden = passes.scale_hidden(hidden, scale, grad_logprobs)
        self.add_logits_gradient(tile, weights, self._factor)

    def add_logits_gradient(self, tile: Tile, values: Tensor, factor: Tensor | None = None) -> None:
        """Add what follows from d loss / d(h.w) [R, C] of a tile to the gradients of the head.

        That is `values`, with the scale in it; or `values` are softmax weights, and times `factor` [R] they are that.
        """
        dtype, index = self._head.dtype, tile.index
        first, last = tile.columns.start == 0, tile.columns.stop == self._head.weight.shape[0]
        if self._hidden is not None:
            if first:
                in_place = index is None and self._hidden.dtype == dtype
                self._rows = picked(self._hidden, tile.rows) if in_place else torch.empty_like(tile.hidden, dtype=dtype)
            assert self._rows is not None
            if values.dtype == tile.weight.dtype:
                multiply_into(self._rows, values, tile.weight, accumulate=not first)
            else:
                for part, wide in widened(tile.weight, dtype):
                    multiply_into(self._rows, values[:, part], wide, accumulate=not first or part.start > 0)
            if last:
                d_rows, self._rows = self._rows, None
                if factor is not None:
                    # A GPU rounds the product as it writes it; elsewhere another dtype takes a temporary.
                    at_once = index is None and d_rows.is_cuda
                    out = picked(self._hidden, tile.rows) if at_once else d_rows
                    d_rows = torch.mul(d_rows, factor[:, None], out=out)
                if self.scale is not None:
                    d_rows.div_(self.scale)
                if index is not None:
                    self._hidden[index] = d_rows.to(self._hidden.dtype)
                elif d_rows.dtype != self._hidden.dtype:
                    picked(self._hidden, tile.rows).copy_(d_rows)
                del d_rows  # before the product of dW
        if self._weight is not None:
            out = picked(self._weight, tile.columns)
            # A GEMM on tensor cores accumulates in fp32 and rounds its result once.
            direct = out.dtype == dtype or (out.dtype == values.dtype and self.scale is None)
            product = out if direct else torch.empty_like(out, dtype=dtype)
            hidden = tile.hidden if factor is None else self._scaled_hidden
            assert hidden is not None
            multiply_into(product, values.t(), hidden, accumulate=tile.columns.start in self._started)
            self._started.add(tile.columns.start)
            if not direct:
                out.copy_(product if self.scale is None else product.div_(self.scale))
        if self._bias is not None:
            columns = picked(self._bias, tile.columns)
            if factor is None:
                columns += values.sum(0, dtype=dtype)
            elif values.dtype == dtype:
                columns.addmv_(values.t(), factor)
            else:
                multiply_into(columns[:, None], values.t(), factor[:, None].to(values.dtype), accumulate=True)

    def finish(self) -> Gradients:
        """(dH, dW, db), each in the dtype of its input unless the constructor said otherwise. To be called once."""
        if self._weight is not None and not self._started:
            self._weight.zero_()
        if self.scale is not None:
            for gradient in (self._weight, self._bias):
                if gradient is not None and gradient.dtype == self._head.dtype:  # else each part was unscaled
                    gradient.div_(self.scale)
        head, self._head = self._head, None  # type: ignore[assignment]
        weight = None if self._weight is None else self._weight.to(head.weight.dtype if self._rounded else head.dtype)
        bias = None if self._bias is None or head.bias is None else self._bias.to(head.bias.dtype)
        hidden, self._hidden, self._weight, self._bias = self._hidden, None, None, None
        return hidden, weight, bias
