"""The large GEMMs of a head: products of bf16 or fp16 inputs are accumulated and *kept* in fp32.

So logits are never rounded before the log-sum-exp, and gradients never between tiles. CUDA does this in one call
(`out_dtype`); elsewhere, and where a build of torch refuses that, one slice of W at a time is widened to fp32.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fused_grpo.passes import buffers

logger = logging.getLogger("fused_grpo")

# A slice of W in fp32 on the CPU: large enough for a fast GEMM, small beside any chunk.
SLICE_BYTES = 4 * 2**20


def multiply_into(out: Tensor, a: Tensor, b: Tensor, *, accumulate: bool = False) -> None:
    """out = (out +) a @ b, accumulated in the dtype of `out`. On a GPU, a and b may have 16 bits and `out` fp32."""
    if a.dtype == out.dtype:
        out.addmm_(a, b) if accumulate else torch.mm(a, b, out=out)
    elif accumulate:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


@functools.cache
def keeps_sums(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a GEMM of this dtype can write its sums in fp32; builds for ROCm may refuse. Asked once."""
    if dtype.itemsize > 2:
        return True
    try:
        with unset_fake_temporarily():  # under a compiler the device would not be asked
            operand, out = (torch.zeros(16, 16, dtype=x, device=device) for x in (dtype, torch.float32))
            torch.mm(operand, operand, out_dtype=out.dtype, out=out)
            torch.addmm(out, operand, operand, out_dtype=out.dtype, out=out)
    except RuntimeError as error:
        logger.warning("on %s all operands of GEMMs are widened to fp32, which takes longer: %s", device, error)
        return False
    return True


def logits_by_slices(out: Tensor, hidden: Tensor, weight: Tensor) -> None:
    """out [R, C] = hidden [R, D] @ weight.T [D, C], for a narrower weight."""
    for columns, wide in widened(weight, out.dtype):
        torch.mm(hidden, wide.t(), out=out[:, columns])


def sum_by_slices(out: Tensor, weights: Tensor, vectors: Tensor, *, accumulate: bool) -> None:
    """out [R, D] = (out +) weights [R, C] @ vectors [C, D], for narrower vectors."""
    for columns, wide in widened(vectors, out.dtype):
        multiply_into(out, weights[:, columns], wide, accumulate=accumulate or columns.start > 0)


def widened(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """(rows of W, those rows in `dtype`), one slice at a time."""
    count, hidden_size = weight.shape
    for columns in buffers.chunks(count, max(1, SLICE_BYTES // (hidden_size * dtype.itemsize))):
        yield columns, weight[columns].to(dtype)
