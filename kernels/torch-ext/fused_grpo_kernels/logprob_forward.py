"""Log-probs of the targets (and the entropy) from hidden states and the head's weight; no logit reaches memory.

Equals
    z = softcap(logit_scale * (hidden @ weight.T + bias)) / temperature[:, None]
    log_softmax(z)[arange(N), targets]

One GEMM, 2*N*D*V FLOP, whose epilogue folds each [block_n, block_v] tile of fp32 accumulators into a maximum, a sum and
a target logit per row. The vocabulary is cut into contiguous stretches ("splits") so that a few rows still fill the
device; each leaves 2 numbers per row (3 with the entropy), and a second, tiny kernel merges them. How many splits
there are follows from V and the tile table alone, so a row's bits do not depend on which rows came with it.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device import launching_on
from ._tiles import add_tile, finish_row, halves, inverse, load_bias, logit, merge_statistics, start_statistics
from .tuning import FUSED_MULTIPLY_ADD, GemmTile, gemm_tile

MERGE_ROWS = 16


@triton.jit(do_not_specialize=["N"])
def _logprob_forward_kernel(
    hidden,
    weight,
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
    hidden_row,
    hidden_column,
    weight_row,
    weight_column,
    logit_scale: tl.float32,
    softcap,
    splits,
    tiles_per_split,
    ENTROPY: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP_N: tl.constexpr,
):
    """Grid: row tiles x splits, flattened; GROUP_N row tiles go through a split together, then the next split.

    A program owns BLOCK_N rows of one split: it alone writes their statistics [split, rows], and it alone writes
    target_logit for those rows whose target lies in its stretch. No other program writes there.
    """
    row_tiles = tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // (GROUP_N * splits)
    group_size = tl.minimum(row_tiles - group * GROUP_N, GROUP_N)
    within = tl.program_id(0) % (GROUP_N * splits)
    split = within // group_size
    first_row = (group * GROUP_N + within % group_size) * BLOCK_N
    rows = first_row + tl.arange(0, BLOCK_N)
    row_exists = rows < N
    # Rows and columns past the end read the last one instead of being masked: cheaper in the hot loop.
    safe_rows = tl.minimum(rows, N - 1)
    target = tl.load(targets + safe_rows).to(tl.int32)
    inverse_temperature = inverse(tl.load(temperature + safe_rows))
    features = tl.arange(0, BLOCK_D)
    # int64 for where a tile starts, int32 inside it: addresses of 64 bits per element would cost the registers.
    hidden_start = hidden + first_row.to(tl.int64) * hidden_row
    hidden_offset = (safe_rows - first_row)[:, None] * hidden_row + features[None, :] * hidden_column

    row_maximum, row_total, row_weighted = start_statistics(BLOCK_N)
    row_target = tl.zeros([BLOCK_N], tl.float32)
    last_tile = tl.minimum((split + 1) * tiles_per_split, tl.cdiv(V, BLOCK_V))
    # Hoisting out of this loop would keep registers through the epilogue that it needs itself.
    for tile in tl.range(split * tiles_per_split, last_tile, disable_licm=True):
        first_column = tile * BLOCK_V
        weight_start = weight + first_column.to(tl.int64) * weight_row
        safe_columns = tl.minimum(tl.arange(0, BLOCK_V), V - 1 - first_column)
        weight_offset = safe_columns[:, None] * weight_row + features[None, :] * weight_column
        raw = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
        for d in range(0, D, BLOCK_D):
            hidden_tile = hidden_start + tl.cast(d, tl.int64) * hidden_column + hidden_offset
            weight_tile = weight_start + tl.cast(d, tl.int64) * weight_column + weight_offset
            if EVEN_D:
                h = tl.load(hidden_tile)
                w = tl.load(weight_tile)
            else:
                inside = (features < D - d)[None, :]
                h = tl.load(hidden_tile, mask=inside, other=0.0)
                w = tl.load(weight_tile, mask=inside, other=0.0)
            raw = tl.dot(h, tl.trans(w), raw, input_precision="ieee")
        # Four narrow parts one after the other: a whole tile of z, exp(z) and masks at once would spill registers.
        left, right = halves(raw)
        parts = halves(left) + halves(right)
        for i in tl.static_range(4):
            columns = first_column + i * (BLOCK_V // 4) + tl.arange(0, BLOCK_V // 4)
            z = logit(parts[i], load_bias(bias, columns, V), logit_scale, softcap, inverse_temperature[:, None])
            is_target = columns[None, :] == target[:, None]
            row_target += tl.sum(tl.where(is_target, z, 0.0), 1)
            others = (columns < V)[None, :] & ~is_target
            row_maximum, row_total, row_weighted = add_tile(row_maximum, row_total, row_weighted, z, others, ENTROPY)

    tile_of_target = target // BLOCK_V
    owns_target = (tile_of_target >= split * tiles_per_split) & (tile_of_target < last_tile)
    tl.store(target_logit + rows, row_target, mask=row_exists & owns_target)
    statistics = split.to(tl.int64) * N + rows
    tl.store(maximum + statistics, row_maximum, mask=row_exists)
    tl.store(total + statistics, row_total, mask=row_exists)
    if ENTROPY:
        tl.store(weighted + statistics, row_weighted, mask=row_exists)


@triton.jit(do_not_specialize=["N"])
def _merge_splits_kernel(
    target_logit,
    maximum,
    total,
    weighted,
    logprobs,
    entropy,
    lse,
    N,
    splits,
    ENTROPY: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid: tiles of ROWS rows. A program reads all splits of its rows at once and alone writes their results."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_exists = rows < N
    split = tl.arange(0, SPLITS)[:, None]
    exists = (split < splits) & row_exists[None, :]
    statistics = split.to(tl.int64) * N + rows[None, :]
    part_maximum = tl.load(maximum + statistics, mask=exists, other=float("-inf"))
    part_total = tl.load(total + statistics, mask=exists, other=0.0)
    part_weighted = part_total
    if ENTROPY:
        part_weighted = tl.load(weighted + statistics, mask=exists, other=0.0)
    row_maximum, row_total, row_weighted = merge_statistics(part_maximum, part_total, part_weighted, ENTROPY)
    row_target = tl.load(target_logit + rows, mask=row_exists, other=0.0)
    row_logprob, row_entropy, row_lse = finish_row(row_maximum, row_total, row_weighted, row_target, ENTROPY)
    tl.store(logprobs + rows, row_logprob, mask=row_exists)
    tl.store(lse + rows, row_lse, mask=row_exists)
    if ENTROPY:
        tl.store(entropy + rows, row_entropy, mask=row_exists)


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
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Log-probs, entropy and log-sum-exp of a linear head, in one pass over the weight.

    Args:
        hidden: [N, D] bf16, fp16 or fp32, any strides.
        weight: [V, D] of the same dtype, any strides.
        targets: [N] int64, each in [0, V).
        bias: [V], any float dtype.
        temperature: [N] fp32, positive.
        logit_scale: multiplies h.w + bias.
        softcap: c in c * tanh(x / c), before the temperature.
        entropy: also compute the entropy of each row.

    Returns:
        (logprobs [N], entropy [N] or None, lse [N]), fp32, the entropy in nats.

    Memory: 2 (entropy: 3) fp32 numbers per row and split, at most 64 splits. No other temporary.
    """
    N, V, device = hidden.shape[0], weight.shape[0], hidden.device
    tile = gemm_tile(device, hidden.dtype)
    splits, tiles_per_split = _splits(V, tile)
    logprobs, lse, target_logit = (torch.empty(N, dtype=torch.float32, device=device) for _ in range(3))
    entropies = torch.empty_like(logprobs) if entropy else None
    if N == 0:
        return logprobs, entropies, lse
    maximum, total = (torch.empty(splits, N, dtype=torch.float32, device=device) for _ in range(2))
    statistics = target_logit, maximum, total, torch.empty_like(total) if entropy else None
    inputs = hidden, weight, targets.contiguous(), None if bias is None else bias.contiguous(), temperature.contiguous()
    sizes = N, hidden.shape[1], V, *hidden.stride(), *weight.stride()
    grid = (triton.cdiv(N, tile.block_n) * splits,)
    with launching_on(device):
        _logprob_forward_kernel[grid](
            *inputs,
            *statistics,
            *sizes,
            logit_scale,
            softcap,
            splits,
            tiles_per_split,
            ENTROPY=entropy,
            EVEN_D=hidden.shape[1] % tile.block_d == 0,
            **tile.launch_options(),
        )
        merge = {"ENTROPY": entropy, "SPLITS": triton.next_power_of_2(splits), "ROWS": MERGE_ROWS, **FUSED_MULTIPLY_ADD}
        _merge_splits_kernel[(triton.cdiv(N, MERGE_ROWS),)](*statistics, logprobs, entropies, lse, N, splits, **merge)
    return logprobs, entropies, lse


def _splits(V: int, tile: GemmTile) -> tuple[int, int]:
    """(how many stretches, tiles in each) from V alone: N must not move a boundary of a row's sum."""
    tiles = triton.cdiv(V, tile.block_v)
    tiles_per_split = triton.cdiv(tiles, tile.max_splits)
    return triton.cdiv(tiles, tiles_per_split), tiles_per_split
