"""The precision in which the ops compute: fp32 accumulators, whatever a user allows elsewhere.

Logits, statistics and accumulators are fp32 (fp64 for fp64 inputs). `full_precision` turns off what would round them:
autocast, TF32, and GEMMs that add up partial sums in 16 bits.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """fp64 for an fp64 tensor, fp32 for all others: logits are never rounded to 16 bits."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


@contextlib.contextmanager
def full_precision(tensor: Tensor) -> Iterator[None]:
    """Inside, there is no autocast on the device of `tensor`, no TF32, and no partial sum in 16 bits."""
    with torch.autocast(tensor.device.type, enabled=False):
        if not tensor.is_cuda:
            yield
            return
        _exact_matmul.enter()
        try:
            yield
        finally:
            _exact_matmul.leave()


class _ExactMatmul:
    """The settings of CUDA's GEMMs, which are global: the first thread in changes them, the last one restores them."""

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, dict[str, Any]()

    def enter(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside > 1:
                return
            matmul = torch.backends.cuda.matmul
            self._before = {"fp32_precision": matmul.fp32_precision}
            matmul.fp32_precision = "ieee"
            for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"):
                # The second of the pair allows split-K; setting a bool would set it to True.
                self._before[name] = getattr(matmul, name), getattr(matmul, f"{name}_split_k")
                setattr(matmul, name, (False, self._before[name][1]))

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            for name, value in () if self._inside else self._before.items():
                setattr(torch.backends.cuda.matmul, name, value)


_exact_matmul = _ExactMatmul()
