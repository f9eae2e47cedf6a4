"""Checked targets, the statistics, softmax weights and gradients of a tile's rows by blocks, and the loss of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fused_grpo._maths import formulas
from fused_grpo._maths.distributions import LogitTransform
from fused_grpo._maths.moments import TakesMoments
from fused_grpo._maths.statistics import (
    HEADROOM,
    MOST_PARTS,
    RowState,
    Statistics,
    finish_rows,
    finite,
    merge_rows,
    share_of_others,
)
from fused_grpo.config import TokenTerms
from fused_grpo.errors import InputError
from fused_grpo.passes.torch_passes.tile import RawTile, block_maxima, block_sums, exp, narrow_memory, put_at_targets_
from fused_grpo.passes.torch_passes.tile_moments import TileMoments

# Whether a transform of torch.func is active.
transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
# The saved_tensors_hooks that are entered here, if any. Ours stand in for them: what is saved stays as it is, but
# detached, since a result that is in no loss would keep the node that saved it, and that node the result.
hooks_of_caller: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
OWN_HOOKS = saved_tensors_hooks(lambda x: x.detach(), lambda x: x)


def clean_targets(targets: Tensor, *, ignore_index: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """(which targets are not `ignore_index`, the targets with 0 in the place of those that are).

    Raises:
        InputError: a target is out of range; on a GPU, an assertion of the device. A compiled graph does not look.
    """
    kept = targets != ignore_index
    cleaned = targets * kept
    if not torch.compiler.is_compiling():
        want = f"want 0 <= target < V={vocab_size}, or ignore_index={ignore_index}"
        allowed = cleaned == cleaned.clamp(0, vocab_size - 1)
        if targets.is_cuda:
            torch._assert_async(allowed.all(), f"a target is out of range; {want}")
        elif not allowed.all():
            at = (~allowed).nonzero()[0].tolist()
            raise InputError(f"got target {cleaned[tuple(at)].item()} at {at}; {want}")
    return kept, cleaned


def row_statistics(
    logits: Tensor,
    targets: Tensor,
    *,
    entropy: bool = False,
    moments: TakesMoments | None = None,
    **head: Unpack[LogitTransform],
) -> RowState:
    """The state of the rows of a tile, which is not changed."""
    return merge_rows(_fold(RawTile(logits, targets, **head), entropy=entropy, moments=moments)[0])


def softmax_weights_(
    logits: Tensor,
    targets: Tensor,
    *,
    statistics: Statistics | None = None,
    entropy: bool = False,
    moments: TakesMoments | None = None,
    dtype: torch.dtype | None = None,
    **head: Unpack[LogitTransform],
) -> tuple[Tensor, Tensor, Statistics]:
    """Overwrite a tile with the weights E of its tokens: (E [R, C] in `dtype`, scale [R], the rows' statistics) with

        d log p_n / d(h.w_v) = scale_n E_nv    for every v, the target included.

    E is e^(z - m), and -s at the target, times the slope of the soft cap. Rows that are not finite have weights of 0
    and a scale of NaN, so that they do not affect products with other rows.
    """
    tile = RawTile(logits, targets, **head)
    out = logits if dtype is None or dtype == logits.dtype else narrow_memory(logits, dtype)
    if statistics is None:
        parts, shift = _fold(tile, entropy=entropy, out=out, moments=moments)
        statistics = finish_rows(parts, entropy=entropy)
        total = statistics.total * torch.exp(statistics.shift - finite(shift))
    else:
        shift, total = finite(statistics.shift)[:, None], statistics.total
        for block in tile.blocks(out):
            exp(torch.sub(block.z, shift, out=block.centred), out=block.e)
    at_target = -total if tile.slope_at_target is None else -total * tile.slope_at_target
    put_at_targets_(out, targets, at_target[:, None].to(out.dtype))
    lost = ~torch.isfinite(total)
    if not tile.on_cpu or lost.any():
        out.masked_fill_(lost[:, None], 0.0)
    return out, -share_of_others(statistics.logprobs, total) * tile.logit_scale / tile.temperature, statistics


def _fold(
    tile: RawTile, *, entropy: bool, out: Tensor | None = None, moments: TakesMoments | None = None
) -> tuple[list[RowState], Tensor]:
    """(the states of a tile's rows, m [R]); with `out`, e^(z - m) times the soft cap's slope is left there."""
    parts, seen = list[RowState](), None if moments is None else TileMoments(tile)
    # On a GPU, a test whether a shift is raised would synchronize: the largest logits are computed first.
    shift = tile.raw.new_full((len(tile.raw),), -torch.inf) if tile.on_cpu else tile.largest()
    for block in tile.blocks(out, apart=entropy):
        # With the entropy, sums are relative to the largest logit of the block: other errors would not cancel.
        top = block_maxima(block.z) if entropy or seen is not None else None
        if tile.on_cpu:
            shift = _raised(shift, block.z, top, None if out is None else out[:, : block.columns.start])
        centre = top if top is not None and entropy else shift
        if seen is not None and top is not None:
            seen.add_logits(block, top)
        centred = torch.sub(block.z, finite(centre)[:, None], out=block.centred if entropy else block.e)
        e = exp(centred, out=block.e)
        if seen is not None:
            seen.add_exponentials(e, centre)
        # Below -128 exp is 0 or almost 0: the clamp only avoids 0 * -inf.
        weighted = block_sums(block.centred.clamp_min_(-128.0).mul_(e)) if entropy else shift
        parts.append(RowState(centre, block_sums(e), weighted, tile.target_logit))
        if len(parts) == MOST_PARTS:
            parts = [merge_rows(parts)]
        if entropy and out is not None:
            e.mul_(torch.exp(centre - finite(shift))[:, None])
    if moments is not None and seen is not None:
        moments(seen.finish(), tile.raw.shape[1])
    return parts, shift


def _raised(shift: Tensor, z: Tensor, top: Tensor | None, before: Tensor | None) -> Tensor:
    """The shift of rows after the next logits z with maximum `top`. The exponentials `before` them are rescaled."""
    if top is None:
        # One maximum over all rows is twice as fast as one per row, and usually sufficient.
        if not len(shift) or z.amax() <= shift.amin() + HEADROOM:
            return shift
        top = z.amax(1)
    higher = top > shift + HEADROOM
    if not higher.any():
        return shift
    raised = torch.where(higher, top, shift)
    if before is not None and before.numel():
        before.mul_(torch.exp(shift - finite(raised))[:, None])
    return raised


def logits_gradient_(
    logits: Tensor,
    targets: Tensor,
    *,
    statistics: Statistics,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    dtype: torch.dtype | None = None,
    **head: Unpack[LogitTransform],
) -> Tensor:
    """d loss / d(h.w) [R, C] in `dtype`, written over a tile: it shares the memory, at half width for 16-bit dtypes.

    The statistics are those of whole rows, with the entropy where it has a gradient.
    """
    tile = RawTile(logits, targets, **head)
    out = logits if dtype is None or dtype == logits.dtype else narrow_memory(logits, dtype)
    # [R, 1], computed once for the tile, not for each block.
    log_p, upstream, shift = statistics.logprobs[:, None], grad_logprobs[:, None], finite(statistics.shift)[:, None]
    slope, share = tile.logit_scale / tile.temperature[:, None], share_of_others(log_p, statistics.total[:, None])
    at_target = upstream * -torch.expm1(log_p)
    factor, entropy_terms = -upstream * slope * share, None
    none = upstream == 0
    if grad_entropy is not None and statistics.entropy is not None:
        upstream_entropy, mean = grad_entropy[:, None], statistics.entropy[:, None]
        # The clamps, here and below, avoid 0 * -inf; beyond them a factor is 0 or almost 0.
        at_target = at_target - upstream_entropy * log_p.exp() * (log_p.clamp_min(-128.0) + mean)
        entropy_terms = -upstream_entropy, share.clamp_min(torch.finfo(share.dtype).tiny).log() + mean
        factor, none = slope * share, none & (upstream_entropy == 0)
    at_target = at_target * slope if tile.slope_at_target is None else at_target * slope * tile.slope_at_target[:, None]
    for block in tile.blocks(out, apart=entropy_terms is not None):
        e = exp(torch.sub(block.z, shift, out=block.centred), out=block.e)
        if entropy_terms is not None:
            e.mul_(block.centred.clamp_min_(-128.0).add_(entropy_terms[1]).mul_(entropy_terms[0]).sub_(upstream))
        e.mul_(factor)
    put_at_targets_(out, targets, at_target.to(out.dtype))
    if not tile.on_cpu or none.any():
        out.masked_fill_(none, 0.0)
    return out


def scale_hidden(hidden: Tensor | None, scale: Tensor, grad_logprobs: Tensor) -> tuple[Tensor, Tensor | None]:
    """(factor = scale * grad_logprobs [R], factor * hidden [R, D] in the dtype of hidden).

    A row without a gradient is 0, even if its scale or its hidden states are NaN.
    """
    factor = torch.where(grad_logprobs == 0, 0.0, scale * grad_logprobs)
    if hidden is None:
        return factor, None
    return factor, (hidden * factor[:, None]).to(hidden.dtype).masked_fill_((factor == 0)[:, None], 0.0)


def scale_(values: Tensor, factor: Tensor, others: Tensor | None = None) -> Tensor:
    """Values and others times a 0-d factor, in place. A CPU skips a factor of 1; elsewhere that would synchronize."""
    if others is not None:
        scale_(others, factor)
    if factor.device.type == "cpu" and type(factor) is Tensor:  # a fake one has no value
        return values if factor.item() == 1.0 else values.mul_(factor)
    # Of one dimension: a GPU would round one of none to the dtype of the values first.
    return values.mul_(factor.reshape(1))


def grpo_token_loss(
    logprobs: Tensor, *, log_ratio: Tensor | None = None, inputs: Mapping[str, Tensor | None], terms: TokenTerms
) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """By autograd through `formulas.token_loss`. The sums are a dict of its statistics."""
    everything = {"logprobs": logprobs, "log_ratio": log_ratio, **inputs}
    # This is a small backward pass of our own. Hooks of the caller must not see its saved tensors: those of activation
    # checkpointing would run the whole region again to recompute them. Nor anomaly mode the NaN that it selects away;
    # that mode is of all threads, and only one that has found it on turns it on again.
    hooks = nullcontext() if transformed() or hooks_of_caller(True) is None else OWN_HOOKS
    anomalies = torch.autograd.set_detect_anomaly(False) if torch.is_anomaly_enabled() else nullcontext()
    with torch.inference_mode(False), torch.enable_grad(), hooks, anomalies:
        # Autograd does not accept tensors of inference mode, but it accepts copies of them.
        tensors: Any = {name: x.clone() if x is not None and x.is_inference() else x for name, x in everything.items()}
        leaves = {name: tensors[name].detach() for name in ("logprobs", "log_ratio") if tensors[name] is not None}
        if transformed():  # by torch.func, inside of which requires_grad_() is not allowed
            take_gradient = torch.func.grad(lambda x: formulas.token_loss(**tensors | x, terms=terms), has_aux=True)
            gradients, statistics = take_gradient(leaves)
        else:
            differentiated = [x.requires_grad_() for x in leaves.values()]
            loss, statistics = formulas.token_loss(**tensors | leaves, terms=terms)
            values = torch.autograd.grad(loss, differentiated, allow_unused=True, materialize_grads=True)
            gradients = dict(zip(leaves, values, strict=True))
    # In the mask and without a gradient: one operation on two bools.
    statistics["zero_gradient"] = (inputs["mask"] > (gradients["logprobs"] != 0)).sum().to(logprobs.dtype)
    return gradients["logprobs"], gradients.get("log_ratio"), statistics
