"""The hidden states of rows, times the factors of their softmax weights.

Equals
    factor = torch.where(grad_logprobs == 0, 0, scale * grad_logprobs)
    torch.where(factor[:, None] == 0, 0, factor[:, None] * hidden).to(hidden.dtype)

`_tiles.py` says what they are for. `scale_` multiplies gradients by the upstream gradient of the loss. A factor of 1
costs almost nothing, and the host does not read it.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device import launching_on
from .tuning import FUSED_MULTIPLY_ADD

BLOCK_D, WARPS = 1024, 4
# Of `scale_`: enough programs to fill a device, and few enough for a short launch.
BLOCK, PROGRAMS = 4096, 2048


@triton.jit(do_not_specialize_on_alignment=["scale", "grad_logprobs", "factor"])
def _scale_hidden_kernel(
    hidden, scaled, scale, grad_logprobs, factor, D, hidden_row, hidden_column, BLOCK_D: tl.constexpr
):
    """Grid: rows. A program reads one row of the hidden states, and alone writes the row of the result."""
    row = tl.program_id(0).to(tl.int64)
    g = tl.load(grad_logprobs + row)
    # A row without a gradient is 0, even if its scale or its hidden states are NaN.
    times = tl.where(g == 0.0, 0.0, tl.load(scale + row) * g)
    tl.store(factor + row, times)
    if scaled is not None:
        for first in range(0, D, BLOCK_D):
            features = first + tl.arange(0, BLOCK_D)
            h = tl.load(hidden + row * hidden_row + features.to(tl.int64) * hidden_column, mask=features < D, other=0.0)
            out = tl.where(times == 0.0, 0.0, h.to(tl.float32) * times)
            tl.store(scaled + row * D + features, out.to(scaled.dtype.element_ty), mask=features < D)


def scale_hidden(hidden: Tensor | None, scale: Tensor, grad_logprobs: Tensor) -> tuple[Tensor, Tensor | None]:
    """The factors of rows, and their hidden states times those.

    Args:
        hidden: [R, D], any strides; None where only the factors are wanted.
        scale: [R] fp32, as `softmax_weights_` returned it.
        grad_logprobs: [R] fp32, dL/dlogprobs.

    Returns:
        (factor [R] fp32, [R, D] in the dtype of hidden, or None).

    Memory: none.
    """
    R, factor = len(scale), torch.empty_like(scale)
    scaled = None if hidden is None else torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    if R == 0:
        return factor, scaled
    D, row, column = (0, 0, 0) if hidden is None else (hidden.shape[1], *hidden.stride())
    with launching_on(scale.device):
        _scale_hidden_kernel[(R,)](
            hidden,
            scaled,
            scale.contiguous(),
            grad_logprobs.contiguous(),
            factor,
            D,
            row,
            column,
            BLOCK_D=BLOCK_D,
            num_warps=WARPS,
            **FUSED_MULTIPLY_ADD,
        )
    return factor, scaled


@triton.jit
def _scale_blocks(values, times, count, BLOCK: tl.constexpr):
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        scaled = tl.load(values + at, mask=at < count, other=0.0).to(tl.float32) * times
        tl.store(values + at, scaled.to(values.dtype.element_ty), mask=at < count)


@triton.jit(do_not_specialize_on_alignment=["factor"])
def _scale_kernel(values, others, factor, count, other_count, BLOCK: tl.constexpr):
    """Grid: any number of programs; program i alone reads and writes blocks i, i + programs, i + 2 programs, ..."""
    times = tl.load(factor).to(tl.float32)
    if times != 1.0:
        _scale_blocks(values, times, count, BLOCK)
        if others is not None:
            _scale_blocks(others, times, other_count, BLOCK)


def scale_(values: Tensor, factor: Tensor, others: Tensor | None = None) -> Tensor:
    """Values, and other values, times a 0-d factor, in place; nothing is read or written where it is 1.

    Args:
        values, others: contiguous, bf16, fp16 or fp32.
        factor: 0-d, any float dtype, on the same device.

    Returns:
        `values`.

    Memory: none.
    """
    count, other_count = values.numel(), 0 if others is None else others.numel()
    if count or other_count:
        with launching_on(values.device):
            _scale_kernel[(min(-(-max(count, other_count) // BLOCK), PROGRAMS),)](
                values, others, factor, count, other_count, BLOCK=BLOCK, num_warps=WARPS, **FUSED_MULTIPLY_ADD
            )
    return values
