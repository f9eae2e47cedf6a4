"""A head over the kept tokens: logits of single entries, and weighted sums of rows. No [V] or [E, D] is in memory.

An entry is one kept token of one row of the hidden states; E entries. Equals

    entry_logits            (hidden[rows] * weight[tokens]).sum(-1)
    weighted_rows_          out[places] = segment sums of factors[:, None] * matrix[index]

The second is dH, with the segments of a row and the head as the matrix, and dW, with the entries sorted by token and
the hidden states as the matrix. A segment is summed by one program in the order of its entries: no atomics.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device import launching_on
from .tuning import entry_tile


@triton.jit(do_not_specialize=["E"], do_not_specialize_on_alignment=["rows", "tokens", "out"])
def _entry_logits_kernel(
    hidden,
    weight,
    rows,
    tokens,
    out,
    E,
    D,
    hidden_row,
    hidden_column,
    weight_row,
    weight_column,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid: blocks of BLOCK_E entries. A program alone writes the logits of its entries."""
    entries = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    exists = entries < E
    hidden_starts = hidden + tl.load(rows + entries, mask=exists, other=0)[:, None] * hidden_row
    weight_starts = weight + tl.load(tokens + entries, mask=exists, other=0)[:, None] * weight_row
    products = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
    for first in range(0, D, BLOCK_D):
        features = first + tl.arange(0, BLOCK_D)
        inside = exists[:, None] & (features < D)[None, :]
        features = features.to(tl.int64)[None, :]
        h = tl.load(hidden_starts + features * hidden_column, mask=inside, other=0.0)
        w = tl.load(weight_starts + features * weight_column, mask=inside, other=0.0)
        products += h.to(tl.float32) * w.to(hidden.dtype.element_ty).to(tl.float32)
    tl.store(out + entries, tl.sum(products, 1), mask=exists)


@triton.jit(do_not_specialize_on_alignment=["places", "offsets", "index", "factors"])
def _weighted_rows_kernel(
    out,
    places,
    offsets,
    index,
    factors,
    matrix,
    D,
    out_row,
    out_column,
    matrix_row,
    matrix_column,
    CAST: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid: segments x blocks of BLOCK_D features. A program reads the entries of its segment in order. It alone writes
    this block of this row of `out`, since no place occurs twice."""
    segment = tl.program_id(0).to(tl.int64)
    features = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside, features = features < D, features.to(tl.int64)
    start, end = tl.load(offsets + segment), tl.load(offsets + segment + 1)
    sums = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
    for first in range(start, end, BLOCK_E):
        entries = first + tl.arange(0, BLOCK_E)
        exists = entries < end
        at = tl.load(index + entries, mask=exists, other=0)[:, None] * matrix_row + features[None, :] * matrix_column
        values = tl.load(matrix + at, mask=exists[:, None] & inside[None, :], other=0.0)
        factor = tl.load(factors + entries, mask=exists, other=0.0)
        sums += factor[:, None] * values.to(CAST).to(tl.float32)
    to = out + tl.load(places + segment) * out_row + features * out_column
    total = tl.sum(sums, 0)
    if ACCUMULATE:
        total += tl.load(to, mask=inside, other=0.0).to(tl.float32)
    tl.store(to, total.to(out.dtype.element_ty), mask=inside)


def entry_logits(hidden: Tensor, weight: Tensor, rows: Tensor, tokens: Tensor, *, dtype: torch.dtype) -> Tensor:
    """The raw logits of entries.

    Args:
        hidden: [N, D] bf16, fp16 or fp32, any strides.
        weight: [V, D], any strides; rounded to the dtype of `hidden`.
        rows, tokens: [E] int64, in [0, N) and [0, V).
        dtype: fp32.

    Returns:
        [E] fp32, h.w of each entry.

    Memory: none.
    """
    E, D = len(tokens), hidden.shape[1]
    out = torch.empty(E, dtype=dtype, device=hidden.device)
    tile = entry_tile(hidden.device)
    if E:
        with launching_on(hidden.device):
            _entry_logits_kernel[(-(-E // tile.block_e),)](
                hidden,
                weight,
                rows.contiguous(),
                tokens.contiguous(),
                out,
                E,
                D,
                *hidden.stride(),
                *weight.stride(),
                **tile.launch_options(),
            )
    return out


def weighted_rows_(
    out: Tensor,
    places: Tensor,
    offsets: Tensor,
    index: Tensor,
    factors: Tensor,
    matrix: Tensor,
    *,
    cast: torch.dtype,
    accumulate: bool = False,
) -> Tensor:
    """Write weighted sums of rows of a matrix to rows of `out`.

    Args:
        out: [*, D] bf16, fp16 or fp32, any strides.
        places: [S] int64, the row of `out` for each segment; none occurs twice.
        offsets: [S + 1] int64: segment i has the entries offsets[i] to offsets[i + 1].
        index: [E] int64, the row of `matrix` of each entry.
        factors: [E] fp32.
        matrix: [*, D] bf16, fp16 or fp32, any strides.
        cast: the dtype to which rows of `matrix` are rounded first.
        accumulate: add to what is there.

    Returns:
        `out`.

    Memory: none. Sums are in fp32, and what is written is rounded once.
    """
    S, D = len(places), out.shape[1]
    tile = entry_tile(out.device)
    if S and D:
        with launching_on(out.device):
            _weighted_rows_kernel[(S, -(-D // tile.block_d))](
                out,
                *(vector.contiguous() for vector in (places, offsets, index, factors)),
                matrix,
                D,
                *out.stride(),
                *matrix.stride(),
                ACCUMULATE=accumulate,
                CAST=getattr(tl, str(cast).removeprefix("torch.")),
                **tile.launch_options(),
            )
    return out
