"""The moments of rows: what the sum of squared probabilities, the mean logit and the most probable token need.

With logits z_v and a target t of each row,

    largest = max z_v, v != t        squares = sum of e^(2 (z_v - largest)), v != t        logits = sum of all z_v
    before = max z_v, v < t

Parts of the columns merge: `squares` of each is rescaled by e^(2 (largest of the part - largest of all)).
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device import launching_on
from ._tiles import exp, inverse, load_logits, logit
from .tuning import row_tile

Moments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
TakesMoments = Callable[[Moments, int], None]
ROW_VECTORS = ["targets", "temperature", "largest", "squares", "sums", "before", "target_logit"]


@triton.jit(do_not_specialize=["temperature_row"], do_not_specialize_on_alignment=ROW_VECTORS)
def _row_moments_kernel(
    logits,
    targets,
    bias,
    temperature,
    largest,
    squares,
    sums,
    before,
    target_logit,
    C,
    logits_row,
    temperature_row,
    logit_scale: tl.float32,
    softcap,
    BLOCK_V: tl.constexpr,
):
    """Grid: rows. A program reads one row and alone writes its moments."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * logits_row
    target = tl.load(targets + row).to(tl.int32)
    inverse_temperature = inverse(tl.load(temperature + row * temperature_row))
    m = tl.full([], float("-inf"), tl.float32)  # the largest logit so far but the target's
    earlier = m  # and of those before the target
    twice = tl.zeros([BLOCK_V], tl.float32)
    total = tl.zeros([BLOCK_V], tl.float32)
    for first in range(0, C, BLOCK_V):
        columns = first + tl.arange(0, BLOCK_V)
        z = logit(load_logits(start, bias, columns, C, True), logit_scale, softcap, inverse_temperature)
        total += z  # 0 past the end
        z = tl.where((columns < C) & (columns != target), z, float("-inf"))
        top = tl.max(z, 0)
        if first + BLOCK_V <= target:
            earlier = tl.maximum(earlier, top)
        elif first < target:
            earlier = tl.maximum(earlier, tl.max(tl.where(columns < target, z, float("-inf")), 0))
        higher = tl.maximum(m, top)
        # All logits so far are -inf: with any finite shift, -inf - shift is not NaN.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        twice = twice * exp(2.0 * (m - shift)) + exp(2.0 * (z - shift))
        m = higher
    at_target = float("-inf")
    if (target >= 0) & (target < C):
        at_target = logit(load_logits(start, bias, target, C, False), logit_scale, softcap, inverse_temperature)
    tl.store(largest + row, m)
    tl.store(squares + row, tl.sum(twice, 0))
    tl.store(sums + row, tl.sum(total, 0))
    tl.store(before + row, earlier)
    tl.store(target_logit + row, at_target)


def row_moments(
    logits: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: Tensor,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Moments:
    """The moments of the rows of materialised logits, which are not changed.

    Args:
        logits: [R, C] fp32, raw h.w; columns adjacent, rows may be further apart than C.
        targets: [R] int64, relative to these columns: negative where the target is in columns before these, C or more
            where it is in later ones.
        bias, temperature, logit_scale, softcap: as in `row_statistics`.

    Returns:
        (largest, squares, logits, largest, before, target logit), each [R] fp32, as in the docstring of this module;
        the first is what squares are relative to. The target's logit is -inf without a target.

    Memory: none.
    """
    R, C = logits.shape
    largest, squares, sums, before, target_logit = torch.empty((5, R), dtype=torch.float32, device=logits.device)
    moments = largest, squares, sums, largest, before, target_logit
    if R == 0:
        return moments
    with launching_on(logits.device):
        _row_moments_kernel[(R,)](
            logits,
            targets.contiguous(),
            None if bias is None else bias.contiguous(),
            temperature,
            largest,
            squares,
            sums,
            before,
            target_logit,
            C,
            logits.stride(0),
            temperature.stride(0),
            logit_scale,
            softcap,
            **row_tile(logits.device).launch_options(),
        )
    return moments
