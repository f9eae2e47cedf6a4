"""The moments of a tile's rows, taken block by block while their logits and then their exponentials are in cache.

What can wait for all blocks is one operation at the end: on a CPU, starting an operation on a row vector takes longer
than the operation.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from fused_grpo._maths.moments import Moments, merge_squares
from fused_grpo.passes.torch_passes.tile import PARTS, Block, RawTile, block_sums, put_at_targets_, scratch


class _AtTargets(NamedTuple):
    """Of a block, each [K]: the rows whose target is one of its columns, that column, and its logit."""

    rows: Tensor
    columns: Tensor
    logits: Tensor


class TileMoments:
    """Takes the moments of a tile, in its dtype: for each block from left to right `add_logits`, `add_exponentials`."""

    def __init__(self, tile: RawTile) -> None:
        self._tile = tile
        self._width, _ = scratch(tile.raw, 0)
        self._spare = tile.raw.new_empty(min(self._width, tile.raw.shape[1]) // PARTS, len(tile.raw))
        self._at_targets = self._targets_of_blocks() if tile.on_cpu else []
        # Those of `Moments` [R] so far, and of each block [R] what is summed at the end.
        self._largest = torch.full_like(tile.target_logit, -torch.inf)
        self._before = self._largest.clone()
        self._sums, self._squares, self._shifts = list[Tensor](), list[Tensor](), list[Tensor]()

    def _targets_of_blocks(self) -> list[_AtTargets]:
        targets, rows = self._tile.targets.sort()
        num_columns = self._tile.raw.shape[1]
        starts = torch.arange(0, num_columns + self._width, self._width, dtype=targets.dtype, device=targets.device)
        starts.clamp_max_(num_columns)
        columns, logits = targets % self._width, self._tile.target_logit[rows]
        bounds = itertools.pairwise(torch.searchsorted(targets, starts).tolist())
        return [_AtTargets(rows[a:b], columns[a:b], logits[a:b]) for a, b in bounds]

    def add_logits(self, block: Block, largest: Tensor) -> None:
        """The logits of a block [R, c], -inf at the targets, and the largest of each row [R]."""
        z, largest_before = block.z, self._largest
        self._largest = torch.maximum(largest_before, largest)
        if self._tile.on_cpu:
            rows, columns, logits = self._at_targets[block.columns.start // self._width]
            z[rows, columns] = logits
            self._sums.append(block_sums(z))
            z[rows, columns] = -torch.inf
            before = self._largest[rows]
            # Which of this block's logits are before the target is only asked where one may tie with it.
            if (tied := before == logits).any():
                earlier = z[rows[tied]].masked_fill_(_columns(z) >= columns[tied, None], -torch.inf)
                before[tied] = torch.maximum(largest_before[rows[tied]], earlier.amax(1))
            self._before[rows] = before
        else:
            local = self._tile.targets - block.columns.start
            restore = put_at_targets_(z, local, self._tile.target_logit[:, None])
            self._sums.append(block_sums(z))
            z.scatter_(1, *restore)
            earlier = z.masked_fill(_columns(z) >= local[:, None], -torch.inf)
            self._before = torch.maximum(self._before, earlier.amax(1))

    def add_exponentials(self, e: Tensor, shift: Tensor) -> None:
        """e^(z - shift) of the same block, 0 at the targets; `shift` is [R]."""
        if e.shape[1] % PARTS:
            sums = torch.square(e)
        else:
            # Of each four consecutive columns one, so that a core reads those that it has written.
            first, *others = e.t().view(e.shape[1] // PARTS, PARTS, len(e)).unbind(1)
            sums = torch.mul(first, first, out=self._spare[: len(first)]).t()
            for part in others:
                sums.addcmul_(part.t(), part.t())
        self._squares.append(block_sums(sums))
        self._shifts.append(shift)

    def finish(self) -> Moments:
        """Those of all blocks."""
        shift, squares = merge_squares(torch.stack(self._shifts), torch.stack(self._squares))
        # A target after this tile is in none of its blocks.
        before = torch.where(self._tile.targets < self._tile.raw.shape[1], self._before, self._largest)
        sums, target_logit = torch.stack(self._sums).sum(0), self._tile.target_logit
        return Moments(shift, squares, sums, self._largest, before, target_logit)


def _columns(z: Tensor) -> Tensor:
    return torch.arange(z.shape[1], device=z.device)
