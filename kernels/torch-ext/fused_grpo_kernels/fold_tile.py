"""Fold a tile of logits into what is known of its rows, and leave the softmax's weights in the logits' own memory.

Equals, for every token v of the tile but the target t, and m the row's maximum over all tiles so far,
    e_v = exp(z_v - m)        total = total * exp(m_before - m) + sum_v e_v        logits_v = e_v * dsoftcap_v

What attention does with keys and values, done with the head: sum_v e_v w_v is one GEMM away, and with it the gradient
of a log-prob with respect to the hidden state, before the last tile is known (`fused_grpo/plans.py`).
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device import launching_on
from ._tiles import inverse, logit, softcap_slope
from .tuning import row_tile


@triton.jit
def _load(start, bias, columns, C):
    """x = h.w + bias of a row at these columns, fp32, one-dimensional; 0 past its end.

    With the two dimensions of `add_bias`, sums over a row go through shared memory, and Triton 3.6 spills.
    """
    x = tl.load(start + columns, mask=columns < C, other=0.0)
    if bias is not None:
        x += tl.load(bias + columns, mask=columns < C, other=0.0).to(tl.float32)
    return x


_UNALIGNED = ["targets", "temperature", "maximum", "total", "weighted", "target_logit"]


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def _fold_tile_kernel(
    logits,
    weights,
    targets,
    bias,
    temperature,
    maximum,
    total,
    weighted,
    target_logit,
    C,
    logits_row,
    weights_row,
    logit_scale: tl.float32,
    softcap,
    weights_scale: tl.float32,
    ENTROPY: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Grid: rows. A program owns the memory of one row and its statistics: nobody else reads or writes them.

    It walks the row twice: for the maximum, then for the weights. `weights` is the same memory as `logits`, in elements
    of the same or of half the size: written from left to right, no later tile is hurt, but the threads that write may
    run ahead of those that still read, hence the barrier (as in `logits_gradient.py`).
    """
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * logits_row
    target = tl.load(targets + row).to(tl.int32)
    inverse_temperature = inverse(tl.load(temperature + row))
    before = tl.load(maximum + row)
    if target >= 0:
        at_target = _load(start, bias, target, C)
        tl.store(target_logit + row, logit(at_target, logit_scale, softcap, inverse_temperature))
    largest = tl.full([BLOCK_V], float("-inf"), tl.float32)
    for first in range(0, C, BLOCK_V):
        columns = first + tl.arange(0, BLOCK_V)
        z = logit(_load(start, bias, columns, C), logit_scale, softcap, inverse_temperature)
        largest = tl.maximum(largest, tl.where((columns < C) & (columns != target), z, float("-inf")))

    top = tl.maximum(before, tl.max(largest, 0))
    # Nothing but -inf so far: any finite shift keeps -inf - shift out of NaN.
    shift = tl.where(top == float("-inf"), 0.0, top)
    sums = tl.zeros([BLOCK_V], tl.float32)
    products = tl.zeros([BLOCK_V], tl.float32)
    for first in range(0, C, BLOCK_V):
        columns = first + tl.arange(0, BLOCK_V)
        x = _load(start, bias, columns, C)
        z = logit(x, logit_scale, softcap, inverse_temperature)
        centred = tl.where((columns < C) & (columns != target), z - shift, float("-inf"))
        e = tl.exp(centred)
        sums += e
        if ENTROPY:
            # Below -128 exp is 0 in fp32, so the clamps only keep 0 * -inf out.
            products += e * tl.maximum(centred, -128.0)
        if weights is not None:
            if softcap is not None:
                e = e * softcap_slope(x, logit_scale, softcap)
            tl.debug_barrier()
            out = (e * weights_scale).to(weights.dtype.element_ty)
            tl.store(weights + row * weights_row + columns, out, mask=columns < C)

    drop = before - shift
    rescale = tl.exp(drop)
    old_total = tl.load(total + row)
    if ENTROPY:
        moved = tl.load(weighted + row) + tl.maximum(drop, -128.0) * old_total
        tl.store(weighted + row, rescale * moved + tl.sum(products, 0))
    tl.store(total + row, rescale * old_total + tl.sum(sums, 0))
    tl.store(maximum + row, top)


def fold_tile_(
    logits: Tensor,
    targets: Tensor,
    state: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    bias: Tensor | None = None,
    temperature: Tensor,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    weights: torch.dtype | None = None,
    weights_scale: float = 1.0,
) -> Tensor | None:
    """Fold a tile into the state of its rows and, if they are asked for, overwrite it with the weights of its tokens.

    Args:
        logits: [R, C] fp32, raw h.w; columns adjacent, rows may be further apart than C. Lost afterwards with
            `weights`, left as they are without.
        targets: [R] int64, relative to the tile; -1 where the target is in another tile.
        state: (maximum, total, weighted, target_logit), each [R] fp32, contiguous, updated in place; -inf, 0, 0, -inf
            before the first tile. `weighted` = sum_v e_v (z_v - m) is kept with `entropy` only.
        bias: [C], any float dtype.
        temperature, logit_scale, softcap: as in `logprob_forward`.
        weights: dtype of the result, None for none. bf16 and fp16 take the front half of each row's memory.
        weights_scale: a factor of the result, for dtypes of little range.

    Returns:
        With `weights`, [R, C] in a view of the memory of `logits`: weights_scale * e_v * dsoftcap_v, 0 at the target.

    Memory: none.
    """
    R, C = logits.shape
    out = None if weights is None else logits.view(weights)[:, :C]
    if R == 0 or C == 0:
        return out
    inputs = targets.contiguous(), None if bias is None else bias.contiguous(), temperature.contiguous()
    with launching_on(logits.device):
        _fold_tile_kernel[(R,)](
            logits,
            out,
            *inputs,
            *state,
            C,
            logits.stride(0),
            None if out is None else out.stride(0),
            logit_scale,
            softcap,
            weights_scale,
            ENTROPY=entropy,
            **row_tile(logits.device).launch_options(),
        )
    return out
