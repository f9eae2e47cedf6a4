"""Log-probs of the targets (and the entropy) from hidden states and the head's weight. No logit is written to memory.

Equals
    z = softcap(logit_scale * (hidden @ weight.T + bias)) / temperature[:, None]
    log_softmax(z)[arange(N), targets]

One GEMM, 2*N*D*V FLOP, whose epilogue reduces each [block_n, block_v] tile of fp32 accumulators to a maximum, a sum and
a target logit per row. The vocabulary is cut into contiguous splits, as in split-K, so that a few rows still fill the
device; each split writes 2 numbers per row (3 with the entropy), which `finish_rows.py` merges. The number of splits
depends only on V and the tile table, so the bits of a row do not depend on the other rows.

Matrices in 16 bits whose rows start at multiples of 16 bytes are copied by the tensor memory accelerator, where there
is one (`ALIGNED` in `tuning.py`). It takes no registers for addresses, which allows a larger tile. All other matrices
and strides are read through pointers.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ._device import launching_on
from ._tiles import add_bias, add_tile, column_blocks, hide_targets, inverse, logit, start_statistics, sum_at_targets
from .finish_rows import finish_splits
from .tuning import GemmTile, gemm_tile


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


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=["targets", "temperature"])
def _logprob_forward_kernel(
    hidden,
    weight,
    strides,
    targets,
    bias,
    temperature,
    target_logit,
    maximum,
    total,
    weighted,
    N,
    D,
    V,
    logit_scale: tl.float32,
    softcap,
    cut,
    POSITIVE: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP_N: tl.constexpr,
    WIDE: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Grid: row tiles x splits, flattened; GROUP_N row tiles go through a split together, then the next split.

    A program owns BLOCK_N rows of one split: it alone writes their statistics [split, rows], and it alone writes
    target_logit for those rows whose target lies in its split; the first split also for those without a target.
    `strides` are those of `hidden` and of `weight`, `cut` is (splits, tiles in each).
    """
    ENTROPY: tl.constexpr = weighted is not None
    splits, tiles_per_split = cut
    hidden_row, hidden_column, weight_row, weight_column = strides
    row_tiles = tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // (GROUP_N * splits)
    group_size = tl.minimum(row_tiles - group * GROUP_N, GROUP_N)
    within = tl.program_id(0) % (GROUP_N * splits)
    split = within // group_size
    first_row = (group * GROUP_N + within % group_size) * BLOCK_N
    rows = first_row + tl.arange(0, BLOCK_N)
    row_exists = rows < N
    safe_rows = tl.minimum(rows, N - 1)
    target = tl.load(targets + safe_rows).to(tl.int32)
    inverse_temperature = inverse(tl.load(temperature + safe_rows))

    # The statistics are updated by x = h.w + bias if z is a positive multiple of x, and by z otherwise.
    factor = tl.full([BLOCK_N], 1.0, tl.float32)
    if POSITIVE:
        # Not 0, which times the -inf of masks would be NaN.
        factor = tl.maximum(logit_scale * inverse_temperature, 1e-37)
    row_target, row_maximum, row_total, row_weighted = start_statistics(target)
    last_tile = tl.minimum((split + 1) * tiles_per_split, tl.cdiv(V, BLOCK_V))
    # Hoisting out of this loop would occupy registers that the epilogue needs.
    for tile in tl.range(split * tiles_per_split, last_tile, disable_licm=True):
        first_column = tile * BLOCK_V
        raw = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
        for d in range(0, D, BLOCK_D):
            h = _load_block(hidden, first_row, d, N, D, hidden_row, hidden_column, EVEN_D, BLOCK_N, BLOCK_D)
            w = _load_block(weight, first_column, d, V, D, weight_row, weight_column, EVEN_D, BLOCK_V, BLOCK_D)
            raw = tl.dot(h, tl.trans(w), raw, input_precision="ieee")
        # Masks cost more than the exponential, and most tiles need none.
        here = (target >= first_column) & (target < first_column + BLOCK_V)
        masked = (first_column + BLOCK_V > V) | (tl.max(here.to(tl.int32), 0) > 0)
        blocks = column_blocks(raw, WIDE)
        for i in tl.static_range(len(blocks)):
            first = first_column + i * blocks[i].shape[1]
            x = add_bias(blocks[i], bias, first + tl.arange(0, blocks[i].shape[1]), V)
            if not POSITIVE:
                x = logit(x, logit_scale, softcap, inverse_temperature[:, None])
            if masked:
                row_target += factor * sum_at_targets(x, first, target)
                x = hide_targets(x, first, target, V)
            row_maximum, row_total, row_weighted = add_tile(
                row_maximum, row_total, row_weighted, x, factor, ENTROPY, NARROW
            )

    tile_of_target = tl.maximum(target, 0) // BLOCK_V
    owns_target = (tile_of_target >= split * tiles_per_split) & (tile_of_target < last_tile)
    tl.store(target_logit + rows, row_target, mask=row_exists & owns_target)
    statistics = split.to(tl.int64) * N + rows
    tl.store(maximum + statistics, row_maximum, mask=row_exists)
    tl.store(total + statistics, row_total, mask=row_exists)
    if ENTROPY:
        tl.store(weighted + statistics, row_weighted, mask=row_exists)


def logprob_forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: Tensor,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Log-probs and entropy of a linear head, in one pass over the weight.

    Args:
        hidden: [N, D] bf16, fp16 or fp32, any strides.
        weight: [V, D] of the same dtype, any strides.
        targets: [N] int64, each in [0, V), or -1 for a row whose target is not in this weight (a slice of a longer
            vocabulary): its log-prob is -inf, its entropy that of all V tokens.
        bias: [V], any float dtype.
        temperature: [N] fp32, positive.
        logit_scale: multiplies h.w + bias.
        softcap: c in c * tanh(x / c), before the temperature.
        entropy: also compute the entropy of each row.

    Returns:
        (logprobs [N], entropy [N] or None, state), fp32, the entropy in nats. The state is that of
        `row_statistics`, which slices are merged by.

    Memory: 2 (entropy: 3) fp32 numbers per row and split, at most 128 splits. No other temporary, but for a copy of an
    operand whose rows lie so far apart that a tile of it spans 2**31 elements.
    """
    N, V, device = hidden.shape[0], weight.shape[0], hidden.device
    if N == 1 and hidden.stride(1) == 1:  # the row stride is meaningless here, and must not select the tile
        hidden = hidden.as_strided(hidden.shape, (hidden.shape[1], 1))
    tile = gemm_tile(device, hidden.dtype, aligned=_is_aligned(hidden) and _is_aligned(weight))
    cut = splits, _ = _splits(V, tile)
    target_logit = torch.empty(N, dtype=torch.float32, device=device)
    maximum, total, weighted = (target_logit.new_empty((splits, N)) if x else None for x in (True, True, entropy))
    statistics = target_logit, maximum, total, weighted
    if N:
        matrices = _operands(hidden, weight, tile)
        vectors = targets.contiguous(), None if bias is None else bias.contiguous(), temperature.contiguous()
        with launching_on(device):
            _logprob_forward_kernel[(-(-N // tile.block_n) * splits,)](
                *matrices,
                *vectors,
                *statistics,
                N,
                hidden.shape[1],
                V,
                logit_scale,
                softcap,
                cut,
                POSITIVE=softcap is None and logit_scale > 0,
                EVEN_D=hidden.shape[1] % tile.block_d == 0,
                **tile.launch_options(),
            )
    return finish_splits(*statistics)  # type: ignore[arg-type]


def _splits(V: int, tile: GemmTile) -> tuple[int, int]:
    """(number of splits, tiles in each) from V alone: the parts of a row's sum must not depend on N."""
    tiles = -(-V // tile.block_v)
    tiles_per_split = -(-tiles // tile.max_splits)
    return -(-tiles // tiles_per_split), tiles_per_split


def _is_aligned(matrix: Tensor) -> bool:
    """Whether a tensor descriptor can describe this matrix."""
    row, column = matrix.stride()
    aligned = matrix.data_ptr() % 16 == 0 and row * matrix.element_size() % 16 == 0
    return matrix.element_size() == 2 and matrix.numel() > 0 and column == 1 and row >= matrix.shape[1] and aligned


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
