"""Logits overwritten by their gradient, which `_tiles.py` derives.

The columns may be a slice of the vocabulary. m, s, log p and H are then those of the whole vocabulary, and for a row
whose target is in another slice (-1) the formula for v != t holds for every column.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device import launching_on
from ._tiles import exp, expm1, inverse, load_logits, logit, logit_slope
from .finish_rows import Statistics
from .tuning import row_tile

# They are slices of longer vectors: another start must not recompile the kernel.
ROW_VECTORS = ["targets", "temperature", "shift", "total", "logprobs", "entropy", "grad_logprobs", "grad_entropy"]


@triton.jit(do_not_specialize=["temperature_row"], do_not_specialize_on_alignment=ROW_VECTORS)
def _logits_gradient_kernel(
    logits,
    gradient,
    targets,
    bias,
    temperature,
    shift,
    total,
    logprobs,
    entropy,
    grad_logprobs,
    grad_entropy,
    V,
    logits_row,
    gradient_row,
    temperature_row,
    logit_scale: tl.float32,
    softcap,
    BLOCK_V: tl.constexpr,
):
    """Grid: rows. A program owns the memory of one row: it reads logits there and writes the gradient over them.

    `gradient` is the same memory as `logits`, in elements of the same or of half the size. Walking left to right, tile
    i is written to bytes from which tiles <= i were read: the same bytes as tile i in fp32, the front half of tiles
    0..i at half width. So no later tile is overwritten. But threads that write tile i may be faster than threads that
    still read it (and tile 0 overlaps itself), so there is a barrier between the read and the write of each tile.
    """
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * logits_row
    target = tl.load(targets + row).to(tl.int32)
    inverse_temperature = inverse(tl.load(temperature + row * temperature_row))
    row_logprob = tl.load(logprobs + row)
    g = tl.load(grad_logprobs + row)
    # Without another token, or with all others at -inf: 0 / 1, and with a finite shift -inf - shift is not NaN.
    m, row_total = tl.load(shift + row), tl.load(total + row)
    m = tl.where(m == float("-inf"), 0.0, m)
    others_prob = -expm1(row_logprob)
    share = tl.math.div_rn(others_prob, tl.where(row_total == 0.0, 1.0, row_total))
    g_entropy, row_entropy, target_entropy_term, surprise = 0.0, 0.0, 0.0, 0.0
    if grad_entropy is not None:
        # The clamps, here and below, avoid 0 * -inf; beyond them a factor is 0.
        g_entropy, row_entropy = tl.load(grad_entropy + row), tl.load(entropy + row)
        target_entropy_term = exp(row_logprob) * (tl.maximum(row_logprob, -128.0) + row_entropy)
        surprise = tl.log(tl.maximum(share, 1.2e-38)) + row_entropy
    for first in range(0, V, BLOCK_V):
        columns = first + tl.arange(0, BLOCK_V)
        x = load_logits(start, bias, columns, V, True)
        is_target = columns == target
        # Only the target can be far above the others, and it has its own formula.
        centred = tl.minimum(logit(x, logit_scale, softcap, inverse_temperature) - m, 32.0)
        p = share * exp(centred)
        dz = tl.where(is_target, g * others_prob, -g * p)
        if grad_entropy is not None:
            dz -= g_entropy * tl.where(is_target, target_entropy_term, p * (tl.maximum(centred, -128.0) + surprise))
        d_raw = dz * logit_slope(x, logit_scale, softcap, inverse_temperature)
        # A row without a gradient is 0, even if its logits are NaN.
        d_raw = tl.where((g == 0.0) & (g_entropy == 0.0), 0.0, d_raw)
        tl.debug_barrier()
        tl.store(gradient + row * gradient_row + columns, d_raw.to(gradient.dtype.element_ty), mask=columns < V)


def logits_gradient_(
    logits: Tensor,
    targets: Tensor,
    *,
    statistics: Statistics,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    bias: Tensor | None = None,
    temperature: Tensor,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Overwrite logits by the gradient of the loss with respect to them.

    Args:
        logits: [R, V] fp32, raw h.w; columns adjacent, rows may be further apart than V. They are overwritten.
        targets: [R] int64, in [0, V), or outside for a row whose target is not among these columns.
        statistics: (logprobs, entropy or None, shift, total), each [R] fp32, of the whole rows, as `softmax_weights_`
            returns them; the entropy is needed where it has a gradient.
        grad_logprobs: [R] fp32, dL/dlogprobs.
        grad_entropy: [R] fp32, dL/dentropy; None if the entropy has no gradient, then the entropy may be None, too.
        bias, temperature, logit_scale, softcap: as given to `row_statistics`.
        dtype: of the result. bf16 and fp16 are written into the front half of each row's memory.

    Returns:
        [R, V] of `dtype`, a view of the memory of `logits`: dL/d(h.w). dL/dbias is its sum over rows.

    Memory: none.
    """
    R, V = logits.shape
    gradient = logits.view(dtype)[:, :V]
    if R == 0:
        return gradient
    logprobs, entropy, shift, total = statistics
    rows = (
        None if vector is None else vector.contiguous()
        for vector in (shift, total, logprobs, entropy, grad_logprobs, grad_entropy)
    )
    with launching_on(logits.device):
        _logits_gradient_kernel[(R,)](
            logits,
            gradient,
            targets.contiguous(),
            None if bias is None else bias.contiguous(),
            temperature,
            *rows,
            V,
            logits.stride(0),
            gradient.stride(0),
            temperature.stride(0),
            logit_scale,
            softcap,
            **row_tile(logits.device).launch_options(),
        )
    return gradient
