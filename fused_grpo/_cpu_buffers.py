"""Large memory on a CPU, used again.

Each call needs a piece of the logits and the gradient of a head, and fresh memory costs a page fault for every 4 KiB
of them: a twentieth of the time of a loss, more where the kernel has to look for pages. On a GPU, PyTorch's allocator
would hand them out again; the C library's gives large pieces back to the kernel at once. So these two come from here:
anonymous mappings that return when the last tensor on them is gone. Until the next call they are the kernel's for the
asking (`MADV_FREE`), so that nobody runs out of memory for their sake, and at most a gigabyte of them is kept.

While PyTorch's profiler records, memory comes from PyTorch, that it be counted. Tensors are otherwise those of
`torch.frombuffer`: their storage cannot be resized.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref

import torch
from torch import Tensor

# Smaller pieces the C library hands out again itself, or they are quickly had.
_LEAST_BYTES = 8 * 2**20
_MOST_KEPT_BYTES = 2**30

_kept: list[mmap.mmap] = []


def empty(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty`, of pages that have been in use before where there are such. What they hold is undefined."""
    count = math.prod(shape)
    size = count * dtype.itemsize
    recycled = device.type == "cpu" and size >= _LEAST_BYTES and hasattr(mmap, "MADV_FREE")
    if recycled and not torch._C._autograd._profiler_enabled():
        with contextlib.suppress(OSError):  # no memory: PyTorch says so in its own words
            return torch.frombuffer(_loan(size), dtype=dtype, count=count).view(shape)
    return torch.empty(shape, dtype=dtype, device=device)


def empty_like(tensor: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.empty_like`, of such pages."""
    dtype = tensor.dtype if dtype is None else dtype
    if not tensor.is_contiguous():
        return torch.empty_like(tensor, dtype=dtype)
    return empty(tuple(tensor.shape), dtype=dtype, device=tensor.device)


def _loan(size: int) -> memoryview:
    """At least so many bytes, for as long as anybody holds them."""
    fitting = [pages for pages in _kept if size <= len(pages) <= 2 * size]
    for pages in sorted(fitting, key=len):
        with contextlib.suppress(ValueError):  # another thread was faster
            _kept.remove(pages)
            break
    else:
        pages = _fresh(size)
    loan = memoryview(pages)
    weakref.finalize(loan, _take_back, pages).atexit = False  # at exit others may still read it
    return loan


def _fresh(size: int) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        pages = mmap.mmap(-1, size, flags=flags)
    except OSError:  # what is kept counts against the limit on address space
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
    """Whether the kernel takes this advice."""
    try:
        pages.madvise(advice)
    except OSError:
        return False
    return True
