"""Softmax weights and the statistics of whole rows, straight from hidden states and the head's weight.

Equals `softmax_weights_` of `hidden @ weight.T`; see `_tiles.py`. No logit is written to memory: the weights of a tile,
E_v = e^(z_v - m) dsoftcap_v, leave the GEMM in the dtype of the next ones, which need nothing else of it.

All programs of a row must share m before any of them knows its largest logit. What they can know is the logit of the
row's own target: m is ABOVE nats above it. The sums and the next GEMMs care only for ratios, so m may be as far below
the largest logit as it may be in `softmax_weights_`, and as far above it as fp32 and bf16 have room. Nothing is lost
unless all other tokens together are e^24 times as likely as the target, or e^-52 times: a sampled token hardly ever is.
Such far rows, whose sums say so, are computed again with the largest of their logits, together with the other rows of
their tile, whose bits do not change. Programs without a far row end at once, so the host need not know of any.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ._device import launching_on
from ._head_gemm import owned, plan, product
from ._tiles import add_bias, column_blocks, exp, expm1, finish_row, hide_targets, inverse, logit, softcap_slope
from .finish_rows import ROWS_PER_PROGRAM, Statistics
from .logprob_forward import split_statistics
from .tuning import FUSED_MULTIPLY_ADD, is_aligned, weights_tile

ABOVE = tl.constexpr(8.0)
# Of a row's sum, relative to m: from e^-60 to e^16, the headroom of `softmax_weights_`.
LEAST, MOST = tl.constexpr(1e-26), tl.constexpr(8.9e6)
BLOCK_D, BLOCK_V, WARPS = 1024, 1024, 4
# Vectors [N] and [splits, N], of any alignment.
VECTORS = ["targets", "temperature", "target_logit", "slope", "shift", "far", "maximum", "total", "weighted"]
FINISHED = ["logprobs", "entropy", "merged_total", "scale"]


@triton.jit(do_not_specialize=["temperature_row"], do_not_specialize_on_alignment=VECTORS)
def _anchor_kernel(
    hidden,
    weight,
    strides,
    targets,
    bias,
    temperature,
    target_logit,
    slope,
    shift,
    D,
    logit_scale: tl.float32,
    softcap,
    temperature_row,
    BLOCK_D: tl.constexpr,
):
    """Grid: rows. A program alone writes the logit of its row's target, the slope of the soft cap there, and m."""
    hidden_row, hidden_column, weight_row, weight_column = strides
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    sums = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, D, BLOCK_D):
        features = first + tl.arange(0, BLOCK_D).to(tl.int64)
        h = tl.load(hidden + row * hidden_row + features * hidden_column, mask=features < D, other=0.0)
        w = tl.load(weight + target * weight_row + features * weight_column, mask=features < D, other=0.0)
        sums += h.to(tl.float32) * w.to(tl.float32)
    x = tl.sum(sums, 0)
    if bias is not None:
        x += tl.load(bias + target).to(tl.float32)
    z = logit(x, logit_scale, softcap, inverse(tl.load(temperature + row * temperature_row)))
    tl.store(target_logit + row, z)
    tl.store(shift + row, tl.where(tl.abs(z) < float("inf"), z + ABOVE, 0.0))
    if slope is not None:
        tl.store(slope + row, softcap_slope(x, logit_scale, softcap))


@triton.jit(do_not_specialize=["N", "temperature_row"], do_not_specialize_on_alignment=VECTORS)
def _softmax_weights_forward_kernel(
    hidden,
    weight,
    strides,
    targets,
    bias,
    temperature,
    only,
    shift,
    weights,
    total,
    weighted,
    N,
    sizes,
    logit_scale: tl.float32,
    softcap,
    temperature_row,
    EVEN_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP_N: tl.constexpr,
    WIDE: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Grid: see `_head_gemm.py`; `sizes` are those of `owned`.

    A program alone writes the weights and the sums [split, rows] of its rows and split; the weight of a target is 0. If
    `only` [N] is given, programs none of whose rows is in it do nothing.
    """
    ENTROPY: tl.constexpr = weighted is not None
    D, V, _, _ = sizes
    first_row, row_exists, split, first_tile, last_tile = owned(N, sizes, only, BLOCK_N, BLOCK_V, GROUP_N)
    rows = first_row + tl.arange(0, BLOCK_N)
    safe_rows = tl.minimum(rows, N - 1)
    target = tl.load(targets + safe_rows).to(tl.int32)
    inverse_temperature = inverse(tl.load(temperature + safe_rows * temperature_row))
    m = tl.load(shift + safe_rows)
    row_total, row_weighted = tl.zeros([BLOCK_N], tl.float32), tl.zeros([BLOCK_N], tl.float32)
    # Hoisting out of this loop would occupy registers that the epilogue needs.
    for tile in tl.range(first_tile, last_tile, disable_licm=True):
        first_column = tile * BLOCK_V
        raw = product(hidden, weight, strides, first_row, first_column, N, D, V, EVEN_D, BLOCK_N, BLOCK_V, BLOCK_D)
        # Masks cost more than the exponential, and most tiles need none.
        in_tile = (target >= first_column) & (target < first_column + BLOCK_V)
        masked = (first_column + BLOCK_V > V) | (tl.max(in_tile.to(tl.int32), 0) > 0)
        blocks = column_blocks(raw, WIDE)
        for i in tl.static_range(len(blocks)):
            first = first_column + i * blocks[i].shape[1]
            x = add_bias(blocks[i], bias, first + tl.arange(0, blocks[i].shape[1]), V)
            centred = logit(x, logit_scale, softcap, inverse_temperature[:, None]) - m[:, None]
            if masked:
                centred = hide_targets(centred, first, target, V)
            e = exp(centred)
            row_total += tl.sum(e, 1)
            if ENTROPY:
                # Below -128 exp is 0 in fp32: the clamp only avoids 0 * -inf.
                row_weighted += tl.sum(e * tl.maximum(centred, -128.0), 1)
            if softcap is not None:
                e = e * softcap_slope(x, logit_scale, softcap)
            weights.store([first_row, first], e.to(weights.dtype))  # what is outside of the memory is dropped
    statistics = split.to(tl.int64) * N + rows
    tl.store(total + statistics, row_total, mask=row_exists)
    if ENTROPY:
        tl.store(weighted + statistics, row_weighted, mask=row_exists)


@triton.jit
def _load_splits(values, rows, needed, N, splits, SPLITS: tl.constexpr, NONE: tl.constexpr):
    """The values [SPLITS, ROWS] of those rows that are `needed`; NONE elsewhere."""
    split = tl.arange(0, SPLITS)[:, None]
    at = values + split.to(tl.int64) * N + rows[None, :]
    return tl.load(at, mask=(split < splits) & needed[None, :], other=NONE)


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=VECTORS)
def _far_rows_kernel(total, far, N, splits, SPLITS: tl.constexpr, ROWS: tl.constexpr):
    """Grid: tiles of ROWS rows. A program alone writes whether its rows are far."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_total = tl.sum(_load_splits(total, rows, rows < N, N, splits, SPLITS, 0.0), 0)
    tl.store(far + rows, ((row_total > LEAST) & (row_total < MOST)) == 0, mask=rows < N)


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=VECTORS)
def _raise_shift_kernel(maximum, far, shift, N, splits, SPLITS: tl.constexpr, ROWS: tl.constexpr):
    """Grid: tiles of ROWS rows. A program alone writes m of its far rows: their largest logit, if that is finite."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_far = tl.load(far + rows, mask=rows < N, other=0).to(tl.int32) > 0
    highest = tl.max(_load_splits(maximum, rows, is_far, N, splits, SPLITS, float("-inf")), 0)
    tl.store(shift + rows, highest, mask=is_far & (tl.abs(highest) < float("inf")))


@triton.jit(do_not_specialize=["N", "temperature_row"], do_not_specialize_on_alignment=[*VECTORS, *FINISHED])
def _finish_weights_kernel(
    targets,
    temperature,
    target_logit,
    slope,
    shift,
    total,
    weighted,
    weights,
    logprobs,
    entropy,
    merged_total,
    scale,
    N,
    V,
    splits,
    weights_row,
    temperature_row,
    logit_scale: tl.float32,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Grid: tiles of ROWS rows. A program alone writes the results of its rows, and their weights of their targets."""
    ENTROPY: tl.constexpr = entropy is not None
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_exists = rows < N
    row_total = tl.sum(_load_splits(total, rows, row_exists, N, splits, SPLITS, 0.0), 0)
    row_weighted = row_total
    if ENTROPY:
        row_weighted = tl.sum(_load_splits(weighted, rows, row_exists, N, splits, SPLITS, 0.0), 0)
    # Without another token the target is certain.
    m = tl.where(row_total == 0.0, float("-inf"), tl.load(shift + rows, mask=row_exists, other=0.0))
    z = tl.load(target_logit + rows, mask=row_exists, other=0.0)
    logprob, row_entropy = finish_row(m, row_total, row_weighted, z, ENTROPY)
    tl.store(merged_total + rows, row_total, mask=row_exists)
    tl.store(logprobs + rows, logprob, mask=row_exists)
    if ENTROPY:
        tl.store(entropy + rows, row_entropy, mask=row_exists)
    share = tl.math.div_rn(-expm1(logprob), tl.where(row_total == 0.0, 1.0, row_total))
    inverse_temperature = inverse(tl.load(temperature + rows * temperature_row, mask=row_exists, other=1.0))
    tl.store(scale + rows, -share * logit_scale * inverse_temperature, mask=row_exists)

    target_weight = -row_total
    if slope is not None:
        target_weight *= tl.load(slope + rows, mask=row_exists, other=0.0)
    # Rows without a finite total must not affect products with other rows.
    lost = row_exists & ((row_total < float("inf")) == 0)
    start = weights + rows.to(tl.int64) * weights_row
    target = tl.load(targets + rows, mask=row_exists, other=0)
    tl.store(start + target, target_weight.to(weights.dtype.element_ty), mask=row_exists & (lost == 0))
    if tl.max(lost.to(tl.int32), 0) > 0:
        for first in range(0, V, BLOCK_V):
            columns = first + tl.arange(0, BLOCK_V)
            zeros = tl.zeros([ROWS, BLOCK_V], weights.dtype.element_ty)
            tl.store(start[:, None] + columns[None, :], zeros, mask=lost[:, None] & (columns < V)[None, :])


def softmax_weights_forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    out: Tensor,
    bias: Tensor | None = None,
    temperature: Tensor,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
) -> tuple[Tensor, Tensor, Statistics]:
    """The softmax weights of whole rows of a linear head.

    Args:
        hidden, weight, bias, temperature, logit_scale, softcap, entropy: as in `logprob_forward`.
        targets: [N] int64, each in [0, V).
        out: [N, V] bf16 or fp32 for the weights, rows at multiples of 16 bytes, as `empty_tile` makes them; up to the
            next such multiple after V their memory may be overwritten. fp16 has too little range.

    Returns:
        (out, scale [N] fp32, (logprobs, entropy or None, shift, total)), as `softmax_weights_` returns them. Rows
        without a finite total have weights of 0.

    Memory: at most 256 splits of 3 (entropy: 4) fp32 numbers per row; a copy of a matrix that a descriptor cannot
    describe.

    Raises:
        ValueError: the device is not of compute capability 9.0, or a descriptor cannot describe even a copy.
    """
    (N, V), device, head = out.shape, out.device, (bias, temperature, logit_scale, softcap)
    targets = targets.contiguous()
    bias = None if bias is None else bias.contiguous()
    tile = weights_tile(device)
    if tile is None or (tile.tma and (hidden.element_size() != 2 or hidden.shape[1] % 8)):
        want = "want 16 bits, D a multiple of 8, and compute capability 9.0; fix: softmax_weights_ of the logits"
        raise ValueError(f"got hidden {tuple(hidden.shape)} of {hidden.dtype} on {device}, {want}")
    if tile.tma:
        hidden, weight = (
            x if is_aligned(x) else x.clone(memory_format=torch.contiguous_format) for x in (hidden, weight)
        )
    gemm = plan(hidden, weight, tile)
    target_logit, shift, merged_total, logprobs, scale = (
        torch.empty(N, dtype=torch.float32, device=device) for _ in range(5)
    )
    entropies, slope = (torch.empty_like(scale) if x else None for x in (entropy, softcap is not None))
    total, weighted = (scale.new_empty((gemm.splits, N)) if x else None for x in (True, entropy))
    far = torch.empty(N, dtype=torch.bool, device=device)
    results = out, scale, (logprobs, entropies, shift, merged_total)
    if N == 0:
        return results
    descriptor = TensorDescriptor.from_tensor(out, [tile.block_n, tile.wide])
    # If a product were fused into the sum over two threads, the two threads would round differently.
    merged = {"SPLITS": triton.next_power_of_2(gemm.splits), "ROWS": ROWS_PER_PROGRAM, "enable_fp_fusion": False}
    row_tiles = (-(-N // ROWS_PER_PROGRAM),)

    def compute(only: Tensor | None) -> None:
        rows, sums = (targets, bias, temperature, only, shift), (total, weighted)
        numbers = N, gemm.sizes, logit_scale, softcap, temperature.stride(0)
        _softmax_weights_forward_kernel[gemm.grid](*gemm.matrices, *rows, descriptor, *sums, *numbers, **gemm.options)

    with launching_on(device):
        _anchor_kernel[(N,)](
            hidden,
            weight,
            (*hidden.stride(), *weight.stride()),
            *(targets, bias, temperature, target_logit, slope, shift),
            hidden.shape[1],
            logit_scale,
            softcap,
            temperature.stride(0),
            BLOCK_D=BLOCK_D,
            num_warps=WARPS,
            **FUSED_MULTIPLY_ADD,
        )
        compute(None)
        _far_rows_kernel[row_tiles](total, far, N, gemm.splits, **merged)
        _, maximum, *_ = split_statistics(gemm, targets, head, entropy=False, only=far)
        _raise_shift_kernel[row_tiles](maximum, far, shift, N, gemm.splits, **merged)
        compute(far)
        _finish_weights_kernel[row_tiles](
            *(targets, temperature, target_logit, slope, shift, total, weighted),
            *(out, logprobs, entropies, merged_total, scale),
            *(N, V, gemm.splits, out.stride(0), temperature.stride(0), logit_scale),
            **merged,
            BLOCK_V=BLOCK_V,
        )
    return results
