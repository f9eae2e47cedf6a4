"""The GEMM of the head that two kernels share: which tiles a program owns, the product of a tile, and its operands.

The grid is row tiles x splits of the vocabulary, flattened; GROUP_N row tiles go through a split together, then the
next split. A program owns BLOCK_N rows of one split and walks its tiles of BLOCK_V columns. The number of splits
depends on V and the tile table alone, so the bits of a row do not depend on the other rows.

Matrices in 16 bits whose rows start at multiples of 16 bytes are copied by the tensor memory accelerator, where there
is one (`ALIGNED` in `tuning.py`). It takes no registers for addresses, which allows a larger tile. All other matrices
and strides are read through pointers.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .tuning import GemmTile, gemm_tile, is_aligned


@triton.jit
def _load_block(
    matrix,
    row,
    d,
    ROWS,
    D,
    row_stride,
    d_stride,
    EVEN_D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The block [BLOCK, BLOCK_D] of a matrix [ROWS, D] at (row, d), zero past the last feature."""
    if row_stride is None:  # a descriptor
        return matrix.load([row, d])
    else:
        # int64 for the start of a block, int32 inside it: 64-bit addresses per element would take too many registers.
        start = matrix + tl.cast(row, tl.int64) * row_stride + tl.cast(d, tl.int64) * d_stride
        # Rows past the end read the last row instead of being masked: cheaper in the inner loop.
        rows = tl.minimum(tl.arange(0, BLOCK), ROWS - 1 - row)
        features = tl.arange(0, BLOCK_D)
        block = start + (rows[:, None] * row_stride + features[None, :] * d_stride)
        if EVEN_D:
            return tl.load(block)
        else:
            return tl.load(block, mask=(features < D - d)[None, :], other=0.0)


@triton.jit
def owned(N, sizes, only, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, GROUP_N: tl.constexpr):
    """(first row, which rows are written, split, its first tile, the one after its last) of this program.

    `sizes` are (D, V, splits, tiles in each). If `only` [N] is given, a program none of whose rows is in it has no
    tiles and no rows.
    """
    _, V, splits, tiles_per_split = sizes
    group = tl.program_id(0) // (GROUP_N * splits)
    group_size = tl.minimum(tl.cdiv(N, BLOCK_N) - group * GROUP_N, GROUP_N)
    within = tl.program_id(0) % (GROUP_N * splits)
    split = within // group_size
    first_row = (group * GROUP_N + within % group_size) * BLOCK_N
    rows = first_row + tl.arange(0, BLOCK_N)
    first_tile = split * tiles_per_split
    end = tl.minimum(first_tile + tiles_per_split, tl.cdiv(V, BLOCK_V))
    last_row = N
    if only is not None:
        needed = tl.max(tl.load(only + rows, mask=rows < N, other=0).to(tl.int32), 0)
        end = tl.where(needed > 0, end, first_tile)
        last_row = tl.where(needed > 0, N, 0)
    return first_row, rows < last_row, split, first_tile, end


@triton.jit
def product(
    hidden,
    weight,
    strides,
    first_row,
    first_column,
    N,
    D,
    V,
    EVEN_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The tile [BLOCK_N, BLOCK_V] of h.w in fp32; `strides` are those of `hidden` and of `weight`."""
    hidden_row, hidden_column, weight_row, weight_column = strides
    raw = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    for d in range(0, D, BLOCK_D):
        h = _load_block(hidden, first_row, d, N, D, hidden_row, hidden_column, EVEN_D, BLOCK_N, BLOCK_D)
        w = _load_block(weight, first_column, d, V, D, weight_row, weight_column, EVEN_D, BLOCK_V, BLOCK_D)
        raw = tl.dot(h, tl.trans(w), raw, input_precision="ieee")
    return raw


HeadOptions = tuple[Tensor | None, Tensor, float, float | None]
"""Bias, temperature, logit_scale and softcap, as in `logprob_forward`."""


class HeadGemm(NamedTuple):
    """How a kernel multiplies hidden states with a head."""

    sizes: tuple[int, int, int, int]  # D, V, splits, tiles in each
    grid: tuple[int]
    splits: int
    matrices: tuple[Any, ...]  # both, as the kernel reads them, and their four strides
    options: dict[str, Any]


def plan(hidden: Tensor, weight: Tensor, tile: GemmTile | None = None) -> HeadGemm:
    """The arguments of a launch that follow from these matrices and their tile, by default that of the tables."""
    (N, D), V = hidden.shape, weight.shape[0]
    if N == 1 and hidden.stride(1) == 1:  # the row stride is meaningless here, and must not select the tile
        hidden = hidden.as_strided(hidden.shape, (D, 1))
    if tile is None:
        tile = gemm_tile(hidden.device, hidden.dtype, aligned=is_aligned(hidden) and is_aligned(weight))
    splits, tiles_per_split = _splits(V, tile)
    options = {"EVEN_D": D % tile.block_d == 0, **tile.launch_options()}
    matrices = _operands(hidden, weight, tile) if N else ()
    return HeadGemm((D, V, splits, tiles_per_split), (-(-N // tile.block_n) * splits,), splits, matrices, options)


def _splits(V: int, tile: GemmTile) -> tuple[int, int]:
    """(number of splits, tiles in each) from V alone: the parts of a row's sum must not depend on N."""
    tiles = -(-V // tile.block_v)
    tiles_per_split = -(-tiles // tile.max_splits)
    return -(-tiles // tiles_per_split), tiles_per_split


def _operands(
    hidden: Tensor, weight: Tensor, tile: GemmTile
) -> tuple[Tensor | TensorDescriptor | tuple[int | None, ...], ...]:
    """Both matrices, and their four strides: None where the kernel reads them through descriptors."""
    if tile.tma:
        descriptors = (
            TensorDescriptor.from_tensor(matrix, [rows, tile.block_d])
            for matrix, rows in ((hidden, tile.block_n), (weight, tile.block_v))
        )
        return *descriptors, (None, None, None, None)
    hidden, weight = (
        _within_int32(hidden, tile.block_n, tile.block_d),
        _within_int32(weight, tile.block_v, tile.block_d),
    )
    return hidden, weight, (*hidden.stride(), *weight.stride())


def _within_int32(matrix: Tensor, block_rows: int, block_columns: int) -> Tensor:
    """The matrix, or a copy if offsets inside a block of it would overflow the kernel's int32."""
    (rows, columns), (row, column) = matrix.shape, matrix.stride()
    reach = (min(block_rows, rows) - 1) * row + (min(block_columns, columns) - 1) * column
    return matrix if reach < 2**31 else matrix.contiguous()
