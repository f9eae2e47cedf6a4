"""Tiles of logits in plain torch, and the blocks of columns in which a pass visits them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fused_grpo._maths.distributions import cap_slope
from fused_grpo.passes import chunking, cpu_buffers

_PARTS = 4
_LOG2E = math.log2(math.e)


def empty_tile(rows: int, columns: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[R, C] for the raw logits of the largest tile; smaller ones are its first rows and columns."""
    stride = chunking.column_stride(rows)
    return cpu_buffers.empty((columns, stride), dtype=dtype, device=device)[:, :rows].t()


def block_width(tile: Tensor) -> int:
    """The columns of a block of a tile [R, C]. With powers of two, all blocks of a batch-invariant tile have the same
    width, and `block_sums` has equal parts."""
    return 1 << (max(1, chunking.BLOCK_BYTES // max(1, len(tile) * tile.element_size())).bit_length() - 1)


class Scratch:
    """Memory [R, c] for a block of a tile, column-major as the tile, by number; allocated when it is first needed."""

    def __init__(self, tile: Tensor) -> None:
        self._tile, self._most = tile, max(2, min(block_width(tile), tile.shape[1]))
        self._memory = dict[int, Tensor]()

    def __call__(self, number: int, columns: int) -> Tensor:
        rows = len(self._tile)
        if number not in self._memory:
            self._memory[number] = self._tile.new_empty(rows * self._most)
        return self._memory[number][: rows * columns].view(columns, rows).t()


class Block(NamedTuple):
    """A block of columns of a tile, with their transformed logits."""

    tile: RawTile
    columns: slice
    z: Tensor  # [R, c], -inf at the targets; in the tile itself without a transform, else in scratch 0
    slope: Tensor | None  # [R, c] dz/dx of the soft cap, where there is one and results are written
    out: Tensor | None  # [R, c], where they are written

    def scratch(self, number: int) -> Tensor:
        """Scratch memory [R, c]."""
        return self.tile.scratch(number, self.z.shape[1])

    def place(self, number: int = 0) -> Tensor:
        """Where to compute [R, c]: in the output, or in scratch memory if the output has another dtype."""
        return self.scratch(number) if self.out is None or self.out.dtype != self.z.dtype else self.out

    def write(self, values: Tensor) -> None:
        """Write `values`, which are in `place`, times the slope to the output."""
        assert self.out is not None
        values = values if self.slope is None else values.mul_(self.slope)
        if self.out.dtype != values.dtype:
            self.out.copy_(values)


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
        self.has_target = (targets >= 0) & (targets < raw.shape[1])
        self._column = torch.where(self.has_target, targets, 0)[:, None]
        # At one temperature that equals the scale, the raw logits are the logits, which saves a pass.
        self.as_it_is = bias is None and softcap is None and all_equal(temperature, logit_scale)
        self.width = block_width(raw)
        self.scratch = Scratch(raw)
        at_target = raw.gather(1, self._column) if bias is None else raw.gather(1, self._column) + bias[self._column]
        z, _ = self._transformed(at_target, None, torch.empty_like(at_target), slope=False)
        self.target_logit = torch.where(self.has_target, z[:, 0], -torch.inf)
        self.slope_at_target = None if softcap is None else cap_slope(at_target[:, 0] * (logit_scale / softcap))

    def blocks(self, out: Tensor | None) -> Iterator[Block]:
        """One cache-sized block at a time. Only writes to `out`, in the memory of the tile, change the tile."""
        shown = self._hide_(self.raw, self.targets) if self.as_it_is else ()
        for columns in chunking.chunks(self.raw.shape[1], self.width):
            raw, slope = self.raw[:, columns], None
            z = raw
            if not self.as_it_is:
                bias = None if self.bias is None else self.bias[columns]
                z, slope = self._transformed(raw, bias, self.scratch(0, raw.shape[1]), slope=out is not None)
                self._hide_(z, self.targets - columns.start)
            yield Block(self, columns, z, slope, None if out is None else out[:, columns])
        if out is None and self.as_it_is:
            self.raw.scatter_(1, *shown)

    def largest(self) -> Tensor:
        """The largest logit of each row except the target's, [R]."""
        return torch.stack([block.z.amax(1) for block in self.blocks(None)]).amax(0)

    def put_at_target_(self, out: Tensor, values: Tensor) -> None:
        """Write `values` [R] at the targets that are columns of `out`."""
        mine = torch.where(self.has_target[:, None], values[:, None].to(out.dtype), out.gather(1, self._column))
        out.scatter_(1, self._column, mine)

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

    @staticmethod
    def _hide_(z: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Write -inf at the targets in z [R, c]. Returns the arguments of `z.scatter_(1, ...)` that restores them."""
        column = targets[:, None].clamp(0, z.shape[1] - 1)
        kept = z.gather(1, column)
        z.scatter_(1, column, torch.where(targets[:, None] == column, -torch.inf, kept))
        return column, kept


def exp(x: Tensor, *, out: Tensor) -> Tensor:
    """e^x by exp2, which PyTorch vectorises on every CPU. Its exp may be MKL's, which is slow on some."""
    return torch.mul(x, _LOG2E, out=out).exp2_()


def block_sums(values: Tensor) -> Tensor:
    """[R] over the columns of a block [R, c], in parts: twice as fast as one sum over contiguous columns.

    (A product with ones would be as fast, but would add one column after the other: equal columns would all round in
    the same direction.)
    """
    if values.shape[1] % _PARTS:
        return values.sum(1)
    parts: Tensor = values.t().unflatten(0, (_PARTS, -1))
    return parts.sum(1).sum(0)


def in_place(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """`logits` [R, C] as memory for [R, C] of `dtype`; 16-bit dtypes take the front half of each row or column."""
    if dtype == logits.dtype:
        return logits
    if logits.stride(0) == 1:
        return logits.t().view(dtype)[:, : len(logits)].t()
    return logits.view(dtype)[:, : logits.shape[1]]


def all_equal(temperature: Tensor, value: float) -> bool:
    return temperature.device.type == "cpu" and bool((temperature == value).all())
