"""Large pages for the gradient of a head on a CPU.

Fresh memory costs a page fault for every 4 KiB, and every step takes the gradient of a head afresh. Linux serves 2 MiB
at a time to whoever asks, unless transparent huge pages are set to `never`. PyTorch asks for all of its memory if
THP_MEM_ALLOC_ENABLE=1 is in the environment, which a library cannot put there.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable

from torch import Tensor

_LEAST_BYTES = 8 * 2**20


def on_large_pages(fresh: Tensor) -> Tensor:
    """The same tensor, for memory that nobody has written to yet. Does nothing where there is nothing to gain."""
    advise = _madvise()
    if advise is None or fresh.device.type != "cpu" or fresh.nbytes < _LEAST_BYTES:
        return fresh
    # Whole pages only: what shares a page with it is somebody else's.
    first = -(-fresh.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (fresh.data_ptr() + fresh.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    advise(first, size, mmap.MADV_HUGEPAGE)  # advice: what it returns changes nothing
    return fresh


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """The C library's, or None where it, or the advice, is unknown."""
    function = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_HUGEPAGE") else None
    if function is not None:
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return function
