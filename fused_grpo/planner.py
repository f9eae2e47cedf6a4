"""How large a piece of the logits may exist, from shapes and a byte budget.

A piece of N x V is the only big temporary of this library, so its budget is the memory dial of all of it. There are
two shapes of piece:

- A **chunk** is whole rows, [R, V]: what a loss needs that must see a row's log-sum-exp before its gradient. Each chunk
  reads W and updates dW once, so below about a thousand rows those passes, not the GEMMs, set the time.
- A **tile** is rows x columns, [R, C]: what suffices where the log-sum-exp is known, or can be folded in tile by tile.
  One tile high, each slice of W is read once and each slice of dW written once, with no accumulator beside it; the
  price is that dH, [R, D], accumulates over the tiles. So tiles are tall: all rows up to twice the side of a square,
  beyond which narrow tiles would spend more on dH than another sweep over the vocabulary costs.

On a CPU the columns of a piece, not its rows, are in one piece in memory: what a GEMM packs for each block of W is then
the hidden states, which fit a cache, and not W.

256 MiB is 441 whole rows at V=151936, or all of 8192 rows by 8192 columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

DEFAULT_CHUNK_BYTES = 256 * 2**20

# What stays in the cache of a CPU core or two: the row passes of `chunked.py` walk a piece in two blocks of this size.
BLOCK_BYTES = 2 * 2**20

# What a CPU holds beside the piece: those two blocks, and small change.
_SCRATCH_BYTES = 2 * BLOCK_BYTES + BLOCK_BYTES // 2

# A CPU multiplies tiles of this size at all but full speed.
CPU_TILE_BYTES = 32 * 2**20

# Whole rows on a CPU, unless told otherwise: few enough to be small beside full logits, many enough for a good GEMM.
CPU_CHUNK_BYTES = 96 * 2**20

# The numbers of a cache line in fp32, by which columns are aligned.
_LINE = 16

# Below this many rows nothing is aligned: too much of a column would be padding.
_LEAST_ALIGNED = 96

# Columns in multiples of what GEMM kernels and vectorised loads like.
ALIGNMENT = 128


class TileShape(NamedTuple):
    """Of the pieces of one sweep, and how they lie in memory."""

    rows: int
    columns: int
    stride: int = 0
    """How far apart columns begin, each of them in one piece; 0: rows are, one after the other."""

    @property
    def size(self) -> int:
        """The numbers that a buffer for it holds."""
        return (self.stride or self.rows) * self.columns


def budget(chunk_bytes: int | None) -> int:
    """The number of bytes that `chunk_bytes` stands for."""
    return DEFAULT_CHUNK_BYTES if chunk_bytes is None else chunk_bytes


def _room(chunk_bytes: int | None, device: torch.device, slice_bytes: int) -> int:
    """What the budget leaves for the piece itself, beside the scratch of a CPU's row passes and GEMMs."""
    whole = budget(chunk_bytes)
    return max(whole - _SCRATCH_BYTES - slice_bytes, whole // 3) if device.type == "cpu" else whole


def chunk_shape(
    num_rows: int,
    vocab_size: int,
    *,
    device: torch.device,
    itemsize: int,
    row_bytes: int = 0,
    slice_bytes: int = 0,
    chunk_bytes: int | None = None,
    in_columns: bool = False,
) -> TileShape:
    """Whole rows: the most that fit the budget (at least one), evened out so that the last chunk is not a stub."""
    chunk_bytes = CPU_CHUNK_BYTES if chunk_bytes is None and device.type == "cpu" else chunk_bytes
    most = _room(chunk_bytes, device, slice_bytes) // max(1, vocab_size * itemsize + row_bytes)
    if not in_columns or most < _LEAST_ALIGNED:
        rows = _evened(num_rows, most)
        return TileShape(rows, vocab_size, rows if in_columns else 0)
    most -= (most - _LINE) % (2 * _LINE)
    even = _evened(num_rows, most)
    # Columns without a gap between them are one long one to whoever goes through all of them.
    rows = column_stride(even)
    if num_rows > rows and num_rows % rows < rows // 2:
        rows = even + -even % _LINE
    rows = min(num_rows, rows)
    return TileShape(rows, vocab_size, column_stride(rows))


def tile_shape(
    num_rows: int,
    vocab_size: int,
    *,
    device: torch.device,
    itemsize: int,
    row_bytes: int = 0,
    column_bytes: int = 0,
    slice_bytes: int = 0,
    chunk_bytes: int | None = None,
    in_columns: bool = False,
) -> TileShape:
    """The tile for [num_rows, vocab_size] logits of `itemsize` bytes each.

    The budget covers the tile, `row_bytes` for each of its rows and `column_bytes` for each of its columns (copies of
    hidden states and of W in the dtype of the GEMM), `slice_bytes` once, and on a CPU the two blocks of the row passes.
    """
    if device.type == "cpu":
        chunk_bytes = min(budget(chunk_bytes), CPU_TILE_BYTES)
    room = _room(chunk_bytes, device, slice_bytes)
    tallest = 2 * math.isqrt(room // itemsize)
    if row_bytes:
        tallest = min(tallest, room // (4 * row_bytes))
    rows = _evened(num_rows, tallest)
    stride = column_stride(rows) if in_columns else 0
    widest = (room - rows * row_bytes) // max(1, (stride or rows) * itemsize + column_bytes)
    widest -= widest % ALIGNMENT if widest >= ALIGNMENT else 0
    columns = _evened(vocab_size, widest)
    columns = min(vocab_size, columns + -columns % ALIGNMENT) if widest >= ALIGNMENT else columns
    return TileShape(rows, columns, stride)


def column_stride(rows: int) -> int:
    """An odd multiple of 16, which is an odd number of cache lines in fp32, lest columns share a set of the cache."""
    return rows if rows < _LEAST_ALIGNED else rows + (_LINE - rows) % (2 * _LINE)


def _evened(total: int, most: int) -> int:
    """The size of the parts, at most `most` (at least 1), when `total` is cut into as few and as equal as possible."""
    parts = -(-total // max(1, most))
    return -(-total // max(1, parts))


def chunks(total: int, size: int) -> Iterator[slice]:
    """The slices of `size` that cover `total`, in order; one empty slice where there is nothing."""
    for start in range(0, max(1, total), max(1, size)):
        yield slice(start, min(start + size, total))
