"""A cache of large buffers in CPU memory.

Each call needs a chunk of the logits and the gradient of a head. Fresh memory costs a page fault for every 4 KiB, which
is a twentieth of the time of a loss, or more. On a GPU, PyTorch's caching allocator reuses memory; on a CPU, the C
library returns large blocks to the kernel at once. So these two tensors come from a cache of anonymous mappings. A
mapping returns to the cache when its last tensor is freed. Cached mappings are marked with `MADV_FREE`, so the kernel
may take their pages when memory is short, and the cache holds at most one gigabyte.

While PyTorch's profiler records, memory comes from PyTorch, so that the profiler counts it. Cached memory becomes a
tensor by `torch.frombuffer`, so its storage cannot be resized.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref

import torch
from torch import Tensor

# The C library reuses smaller blocks itself.
_LEAST_BYTES = 8 * 2**20
_MOST_KEPT_BYTES = 2**30

_kept: list[mmap.mmap] = []


def empty(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty` in cached memory where there is some. The values are undefined."""
    count = math.prod(shape)
    size = count * dtype.itemsize
    recycled = device.type == "cpu" and size >= _LEAST_BYTES and hasattr(mmap, "MADV_FREE")
    if recycled and not torch._C._autograd._profiler_enabled():
        with contextlib.suppress(OSError):  # no memory: PyTorch raises its own error
            return torch.frombuffer(_loan(size), dtype=dtype, count=count).view(shape)
    return torch.empty(shape, dtype=dtype, device=device)


def empty_like(tensor: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.empty_like` in cached memory."""
    dtype = tensor.dtype if dtype is None else dtype
    if not tensor.is_contiguous():
        return torch.empty_like(tensor, dtype=dtype)
    return empty(tuple(tensor.shape), dtype=dtype, device=tensor.device)


def _loan(size: int) -> memoryview:
    """At least `size` bytes, which return to the cache when the last reference is gone."""
    fitting = [pages for pages in _kept if size <= len(pages) <= 2 * size]
    for pages in sorted(fitting, key=len):
        with contextlib.suppress(ValueError):  # another thread took it
            _kept.remove(pages)
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
        _kept.clear()
        pages = mmap.mmap(-1, size, flags=flags)
    _advised(pages, getattr(mmap, "MADV_HUGEPAGE", 0))
    return pages


def _take_back(pages: mmap.mmap) -> None:
    if len(pages) > _MOST_KEPT_BYTES or not _advised(pages, mmap.MADV_FREE):
        return
    _kept.append(pages)
    while sum(map(len, _kept)) > _MOST_KEPT_BYTES:
        _kept.pop(0)


def _advised(pages: mmap.mmap, advice: int) -> bool:
    """Whether the kernel accepts this advice."""
    try:
        pages.madvise(advice)
    except OSError:
        return False
    return True
