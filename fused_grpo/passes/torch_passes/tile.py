"""A tile of raw logits, visited in blocks of columns that fit the caches, and what the passes do to a block."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fused_grpo._maths.distributions import cap_slope
from fused_grpo.passes import buffers

PARTS = 4
_LOG2E = math.log2(math.e)


def empty_tile(rows: int, columns: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[R, C] for the raw logits of the largest tile; smaller ones are its first rows and columns."""
    stride = buffers.column_stride(rows)
    return buffers.empty((columns, stride), dtype=dtype, device=device)[:, :rows].t()


def scratch(tile: Tensor, count: int) -> tuple[int, list[Tensor]]:
    """(the columns of a block of a tile, memory [R, c] for `count` blocks, column-major as the tile).

    With powers of two, all blocks of a batch-invariant tile have the same width, and `block_sums` has equal parts.
    """
    most = max(1, buffers.BLOCK_BYTES // max(1, len(tile) * tile.element_size()))
    width = 1 << (most.bit_length() - 1)
    columns = max(2, min(width, tile.shape[1]))
    return width, [tile.new_empty(columns, len(tile)).t() for _ in range(count)]


class Block(NamedTuple):
    """A block of columns of a tile, with their transformed logits, and where a pass computes; all are [R, c]."""

    columns: slice
    z: Tensor  # -inf at the targets; in the tile itself without a transform, else in scratch memory
    centred: Tensor  # for z - m
    e: Tensor  # for e^(z - m) and what becomes of it, which is then written to the output


class RawTile:
    """A tile [R, C], the transform of its raw logits, and the places of its targets."""

    def __init__(
        self,
        raw: Tensor,
        targets: Tensor,
        *,
        bias: Tensor | None = None,
        temperature: Tensor,
        logit_scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        self.raw, self.targets, self.bias, self.temperature = raw, targets, bias, temperature
        self.logit_scale, self.softcap, self.on_cpu = logit_scale, softcap, raw.device.type == "cpu"
        # At one temperature that equals the scale, the raw logits are the logits, which saves a pass.
        self.is_plain = is_plain(bias, temperature, logit_scale, softcap)
        has_target = (targets >= 0) & (targets < raw.shape[1])
        column = torch.where(has_target, targets, 0)[:, None]
        at_target = raw.gather(1, column) if bias is None else raw.gather(1, column) + bias[column]
        z = at_target
        if not self.is_plain:
            z, _ = self._transformed(at_target, None, torch.empty_like(at_target), slope=False)
        self.target_logit = torch.where(has_target, z[:, 0], -torch.inf)
        self.slope_at_target = None if softcap is None else cap_slope(at_target[:, 0] * (logit_scale / softcap))

    def blocks(self, out: Tensor | None, *, apart: bool = False) -> Iterator[Block]:
        """One cache-sized block at a time. What a pass leaves in a block's `e` is written to `out`, times the slope.

        `out` is in the memory of the tile; without it, the tile does not change. With `apart`, `e` is not in the memory
        of `centred`.
        """
        in_out = out is not None and out.dtype == self.raw.dtype  # that of `e`; without a transform, that is all
        # A block for what is not in the tile of z, `centred` and `e`; another for an `e` that must not be in the first.
        needed = (apart or not (in_out and self.is_plain)) + (apart and not in_out)
        width, memory = scratch(self.raw, needed)
        restore = put_at_targets_(self.raw, self.targets, -torch.inf) if self.is_plain else ()
        for columns in buffers.chunks(self.raw.shape[1], width):
            z, slope = self.raw[:, columns], None
            spare = [values[:, : z.shape[1]] for values in memory]
            if not self.is_plain:
                bias = None if self.bias is None else self.bias[columns]
                z, slope = self._transformed(z, bias, spare[0], slope=out is not None)
                put_at_targets_(z, self.targets - columns.start, -torch.inf)
            e = out[:, columns] if out is not None and in_out else spare[-1]
            yield Block(columns, z, spare[0] if apart else e, e)
            if slope is not None:
                e.mul_(slope)
            if out is not None and not in_out:
                out[:, columns].copy_(e)
        if out is None and self.is_plain:
            self.raw.scatter_(1, *restore)

    def largest(self) -> Tensor:
        """The largest logit of each row except the target's, [R]."""
        return torch.stack([block.z.amax(1) for block in self.blocks(None)]).amax(0)

    def _transformed(
        self, raw: Tensor, bias: Tensor | None, out: Tensor, *, slope: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(z, dz/dx of the soft cap if there is one and `slope`), from `raw` [R, c] into `out`."""
        raw = raw if bias is None else torch.add(raw, bias, out=out)
        temperature = self.temperature[:, None]
        if self.softcap is None:
            # If temperature and scale are equal, this is exactly 1: skipping the product gives the same bits.
            return torch.mul(raw, self.logit_scale / temperature, out=out), None
        torch.mul(raw, self.logit_scale / self.softcap, out=out).tanh_()
        slopes = 1 - out.square() if slope else None
        return out.mul_(self.softcap / temperature), slopes


def put_at_targets_(z: Tensor, targets: Tensor, values: Tensor | float) -> tuple[Tensor, Tensor]:
    """Write values, one or [R, 1], at the targets [R] that are columns of z [R, c].

    Returns the arguments of `z.scatter_(1, ...)` that restores what was there.
    """
    column = targets[:, None].clamp(0, z.shape[1] - 1)
    kept = z.gather(1, column)
    z.scatter_(1, column, torch.where(targets[:, None] == column, values, kept))
    return column, kept


def exp(x: Tensor, *, out: Tensor) -> Tensor:
    """e^x by exp2, which PyTorch vectorises on every CPU. Its exp may be MKL's, which is slow on some."""
    return torch.mul(x, _LOG2E, out=out).exp2_()


def _over_columns(reduce: Callable[[Tensor, int], Tensor], values: Tensor) -> Tensor:
    """[R] over the columns of a block [R, c], in parts: twice as fast as one sum over contiguous columns, and every
    core reads the columns that it writes next.

    (A product with ones would be as fast as a sum, but would add one column after the other: equal columns would all
    round in the same direction.)
    """
    count, parts = values.shape[1], 1 if values.shape[1] % PARTS else PARTS
    return reduce(reduce(values.t().view(parts, count // parts, len(values)), 1), 0)


block_sums = functools.partial(_over_columns, torch.sum)
block_maxima = functools.partial(_over_columns, torch.amax)


def narrow_memory(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """`logits` [R, C] as memory for [R, C] of a narrower `dtype`: the front of each row or column."""
    if logits.stride(0) == 1:
        return logits.t().view(dtype)[:, : len(logits)].t()
    return logits.view(dtype)[:, : logits.shape[1]]


def is_plain(bias: Tensor | None, temperature: Tensor, logit_scale: float, softcap: float | None) -> bool:
    """Whether raw logits are known to be the logits. On a GPU, the values of temperatures would synchronize."""
    return bias is None and softcap is None and temperature.is_cpu and bool((temperature == logit_scale).all())
