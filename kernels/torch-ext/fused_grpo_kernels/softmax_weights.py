"""The statistics of rows, and logits overwritten by softmax weights, in one read and one write; see `_tiles.py`.

m need only be near the largest logit, so a pass needs no maximum beforehand: m is the largest of the first columns with
a finite logit, and is raised where a later logit is HEADROOM above it; then the weights written so far are rescaled.
The sums, which are in registers, are relative to a centre that follows the maximum more closely: the entropy would lose
precision by cancellation otherwise.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device import launching_on
from ._tiles import exp, expm1, finish_row, inverse, load_logits, logit, softcap_slope
from .finish_rows import State, Statistics
from .row_moments import TakesMoments, row_moments
from .tuning import row_tile

# In nats, for the weights and for the sums: e^16 times the vocabulary is far below the largest bf16 and fp32.
HEADROOM, CLOSE = tl.constexpr(16.0), tl.constexpr(2.0)

ROW_VECTORS = ["targets", "temperature", "shift", "total", "weighted", "target_logit", "logprobs", "entropy", "scale"]


@triton.jit
def _store(start, columns, values, C, MASKED: tl.constexpr):
    if MASKED:
        tl.store(start + columns, values.to(start.dtype.element_ty), mask=columns < C)
    else:
        tl.store(start + columns, values.to(start.dtype.element_ty))


@triton.jit
def _logits(start, bias, target, columns, C, logit_scale, softcap, inverse_temperature, MASKED: tl.constexpr):
    """(h.w + bias, the transformed logits) of a tile; with MASKED, -inf at the target and past the end."""
    x = load_logits(start, bias, columns, C, MASKED)
    z = logit(x, logit_scale, softcap, inverse_temperature)
    if MASKED:
        z = tl.where((columns < C) & (columns != target), z, float("-inf"))
    return x, z


@triton.jit
def _write(written, columns, x, e, C, masked, logit_scale, softcap):
    """The weights of a tile from e = e^(z - m)."""
    if softcap is not None:
        e = e * softcap_slope(x, logit_scale, softcap)
    tl.debug_barrier()
    if masked:
        _store(written, columns, e, C, True)
    else:
        _store(written, columns, e, C, False)


@triton.jit
def _rescale(start, end, factor, BLOCK_V: tl.constexpr):
    """Multiply the weights before `end`, a multiple of BLOCK_V."""
    tl.debug_barrier()
    for first in range(0, end, BLOCK_V):
        columns = first + tl.arange(0, BLOCK_V)
        _store(start, columns, tl.load(start + columns).to(tl.float32) * factor, end, False)
    tl.debug_barrier()


@triton.jit
def _at_target(start, bias, target, C, logit_scale, softcap, inverse_temperature):
    """(the target's logit, dsoftcap there); (-inf, 1) without a target."""
    row_target, slope = float("-inf"), 1.0
    if target >= 0:
        at_target = load_logits(start, bias, target, C, False)
        row_target = logit(at_target, logit_scale, softcap, inverse_temperature)
        if softcap is not None:
            slope = softcap_slope(at_target, logit_scale, softcap)
    return row_target, slope


@triton.jit
def _raise_shift(top, m, centre, times, sums, products, written, first, ENTROPY: tl.constexpr, BLOCK_V: tl.constexpr):
    """(m, centre, times, sums, products) after a tile with largest logit `top`; `written` are the weights so far."""
    if top > centre + CLOSE:
        drop = centre - top
        factor = tl.exp(drop)
        if ENTROPY:
            products = factor * (products + tl.maximum(drop, -128.0) * sums)
        sums *= factor
        centre = top
        if top > m + HEADROOM:
            if written is not None:
                _rescale(written, first, tl.exp(m - top), BLOCK_V)
            m = top
        times = tl.exp(m - top)
    return m, centre, times, sums, products


@triton.jit
def _write_target(written, target, row_total, slope, C, BLOCK_V: tl.constexpr):
    """The weight of the target; weights of 0 for a row without a finite total."""
    tl.debug_barrier()
    # So that such a row does not affect products with other rows.
    if (row_total < float("inf")) == 0:
        for first in range(0, C, BLOCK_V):
            _store(written, first + tl.arange(0, BLOCK_V), tl.zeros([BLOCK_V], tl.float32), C, True)
    elif target >= 0:
        tl.store(written + target, (-row_total * slope).to(written.dtype.element_ty))


@triton.jit(do_not_specialize=["temperature_row"], do_not_specialize_on_alignment=ROW_VECTORS)
def _softmax_weights_kernel(
    logits,
    weights,
    targets,
    bias,
    temperature,
    shift,
    total,
    weighted,
    target_logit,
    logprobs,
    entropy,
    scale,
    C,
    logits_row,
    weights_row,
    temperature_row,
    logit_scale: tl.float32,
    softcap,
    KNOWN: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Grid: rows. A program owns the memory of one row and its statistics: no other program reads or writes them.

    `weights` is the same memory as `logits`, in elements of the same or of half the size. Walking left to right, tile i
    is written to bytes from which tiles <= i were read. But threads that write it may be faster than threads that still
    read, so there is a barrier between. Without `weights`, `weighted` and `target_logit` are written instead. The
    entropy's sum is computed where `weighted` or `entropy` is given.
    """
    ENTROPY: tl.constexpr = weighted is not None or entropy is not None
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * logits_row
    target = tl.load(targets + row).to(tl.int32)
    target = tl.where(target < C, target, -1)
    inverse_temperature = inverse(tl.load(temperature + row * temperature_row))
    row_target, slope = _at_target(start, bias, target, C, logit_scale, softcap, inverse_temperature)
    written = None if weights is None else weights + row * weights_row
    m = tl.full([], float("-inf"), tl.float32)
    if KNOWN:
        m = tl.load(shift + row)
    centre, times = m, 1.0  # the sums are relative to the centre: times = e^(m - centre)
    sums = tl.zeros([BLOCK_V], tl.float32)
    products = tl.zeros([BLOCK_V], tl.float32)
    for first in range(0, C, BLOCK_V):
        columns = first + tl.arange(0, BLOCK_V)
        # Masks cost more than the exponential, and only one or two tiles need one.
        masked = (first + BLOCK_V > C) | ((target >= first) & (target < first + BLOCK_V))
        if masked:
            x, z = _logits(start, bias, target, columns, C, logit_scale, softcap, inverse_temperature, True)
        else:
            x, z = _logits(start, bias, target, columns, C, logit_scale, softcap, inverse_temperature, False)
        if not KNOWN:
            m, centre, times, sums, products = _raise_shift(
                tl.max(z, 0), m, centre, times, sums, products, written, first, ENTROPY, BLOCK_V
            )
        # All logits so far are -inf: with any finite shift, -inf - shift is not NaN.
        e = exp(z - tl.where(m == float("-inf"), 0.0, m))
        if not KNOWN:
            sums += e * times
            if ENTROPY:
                # Below -128 exp is 0 in fp32: the clamp only avoids 0 * -inf.
                centred = z - tl.where(centre == float("-inf"), 0.0, centre)
                products += e * times * tl.maximum(centred, -128.0)
        if written is not None:
            _write(written, columns, x, e, C, masked, logit_scale, softcap)

    if KNOWN:
        row_total, row_logprob = tl.load(total + row), tl.load(logprobs + row)
    else:
        row_total, row_weighted = tl.sum(sums, 0), tl.sum(products, 0)
        row_logprob, row_entropy = finish_row(centre, row_total, row_weighted, row_target, ENTROPY)
        tl.store(shift + row, centre)
        tl.store(total + row, row_total)
        row_total /= times  # from here on relative to the shift of the weights
        if weights is None:
            tl.store(target_logit + row, row_target)
            if ENTROPY:
                tl.store(weighted + row, row_weighted)
        else:
            tl.store(logprobs + row, row_logprob)
            if ENTROPY:
                tl.store(entropy + row, row_entropy)
    if weights is not None:
        share = tl.math.div_rn(-expm1(row_logprob), tl.where(row_total == 0.0, 1.0, row_total))
        tl.store(scale + row, -share * logit_scale * inverse_temperature)
        _write_target(written, target, row_total, slope, C, BLOCK_V)


def empty_tile(rows: int, columns: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[R, C] for the raw logits of the largest tile; smaller ones are its first rows and columns.

    Rows lie a multiple of 256 bytes apart: GEMMs with any other leading dimension are two to four times slower.
    """
    memory = torch.empty((rows, columns + -columns % 64), dtype=dtype, device=device)
    return memory if memory.shape[1] == columns else memory[:, :columns]


def row_statistics(
    logits: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: Tensor,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    moments: TakesMoments | None = None,
) -> State:
    """The statistics of the rows of materialised logits, which are not changed.

    Args:
        logits: [R, C] fp32, raw h.w; columns adjacent, rows may be further apart than C.
        targets: [R] int64, in [0, C), or outside for a row whose target is not among these columns.
        bias: [C], any float dtype.
        temperature, logit_scale, softcap: as in `logprob_forward`.
        entropy: also compute `weighted`, which the entropy needs.
        moments: called with what `row_moments.py` computes of these logits, and C. For it, a target outside of [0, C)
            is negative where it is in columns before these, and C or more where it is in later ones.

    Returns:
        (shift m, total s, weighted, target logit), each [R] fp32. `weighted` = sum_v e^(z_v - m) (z_v - m) is set with
        `entropy` only; the target's logit is -inf without a target.

    Memory: none.
    """
    shift, total, weighted, target_logit = _vectors(logits)
    rows = (shift, total, weighted if entropy else None, target_logit, None, None, None)
    _launch(logits, None, targets, (bias, temperature, logit_scale, softcap), rows, moments)
    return shift, total, weighted, target_logit


def softmax_weights_(
    logits: Tensor,
    targets: Tensor,
    *,
    statistics: Statistics | None = None,
    bias: Tensor | None = None,
    temperature: Tensor,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    moments: TakesMoments | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Statistics]:
    """Overwrite logits by the softmax weights of their tokens.

    Args:
        logits, targets, bias, temperature, logit_scale, softcap: as in `row_statistics`; the logits are overwritten.
        statistics: (logprobs, entropy or None, shift, total), each [R] fp32, of the whole rows. Needed if these columns
            are a slice of the vocabulary.
        entropy: also compute the entropy of each row.
        moments: as in `row_statistics`.
        dtype: of the weights. bf16 takes the front half of each row's memory; fp16 has too little range.

    Returns:
        (weights [R, C] of `dtype`, a view of the memory of `logits`; scale [R] fp32; `statistics`).
        Rows without a finite total have weights of 0.

    Memory: none.
    """
    weights = logits.view(dtype)[:, : logits.shape[1]]
    scale, logprobs, shift, total = _vectors(logits)
    is_known = statistics is not None
    result = statistics or (logprobs, torch.empty_like(scale) if entropy else None, shift, total)
    logprobs, entropies, shift, total = result
    rows = (shift, total, None, None, logprobs, None if is_known else entropies, scale)
    _launch(logits, weights, targets, (bias, temperature, logit_scale, softcap), rows, moments, is_known=is_known)
    return weights, scale, result


def _vectors(logits):
    """Four numbers per row: an allocation costs more than a view."""
    return torch.empty((4, logits.shape[0]), dtype=torch.float32, device=logits.device).unbind()


def _launch(logits, weights, targets, head, rows, moments, *, is_known=False):
    """Both passes, after that of the moments, which reads the logits before they are overwritten."""
    R, C = logits.shape
    bias, temperature, logit_scale, softcap = head
    if moments is not None:
        options = {"bias": bias, "temperature": temperature, "logit_scale": logit_scale, "softcap": softcap}
        moments(row_moments(logits, targets, **options), C)
    if R == 0 or C == 0:
        return
    with launching_on(logits.device):
        _softmax_weights_kernel[(R,)](
            logits,
            weights,
            targets.contiguous(),
            None if bias is None else bias.contiguous(),
            temperature,
            *(None if vector is None else vector.contiguous() for vector in rows),
            C,
            logits.stride(0),
            None if weights is None else weights.stride(0),
            temperature.stride(0),
            logit_scale,
            softcap,
            KNOWN=is_known,
            **row_tile(logits.device).launch_options(),
        )
