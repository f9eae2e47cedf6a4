"""The statistics, softmax weights and gradients of the rows of a tile, and the loss of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Unpack

import torch
from torch import Tensor

from fused_grpo._maths import formulas
from fused_grpo._maths.inputs import LogitTransform
from fused_grpo._maths.statistics import (
    HEADROOM,
    RowState,
    Statistics,
    finish_rows,
    finite,
    merge_rows,
    share_of_others,
    with_part,
)
from fused_grpo.config import TokenTerms
from fused_grpo.passes.torch_passes.blocks import RawTile, block_sums, exp, in_place

# Whether a transform of torch.func is active.
transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active


def row_statistics(
    logits: Tensor, targets: Tensor, *, entropy: bool = False, **head: Unpack[LogitTransform]
) -> RowState:
    """The state of the rows of a tile, which is not changed. `targets` outside of [0, C) are in another tile.

    `head` is bias [C] or None, temperature [R], logit_scale and softcap.
    """
    return _fold(RawTile(logits, targets, **head), entropy=entropy)[0]


def softmax_weights_(
    logits: Tensor,
    targets: Tensor,
    *,
    known: Statistics | None = None,
    entropy: bool = False,
    dtype: torch.dtype | None = None,
    **head: Unpack[LogitTransform],
) -> tuple[Tensor, Tensor, Statistics]:
    """Overwrite a tile with the weights E of its tokens: (E [R, C] in `dtype`, scale [R], the rows' statistics) with

        d log p_n / d(h.w_v) = scale_n E_nv    for every v, the target included.

    E is e^(z - m), and -s at the target, times the slope of the soft cap. The tile is whole rows, or the statistics of
    the whole rows are `known`. Rows that are not finite have weights of 0 and a scale of NaN, so that they do not
    affect products with other rows.
    """
    tile, out = RawTile(logits, targets, **head), in_place(logits, dtype or logits.dtype)
    if known is None:
        state, shift = _fold(tile, entropy=entropy, out=out)
        known = finish_rows([state], entropy=entropy)
        total = known.total * torch.exp(known.shift - finite(shift))
    else:
        shift, total = finite(known.shift)[:, None], known.total
        for block in tile.blocks(out):
            centred = torch.sub(block.z, shift, out=block.place())
            block.write(exp(centred, out=centred))
    tile.put_at_target_(out, -total if tile.slope_at_target is None else -total * tile.slope_at_target)
    lost = ~torch.isfinite(total)
    if not tile.on_cpu or lost.any():
        out.masked_fill_(lost[:, None], 0.0)
    return out, -share_of_others(known.logprobs, total) * tile.logit_scale / tile.temperature, known


def _fold(tile: RawTile, *, entropy: bool, out: Tensor | None = None) -> tuple[RowState, Tensor]:
    """(the state of a tile's rows, m [R]); with `out`, e^(z - m) times the soft cap's slope is left there."""
    parts = list[RowState]()
    # On a GPU, a test whether a shift is raised would synchronize: the largest logits are computed first.
    shift = tile.raw.new_full((len(tile.raw),), -torch.inf) if tile.on_cpu else tile.largest()
    for block in tile.blocks(out):
        # With the entropy, sums are relative to the largest logit of the block: other errors would not cancel.
        top = block.z.amax(1) if entropy else None
        if tile.on_cpu:
            shift = _raised(shift, block.z, top, None if out is None else out[:, : block.columns.start])
        centre = shift if top is None else top
        centred = torch.sub(block.z, finite(centre)[:, None], out=block.scratch(0) if entropy else block.place())
        e = exp(centred, out=block.place(1) if entropy else centred)
        # Below -128 exp is 0 or almost 0: the clamp only avoids 0 * -inf.
        weighted = block_sums(centred.clamp_min_(-128.0).mul_(e)) if entropy else shift
        parts = with_part(parts, RowState(centre, block_sums(e), weighted, tile.target_logit))
        if out is not None:
            block.write(e.mul_(torch.exp(centre - finite(shift))[:, None]) if entropy else e)
    return merge_rows(parts), shift


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
    known: Statistics,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    dtype: torch.dtype | None = None,
    **head: Unpack[LogitTransform],
) -> Tensor:
    """d loss / d(h.w) [R, C] in `dtype`, written over a tile: it shares the memory, at half width for 16-bit dtypes.

    `targets` outside of [0, C) are in another tile. The statistics are those of whole rows, with the entropy where it
    has a gradient. A row whose upstream gradients are 0 is 0, even if its logits are NaN.
    """
    tile, out = RawTile(logits, targets, **head), in_place(logits, dtype or logits.dtype)
    # [R, 1], computed once for the tile, not for each block.
    log_p, upstream, shift = known.logprobs[:, None], grad_logprobs[:, None], finite(known.shift)[:, None]
    slope, share = tile.logit_scale / tile.temperature[:, None], share_of_others(log_p, known.total[:, None])
    at_target = upstream * -torch.expm1(log_p)
    factor, of_entropy = -upstream * slope * share, None
    none = upstream == 0
    if grad_entropy is not None and known.entropy is not None:
        upstream_entropy, mean = grad_entropy[:, None], known.entropy[:, None]
        # The clamps, here and below, avoid 0 * -inf; beyond them a factor is 0 or almost 0.
        at_target = at_target - upstream_entropy * log_p.exp() * (log_p.clamp_min(-128.0) + mean)
        of_entropy = -upstream_entropy, share.clamp_min(torch.finfo(share.dtype).tiny).log() + mean
        factor, none = slope * share, none & (upstream_entropy == 0)
    at_target = at_target * slope if tile.slope_at_target is None else at_target * slope * tile.slope_at_target[:, None]
    for block in tile.blocks(out):
        centred = torch.sub(block.z, shift, out=block.place() if of_entropy is None else block.scratch(0))
        e = exp(centred, out=centred if of_entropy is None else block.place(1))
        if of_entropy is not None:
            e.mul_(centred.clamp_min_(-128.0).add_(of_entropy[1]).mul_(of_entropy[0]).sub_(upstream))
        block.write(e.mul_(factor))
    tile.put_at_target_(out, at_target[:, 0])
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


def scale_(values: Tensor, factor: Tensor) -> Tensor:
    """Values times a 0-d factor, in place. A factor of 1 is skipped on a CPU; elsewhere the test would synchronize."""
    if factor.device.type == "cpu":
        return values if factor.item() == 1.0 else values.mul_(factor)
    # Of one dimension: a GPU would round one of none to the dtype of the values first.
    return values.mul_(factor.reshape(1))


def grpo_token_loss(
    logprobs: Tensor, *, log_ratio: Tensor | None = None, inputs: Mapping[str, Tensor | None], terms: TokenTerms
) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """(d loss / d log p [N], d loss / d log_ratio [N] if given, sums for `token_statistics`).

    `inputs` are the other [N] arguments of `formulas.token_loss`.
    """
    everything = {"logprobs": logprobs, "log_ratio": log_ratio, **inputs}
    with torch.inference_mode(False), torch.enable_grad():
        # Autograd does not accept tensors of inference mode, but it accepts copies of them.
        ours = {name: x.clone() if x is not None and x.is_inference() else x for name, x in everything.items()}
        names = [name for name in ("logprobs", "log_ratio") if ours[name] is not None]
        leaves = [ours[name].detach() for name in names]  # type: ignore[union-attr]

        def loss_of(*leaves: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return formulas.token_loss(**{**ours, **dict(zip(names, leaves, strict=True))}, terms=terms)  # type: ignore[arg-type]

        if transformed():  # by torch.func, inside of which requires_grad_() is not allowed
            gradients, statistics = torch.func.grad(loss_of, argnums=tuple(range(len(leaves))), has_aux=True)(*leaves)
        else:
            loss, statistics = loss_of(*(x.requires_grad_() for x in leaves))
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return gradients[0], None if log_ratio is None else gradients[1], statistics


def token_statistics(partials: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The statistics of `formulas.token_loss` over the tokens of several calls."""
    return formulas.merge_statistics(partials)
