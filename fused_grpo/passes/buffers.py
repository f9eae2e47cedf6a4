"""The size of a chunk or tile of the logits, from shapes and a byte budget, and its memory.

A chunk or tile of the [N, V] logits is the only large temporary of this library, so its budget sets the memory:

- A **chunk** is whole rows, [R, V]. A gradient that is taken in the forward pass needs it. Each chunk reads W and
  updates dW once, so below about a thousand rows this traffic, not the GEMMs, sets the time.
- A **tile** is rows x columns, [R, C]. It suffices where the statistics of the rows are known, or can be merged. If one
  tile holds all rows, each slice of W is read once and each slice of dW is written once, without an accumulator; but
  dH, [R, D], accumulates over the tiles. So tiles are tall: all rows, up to twice the side of a square. Beyond that,
  narrow tiles would spend more time on dH than another sweep over the vocabulary costs.

Without a budget from the caller, a chunk on a GPU has up to 4096 rows of fp32, where the GEMMs hide the traffic of dW,
within a 48th of the device's total memory. Free memory is not used for this: the order of a sum would change from run
to run.

On a CPU, the memory of a chunk and of a head's gradient comes from a cache. Fresh memory costs a page fault for every
4 KiB, which is a twentieth of the time of a loss, or more. On a GPU, PyTorch's caching allocator reuses memory; on a
CPU, the C library returns large blocks to the kernel at once. So these come from a cache of anonymous mappings. A
mapping returns to the cache when its last tensor is freed. Cached mappings are marked with `MADV_FREE`, so the kernel
may take their pages when memory is short, and the cache holds at most one gigabyte.

While PyTorch's profiler records, memory comes from PyTorch, so that the profiler counts it. Cached memory becomes a
tensor by `torch.frombuffer`, so its storage cannot be resized.
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

DEFAULT_TILE_BYTES = 256 * 2**20
"""8192 rows by 8192 columns of logits."""

# Of a column of a chunk on a GPU, 4096 rows in fp32: with so many its GEMMs, not the traffic of dW, set the time.
MOST_COLUMN_BYTES = 4 * 4096
MEMORY_SHARE = 48

# A block that stays in the caches of a CPU. The passes of `torch_passes` use two of them.
BLOCK_BYTES = 4 * 2**20

# The memory on a CPU beside the chunk or tile: those two blocks, and small tensors.
SCRATCH_BYTES = 2 * BLOCK_BYTES + BLOCK_BYTES // 2

# With tiles of this size, GEMMs on a CPU are almost at full speed.
CPU_TILE_BYTES = 64 * 2**20

# Whole rows on a CPU: small beside full logits, and enough rows for a fast GEMM.
CPU_CHUNK_BYTES = 96 * 2**20

# The chunks of a student and of a teacher together on a CPU: small beside two full logits, and fewer sums of dW.
CPU_PAIR_BYTES = 320 * 2**20

# Softmax weights of all rows on a CPU, kept until the backward pass of log-probs. Not a share of its memory, as on a
# GPU: which plan runs, and so the rounding, would differ between machines.
CPU_KEPT_BYTES = 512 * 2**20

# fp32 numbers per cache line, to which columns are aligned.
_LINE = 16

# With fewer rows nothing is aligned: too much of a column would be padding.
_LEAST_ALIGNED = 96

# Rows and columns are multiples of this, for GEMM kernels and vectorised loads.
ALIGNMENT = 128


def chunk_budget(chunk_bytes: int | None, device: torch.device) -> int:
    """The budget of a chunk, in bytes."""
    if chunk_bytes is not None:
        return chunk_bytes
    if device.type == "cpu":
        return CPU_CHUNK_BYTES
    return total_memory(device) // MEMORY_SHARE


def kept_budgets(chunk_bytes: int | None, device: torch.device) -> tuple[int, int]:
    """Bytes for softmax weights of all rows, with what is of their size, and for the tiles of their products."""
    on_cpu = device.type == "cpu"
    budget = CPU_KEPT_BYTES if on_cpu and chunk_bytes is None else chunk_budget(chunk_bytes, device)
    tile = min(budget // 4, CPU_TILE_BYTES if on_cpu else DEFAULT_TILE_BYTES)
    return budget - tile, tile


@functools.cache
def total_memory(device: torch.device) -> int:
    """The memory of the device, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return MEMORY_SHARE * DEFAULT_TILE_BYTES


class Sizes(NamedTuple):
    """Logits that are cut into chunks or tiles, and the bytes beside one of these, which its budget covers too."""

    num_rows: int
    vocab_size: int
    device: torch.device
    itemsize: int  # of a logit
    row_bytes: int = 0  # of each row: copies of its hidden states
    column_bytes: int = 0  # of each column: copies of its row of W
    once_bytes: int = 0  # on a CPU the two blocks of the row passes, and a slice of W that a GEMM widens
    spared_bytes: int = 0  # of each column, of the accumulator of dW, where one chunk has all rows


def chunk_rows(sizes: Sizes, chunk_bytes: int | None = None) -> int:
    """The rows of a chunk: as many as fit the budget (at least one), spread evenly over the chunks.

    A GPU's default budget is not kept to if a single chunk of all rows is larger by no more than what it spares.
    """
    num_rows, vocab_size, device, itemsize, row_bytes, _, once_bytes, spared_bytes = sizes
    budget = chunk_budget(chunk_bytes, device)
    most = max(budget - once_bytes, budget // 3) // max(1, vocab_size * itemsize + row_bytes)
    # Those that are too few to align stay.
    if device.type == "cpu":
        most -= (most - _LINE) % (2 * _LINE) if most >= _LEAST_ALIGNED else 0
    else:
        if chunk_bytes is None:
            most = min(most, MOST_COLUMN_BYTES // min(itemsize, 4))
            if num_rows <= most + spared_bytes // itemsize:
                return max(1, num_rows)
        most -= most % ALIGNMENT if most >= ALIGNMENT else 0
    if num_rows <= most:
        return max(1, num_rows)
    rows = _evened(num_rows, most)
    rows = column_stride(rows) if device.type == "cpu" else rows + -rows % ALIGNMENT
    return max(1, min(rows, most))


def tile_shape(sizes: Sizes, chunk_bytes: int | None = None) -> tuple[int, int]:
    """(rows, columns) of the tile."""
    num_rows, vocab_size, device, itemsize, row_bytes, column_bytes, once_bytes, _ = sizes
    budget = DEFAULT_TILE_BYTES if chunk_bytes is None else chunk_bytes
    budget = min(budget, CPU_TILE_BYTES) if device.type == "cpu" else budget
    room = max(budget - once_bytes, budget // 3)
    tallest = 2 * math.isqrt(room // itemsize)
    if row_bytes:
        tallest = min(tallest, room // (4 * row_bytes))
    rows = _evened(num_rows, tallest)
    height = column_stride(rows) if device.type == "cpu" else rows
    widest = (room - rows * row_bytes) // max(1, height * itemsize + column_bytes)
    widest -= widest % ALIGNMENT if widest >= ALIGNMENT else 0
    columns = _evened(vocab_size, widest)
    columns = min(vocab_size, columns + -columns % ALIGNMENT) if widest >= ALIGNMENT else columns
    return rows, columns


def column_stride(rows: int) -> int:
    """The stride between contiguous columns on a CPU: an odd number of cache lines in fp32, so that columns do not
    compete for one set of the cache."""
    more = (_LINE - rows) % (2 * _LINE)
    if type(rows) is not int:  # symbolic: a branch would limit a compiled graph to fewer rows, or to more
        return rows + more * torch.sym_min(1, rows // _LEAST_ALIGNED)  # type: ignore[no-any-return]
    return rows if rows < _LEAST_ALIGNED else rows + more


def _evened(total: int, most: int) -> int:
    """The size of the parts if `total` is split into as few and as equal parts of at most `most` as possible."""
    parts = -(-total // max(1, most))
    return -(-total // max(1, parts))


def gather_rows(tile: Tensor, index: Tensor, *, out: Tensor) -> Tensor:
    """out = tile[index], at the speed of a copy for tiles of either layout."""
    if tile.stride(0) == 1:  # column-major, where `index_select` takes 15 times as long
        torch.gather(tile.t(), 1, index.expand(tile.shape[1], -1), out=out.t())
        return out
    return torch.index_select(tile, 0, index, out=out)


def chunks(total: int, size: int) -> Iterator[slice]:
    """Slices of `size` that cover `total`, in order; one empty slice where `total` is 0."""
    for start in range(0, max(1, total), max(1, size)):
        yield slice(start, min(start + size, total))


# The C library reuses smaller blocks itself.
_LEAST_BYTES = 8 * 2**20
_MOST_FREE_BYTES = 2**30

# Memory of tensors that are gone, for the next ones.
_free_pages: list[mmap.mmap] = []


def empty(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty` in cached memory where there is some. The values are undefined."""
    count = math.prod(shape)
    size = count * dtype.itemsize
    recycled = device.type == "cpu" and size >= _LEAST_BYTES and hasattr(mmap, "MADV_FREE")
    if recycled and not torch._C._autograd._profiler_enabled():
        with contextlib.suppress(OSError):  # no memory: PyTorch raises its own error
            return torch.frombuffer(_loan(size), dtype=dtype, count=count).view(shape)
    return torch.empty(shape, dtype=dtype, device=device)


def empty_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.empty_like` in cached memory."""
    dtype = tensor.dtype if dtype is None else dtype
    if not tensor.is_contiguous():
        return torch.empty_like(tensor, dtype=dtype)
    return empty(tuple(tensor.shape), dtype=dtype, device=tensor.device)


def _loan(size: int) -> memoryview:
    """At least `size` bytes, which return to the cache when the last reference is gone."""
    fitting = [pages for pages in _free_pages if size <= len(pages) <= 2 * size]
    for pages in sorted(fitting, key=len):
        with contextlib.suppress(ValueError):  # another thread took it
            _free_pages.remove(pages)
            break
    else:
        pages = _fresh(size)
    loan = memoryview(pages)
    weakref.finalize(loan, _take_back, pages).atexit = False  # at exit, other objects may still read it
    return loan


def _fresh(size: int) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        pages = mmap.mmap(-1, size, flags=flags)
    except OSError:  # cached mappings count against the limit on address space
        _free_pages.clear()
        pages = mmap.mmap(-1, size, flags=flags)
    _advised(pages, getattr(mmap, "MADV_HUGEPAGE", 0))
    return pages


def _take_back(pages: mmap.mmap) -> None:
    if len(pages) > _MOST_FREE_BYTES or not _advised(pages, mmap.MADV_FREE):
        return
    _free_pages.append(pages)
    while sum(map(len, _free_pages)) > _MOST_FREE_BYTES:
        _free_pages.pop(0)


def _advised(pages: mmap.mmap, advice: int) -> bool:
    """Whether the kernel accepts this advice."""
    try:
        pages.madvise(advice)
    except OSError:
        return False
    return True
