"""The row passes in plain torch: the path for CPUs, and for any device that Triton does not serve.

The same passes that `fused_grpo.kernels` offers, so that the ops are written once over either module. `logits` [R, C]
is always a tile of raw h.w: some rows, and the whole vocabulary or a stretch of it. The passes walk it in blocks of
rows that fit a core's cache, with two block-sized scratch tensors. That keeps the peak at one tile and is also the fast
way on a CPU: a block is exponentiated, summed and differentiated while it is still in the cache.
The numerics are those of `statistics.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_grpo import planner, reference
from fused_grpo.config import TokenTerms
from fused_grpo.planner import BLOCK_BYTES
from fused_grpo.statistics import RowState, finish_rows, finite, share_of_others, start_rows


@dataclass(frozen=True)
class _Block:
    """Some rows of a tile with their transformed logits, in scratch."""

    rows: slice
    z: Tensor  # [r, C], the tile itself where nothing transforms it, else scratch
    work: Tensor  # [r, C], scratch
    spare: Tensor  # [r, C], scratch once z is not needed
    slope: Tensor | None  # [r, C] dz/dx of the soft cap, None without one
    column: Tensor  # [r, 1] of the target, 0 where it is not here
    here: Tensor  # [r, 1] whether the target is in this tile


def fold_tile_(
    logits: Tensor,
    targets: Tensor,
    state: RowState,
    *,
    bias: Tensor | None = None,
    temperature: Tensor,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    weights: torch.dtype | None = None,
    weights_scale: float = 1.0,
) -> Tensor | None:
    """Fold a tile [R, C] into the state of its rows; `targets` are -1 where the target is in another tile.

    With `weights`, the tile is overwritten by weights_scale * e^(z - m) * dsoftcap, 0 at the target, in that dtype, and
    returned: a view of its memory. Sums that were weighted before are relative to the maximum of then: scale them by
    e^(m_then - m). Without, the tile is left as it was.
    """
    out = None if weights is None else _in_place(logits, weights)
    for block in _blocks(logits, targets, bias, temperature, logit_scale, softcap, slope=weights is not None):
        maximum, total, weighted, target_logit = state.rows(block.rows)
        at_target = block.z.gather(1, block.column)
        target_logit.copy_(torch.where(block.here, at_target, target_logit[:, None])[:, 0])
        others = block.z.scatter_(1, block.column, torch.where(block.here, -torch.inf, at_target))
        top = torch.maximum(maximum, others.amax(1))
        shift = finite(top)
        drop = maximum - shift
        rescale = drop.exp()
        centred = torch.sub(others, shift[:, None], out=block.work)
        others.scatter_(1, block.column, at_target)
        # Straight to where it belongs, one pass less, unless it has yet to be scaled or narrowed.
        kept = out is not None and out.dtype == centred.dtype and weights_scale == 1.0
        e = torch.exp(centred, out=out[block.rows] if out is not None and kept else block.spare)
        if entropy:
            # Below -128 exp is 0 or all but: the clamps only keep 0 * -inf out.
            moved = rescale * (weighted + drop.clamp_min(-128.0) * total)
            weighted.copy_(moved + centred.clamp_min_(-128.0).mul_(e).sum(1))
        total.mul_(rescale).add_(e.sum(1))
        maximum.copy_(top)
        if out is not None:
            e = e if block.slope is None else e.mul_(block.slope)
            if not kept:
                torch.mul(e, weights_scale, out=out[block.rows])
    return out


def row_statistics(
    logits: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: Tensor,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None, RowState]:
    """(log p [R], entropy [R] or None, their state) of whole rows that are left as they were."""
    state = start_rows(len(targets), dtype=logits.dtype, device=logits.device)
    options = {"bias": bias, "temperature": temperature, "logit_scale": logit_scale, "softcap": softcap}
    fold_tile_(logits, targets, state, **options, entropy=entropy)  # type: ignore[arg-type]
    logprobs, entropies = finish_rows(state)
    return logprobs, entropies if entropy else None, state


def logits_gradient_(
    logits: Tensor,
    targets: Tensor,
    *,
    maximum: Tensor,
    total: Tensor,
    logprobs: Tensor,
    entropy: Tensor | None,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    bias: Tensor | None = None,
    temperature: Tensor,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """d(h.w) [R, C] in `dtype`, written over a tile: it shares the memory, at half width for 16-bit dtypes.

    `targets` are -1 where the target is in another tile; the statistics are those of the whole row.
    """
    out = _in_place(logits, dtype)
    # Of each row, [R, 1]: once for the tile, not for each of its blocks.
    log_p_target, upstream, shift = logprobs[:, None], grad_logprobs[:, None], finite(maximum[:, None])
    slope, share = logit_scale / temperature[:, None], share_of_others(log_p_target, total[:, None])
    at_target = upstream * -torch.expm1(log_p_target)
    factor = -upstream * slope * share
    of_entropy = None
    if grad_entropy is not None and entropy is not None:
        upstream_entropy, mean = grad_entropy[:, None], entropy[:, None]
        # The clamps, here and below, keep 0 * -inf out; beyond them a factor is 0 or all but.
        surprise = log_p_target.clamp_min(-128.0) + mean
        at_target = at_target - upstream_entropy * log_p_target.exp() * surprise
        of_entropy = -upstream_entropy, share.clamp_min(torch.finfo(share.dtype).tiny).log() + mean
        factor = slope * share
    at_target = at_target * slope
    for block in _blocks(logits, targets, bias, temperature, logit_scale, softcap, slope=True):
        rows = block.rows
        centred = torch.sub(block.z, shift[rows], out=block.work)
        e = torch.exp(centred, out=block.spare)
        # Straight to where it belongs, one pass less, unless it has yet to be narrowed.
        gradient = out[rows] if out.dtype == e.dtype else e
        if of_entropy is not None:
            push, offset = (value[rows] for value in of_entropy)
            e.mul_(centred.clamp_min_(-128.0).add_(offset).mul_(push).sub_(upstream[rows]))
        torch.mul(e, factor[rows], out=gradient)
        elsewhere = gradient.gather(1, block.column)
        gradient.scatter_(1, block.column, torch.where(block.here, at_target[rows], elsewhere))
        if block.slope is not None:
            gradient.mul_(block.slope)
        if gradient is e:
            out[rows] = gradient
    return out


def weights_(
    logits: Tensor,
    targets: Tensor,
    *,
    maximum: Tensor,
    bias: Tensor | None = None,
    temperature: Tensor,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """e^(z - m) * dsoftcap [R, C] over a tile, 0 at the target, with `maximum` m [R] that of the whole row."""
    shift = finite(maximum[:, None])
    for block in _blocks(logits, targets, bias, temperature, logit_scale, softcap, slope=True):
        at_target = block.z.gather(1, block.column)
        block.z.scatter_(1, block.column, torch.where(block.here, -torch.inf, at_target))
        e = torch.sub(block.z, shift[block.rows], out=logits[block.rows]).exp_()
        if block.slope is not None:
            e.mul_(block.slope)
    return logits


def _in_place(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """`logits` [R, C] as memory for [R, C] of `dtype`; 16-bit dtypes take the front half of each row."""
    return logits if dtype == logits.dtype else logits.view(dtype)[:, : logits.shape[1]]


def grpo_token_loss(
    logprobs: Tensor, *, log_ratio: Tensor | None = None, inputs: dict[str, Tensor | None], terms: TokenTerms
) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """(d loss / d log p [N], d loss / d log_ratio [N] if given, the statistics of `reference.token_loss`).

    `inputs` are the other [N] arguments of `reference.token_loss`.
    """
    everything = {"logprobs": logprobs, "log_ratio": log_ratio, **inputs}
    with torch.inference_mode(False), torch.enable_grad():
        # Tensors of inference mode cannot take part in autograd; copies of them can.
        ours = {name: x.clone() if x is not None and x.is_inference() else x for name, x in everything.items()}
        for name in ("logprobs", "log_ratio"):
            value = ours[name]
            ours[name] = None if value is None else value.detach().requires_grad_()
        leaves = [x for x in (ours["logprobs"], ours["log_ratio"]) if x is not None]
        loss, statistics = reference.token_loss(**ours, terms=terms)  # type: ignore[arg-type]
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return gradients[0], None if log_ratio is None else gradients[1], statistics


def _blocks(
    logits: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    temperature: Tensor,
    logit_scale: float,
    softcap: float | None,
    *,
    slope: bool,
) -> Iterator[_Block]:
    """Transformed logits of `logits`, a cache-sized block of rows at a time, in reused scratch."""
    num_rows, columns = logits.shape
    # Powers of two cut the rows of a batch-invariant tile into blocks that are all alike.
    height = min(num_rows, 1 << (max(1, BLOCK_BYTES // (columns * logits.element_size())).bit_length() - 1))
    first, second = logits.new_empty((2, height, columns))
    # At one temperature and scale 1 the raw logits are the logits; half of all calls, and a pass saved.
    as_they_are = bias is None and softcap is None and _all_equal(temperature, logit_scale)
    for rows in planner.chunks(num_rows, height):
        z, work = (scratch[: rows.stop - rows.start] for scratch in (first, second))
        raw, slopes = logits[rows], None
        if as_they_are:
            z, spare = raw, z
        else:
            spare = z
            raw = raw if bias is None else torch.add(raw, bias, out=z)
            if softcap is None:
                # Where temperature and scale are equal this is exactly 1: a row is multiplied or not, to the same bits.
                torch.mul(raw, logit_scale / temperature[rows, None], out=z)
            else:
                torch.mul(raw, logit_scale / softcap, out=z).tanh_()
                slopes = 1 - z.square() if slope else None
                z.mul_(softcap / temperature[rows, None])
        target = targets[rows, None]
        yield _Block(rows, z, work, spare, slopes, target.clamp_min(0), target >= 0)


def _all_equal(temperature: Tensor, value: float) -> bool:
    return temperature.device.type == "cpu" and bool((temperature == value).all())
