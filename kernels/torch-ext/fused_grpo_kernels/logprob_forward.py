"""Log-probs of the targets (and the entropy) from hidden states and the head's weight. No logit is written to memory.

Equals
    z = softcap(logit_scale * (hidden @ weight.T + bias)) / temperature[:, None]
    log_softmax(z)[arange(N), targets]

One GEMM, 2*N*D*V FLOP, whose epilogue reduces each [block_n, block_v] tile of fp32 accumulators to a maximum, a sum and
a target logit per row. The vocabulary is cut into contiguous splits, as in split-K, so that a few rows still fill the
device; each split writes 2 numbers per row (3 with the entropy), which `finish_rows.py` merges.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device import launching_on
from ._head_gemm import HeadGemm, HeadOptions, owned, plan, product
from ._tiles import add_bias, add_tile, column_blocks, hide_targets, inverse, logit, start_statistics, sum_at_targets
from .finish_rows import State, finish_splits


@triton.jit(do_not_specialize=["N", "temperature_row"], do_not_specialize_on_alignment=["targets", "temperature"])
def _logprob_forward_kernel(
    hidden,
    weight,
    strides,
    targets,
    bias,
    temperature,
    only,
    target_logit,
    maximum,
    total,
    weighted,
    N,
    sizes,
    logit_scale: tl.float32,
    softcap,
    temperature_row,
    POSITIVE: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP_N: tl.constexpr,
    WIDE: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Grid: see `_head_gemm.py`; `sizes` are those of `owned`.

    A program alone writes the statistics [split, rows] of its rows, and it alone writes target_logit for those rows
    whose target lies in its split; the first split also for those without a target. If `only` is given, programs none
    of whose rows is in it do nothing.
    """
    ENTROPY: tl.constexpr = weighted is not None
    D, V, _, _ = sizes
    first_row, row_exists, split, first_tile, last_tile = owned(N, sizes, only, BLOCK_N, BLOCK_V, GROUP_N)
    rows = first_row + tl.arange(0, BLOCK_N)
    safe_rows = tl.minimum(rows, N - 1)
    target = tl.load(targets + safe_rows).to(tl.int32)
    inverse_temperature = inverse(tl.load(temperature + safe_rows * temperature_row))

    # The statistics are updated by x = h.w + bias if z is a positive multiple of x, and by z otherwise.
    factor = tl.full([BLOCK_N], 1.0, tl.float32)
    if POSITIVE:
        # Not 0, which times the -inf of masks would be NaN.
        factor = tl.maximum(logit_scale * inverse_temperature, 1e-37)
    row_target, row_maximum, row_total, row_weighted = start_statistics(target)
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
            if not POSITIVE:
                x = logit(x, logit_scale, softcap, inverse_temperature[:, None])
            if masked:
                row_target += factor * sum_at_targets(x, first, target)
                x = hide_targets(x, first, target, V)
            row_maximum, row_total, row_weighted = add_tile(
                row_maximum, row_total, row_weighted, x, factor, ENTROPY, NARROW
            )

    tile_of_target = tl.maximum(target, 0) // BLOCK_V
    owns_target = (tile_of_target >= first_tile) & (tile_of_target < last_tile)
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
) -> tuple[Tensor, Tensor | None, State]:
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
    head = (bias, temperature, logit_scale, softcap)
    return finish_splits(*split_statistics(plan(hidden, weight), targets, head, entropy=entropy))


def split_statistics(
    gemm: HeadGemm, targets: Tensor, head: HeadOptions, *, entropy: bool, only: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(target logit [N], maximum, total, and `weighted` with the entropy, each [splits, N]).

    If `only` [N], bool, is given, some rows beside those in it may be left out, and their numbers undefined.
    """
    bias, temperature, logit_scale, softcap = head
    N = len(targets)
    target_logit = torch.empty(N, dtype=torch.float32, device=targets.device)
    maximum, total, weighted = (target_logit.new_empty((gemm.splits, N)) if x else None for x in (True, True, entropy))
    statistics = target_logit, maximum, total, weighted
    if N:
        given = (targets, bias, temperature, only)
        vectors = (x if x is None or x is temperature else x.contiguous() for x in given)
        with launching_on(targets.device):
            _logprob_forward_kernel[gemm.grid](
                *gemm.matrices,
                *vectors,
                *statistics,
                N,
                gemm.sizes,
                logit_scale,
                softcap,
                temperature.stride(0),
                POSITIVE=softcap is None and logit_scale > 0,
                **gemm.options,
            )
    return statistics  # type: ignore[return-value]
