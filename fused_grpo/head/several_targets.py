"""K targets per row, `targets` [N, K]: their log-probs from one pass over the vocabulary, and the gradients.

Only the largest of a row's targets, t, can have more than half of the probability, so only t needs the sums without
itself (`statistics.py`). The row passes compute them for t as for a single target, and

    log p_k = log p_t + (z_k - z_t)

for every k: the logits z_k are read from the tile before a pass overwrites it. A tile knows only its own targets, so
its pass leaves out the largest of these; when the parts of a row are merged, all but the largest of them return to the
sums (`merge_rows`). Nothing is subtracted from a sum.

With g_k = dL/d log p_k, G = sum_k g_k and g_H = dL/dH, the pass over d-logits for t and G gives every other column,

    dL/dz_v = -G p_v - g_H p_v (log p_v + H)

and the columns of targets are overwritten by

    dL/dz_k = g_k (1 - p_k) - (G - g_k) p_k - g_H p_k (log p_k + H)            G - g_t as a sum of the others

since 1 - p_t = -expm1(log p_t) may be far below the rounding of G p_t. A token that is a target several times is one
column, with the sum of its g_k. With a frozen head, d log p_t / dh is known from the forward pass, and

    dL/dh = G d log p_t / dh + sum_k g_k (z_k' w_k - z_t' w_t)                 z' = dz / d(h.w)

needs K rows of W per token, and no logits.

Letters: N rows, of which a tile has R, K targets per row, C columns of a tile. -1 is a target that takes no part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fused_grpo._maths import distributions
from fused_grpo._maths.distributions import LogitTransform
from fused_grpo._maths.moments import TakesMoments
from fused_grpo._maths.statistics import HEADROOM, RowState, Statistics, finite, merge_rows, no_columns
from fused_grpo.head.head import SLICE_BYTES, Head, Tile
from fused_grpo.passes import buffers
from fused_grpo.passes.protocol import RowPasses


def rows_with(flags: Tensor) -> Tensor:
    """The rows [N] in which this holds for a target, from [N] or [N, K]."""
    return flags if flags.ndim == 1 else flags.any(1)


def largest_target(tile: Tile) -> tuple[Tile, Tensor | None]:
    """(the tile with the largest target of each row as its only one, the logits of all relative to it [R, K]).

    The tile has raw logits. Targets of other tiles have a logit of -inf. A tile with one target stays as it is.
    """
    if tile.targets.ndim == 1:
        return tile, None
    column, in_tile, _ = _columns(tile)
    transform: LogitTransform = {**tile.transform, "bias": None}  # which is in `_at`
    z = distributions.transform_logits(_at(tile, column), **transform)
    z = torch.where(in_tile, z, -torch.inf)
    top = z.argmax(1, keepdim=True)
    return replace(tile, targets=tile.targets.gather(1, top)[:, 0]), z - finite(z.gather(1, top))


def row_statistics(tile: Tile, passes: RowPasses, *, entropy: bool, moments: TakesMoments | None = None) -> RowState:
    """The state of a tile's rows; for K targets without the largest of them, and with all their logits [R, K]."""
    if not tile.logits.shape[1]:  # of an empty shard
        return no_columns(tile.targets, tile.logits.dtype)
    tile, below = largest_target(tile)
    state = RowState(
        *passes.row_statistics(tile.logits, tile.targets, entropy=entropy, moments=moments, **tile.transform)
    )
    return state if below is None else state._replace(target_logit=state.target_logit[:, None] + below)


def finish_rows(parts: Sequence[RowState], passes: RowPasses, *, entropy: bool) -> Statistics:
    """The statistics of whole rows from the states of all their columns; the log-probs have the targets' shape."""
    if parts[0].target_logit.ndim == 1:
        return Statistics(*passes.finish_rows(parts, entropy=entropy))
    state = merge_rows(parts)
    top = state.target_logit.amax(1)
    statistics = Statistics(*passes.finish_rows([state._replace(target_logit=top)], entropy=entropy))
    return for_each_target(statistics, state.target_logit - finite(top)[:, None])


def for_each_target(statistics: Statistics, below: Tensor | None) -> Statistics:
    """The statistics of rows, with log-probs [R, K] from those of the largest targets and the logits below theirs."""
    return statistics if below is None else statistics._replace(logprobs=statistics.logprobs[:, None] + below)


def distinct_targets(head: Head, grad_logprobs: Tensor) -> tuple[Head, Tensor]:
    """(the head whose repeated targets are -1, the gradients [N, K] with those of repetitions at the first place)."""
    targets, order = head.targets.sort(dim=1, stable=True)
    gradients, reach = grad_logprobs.gather(1, order), 1
    # Repetitions stand side by side. Each adds the sum of those behind it, twice as far each time, always in one order.
    while reach < targets.shape[1]:
        repeated = (targets[:, reach:] == targets[:, :-reach]) & (targets[:, reach:] >= 0)
        gradients[:, :-reach] += torch.where(repeated, gradients[:, reach:], 0.0)
        reach *= 2
    repeated = torch.zeros_like(targets, dtype=torch.bool)
    repeated[:, 1:] = (targets[:, 1:] == targets[:, :-1]) & (targets[:, 1:] >= 0)
    targets, gradients = targets.masked_fill(repeated, -1), gradients.masked_fill(repeated, 0.0)
    return replace(head, targets=head.targets.scatter(1, order, targets)), gradients.scatter(1, order, gradients)


class KnownTargets(NamedTuple):
    """What the gradient needs of rows with distinct targets, whichever tile it is of."""

    statistics: Statistics  # [R], with the log-prob of the largest target
    largest: Tensor  # [R], that target
    grad_logprobs: Tensor  # [R], the sum over the targets
    grad_entropy: Tensor | None  # [R]
    at_targets: Tensor  # [R, K], dL/dz
    idle: Tensor  # [R, 1], no gradient

    def rows(self, rows: slice) -> KnownTargets:
        """Of some rows."""
        statistics, *others = self
        return KnownTargets(statistics.rows(rows), *(None if x is None else x[rows] for x in others))  # type: ignore[arg-type]


def known_targets(
    targets: Tensor, statistics: Statistics, grad_logprobs: Tensor, grad_entropy: Tensor | None
) -> KnownTargets:
    """What is known of distinct targets [N, K] from the upstream gradients [N, K] and [N]."""
    top, log_p, p = statistics.logprobs.argmax(1, keepdim=True), statistics.logprobs, statistics.logprobs.exp()
    top_statistics = statistics._replace(logprobs=log_p.gather(1, top)[:, 0])
    grad_sum = grad_logprobs.sum(1, keepdim=True)
    # The sum over the others: G - g_t would lose it beside a large g_t.
    others_of_top = grad_logprobs.scatter(1, top, 0.0).sum(1, keepdim=True)
    sums_of_others = (grad_sum - grad_logprobs).scatter_(1, top, others_of_top)
    values, idle = grad_logprobs * -torch.expm1(log_p) - sums_of_others * p, (grad_logprobs == 0).all(1, keepdim=True)
    if grad_entropy is not None and statistics.entropy is not None:
        # The clamp avoids 0 * -inf.
        values -= grad_entropy[:, None] * p * (log_p.clamp_min(-128.0) + statistics.entropy[:, None])
        idle &= (grad_entropy == 0)[:, None]
    largest = targets.gather(1, top)[:, 0]
    return KnownTargets(top_statistics, largest, grad_sum[:, 0], grad_entropy, values, idle)


def logits_gradient_(tile: Tile, passes: RowPasses, rows: KnownTargets, *, dtype: torch.dtype) -> Tensor:
    """The pass `logits_gradient_` for a tile with distinct targets: d loss / d(h.w) [R, C] over its logits."""
    column, in_tile, first = _columns(tile)
    # In rows without a gradient 0, even if their logits are NaN.
    values = (rows.at_targets * _slopes(_at(tile, column), tile.transform)).masked_fill_(rows.idle, 0.0)
    out = passes.logits_gradient_(
        tile.logits,
        rows.largest - tile.columns.start,
        statistics=rows.statistics,
        grad_logprobs=rows.grad_logprobs,
        grad_entropy=rows.grad_entropy,
        dtype=dtype,
        **tile.transform,
    )
    values = values.to(out.dtype)
    values = torch.where(in_tile, values, values.gather(1, first))
    return out.scatter_(1, column, torch.where(in_tile.any(1, keepdim=True), values, out.gather(1, column)))


def moved_(gradient: Tensor, tile: Tile, moved: Tensor) -> Tensor:
    """d loss / d(h.w) [R, C] of a tile with distinct targets, from that of the largest alone, in its place."""
    column, in_tile, first = _columns(tile)
    values = gradient.gather(1, column).add_(torch.where(in_tile, moved * _slopes(None, tile.transform), 0.0))
    return gradient.scatter_(1, column, torch.where(in_tile, values, values.gather(1, first)))


def put_gradients_(weights: Tensor, tile: Tile, values: Tensor, factor: Tensor) -> Tensor:
    """Put d loss / d(h.w) `values` [R, K] at distinct targets into softmax weights of whole rows, in place, over the
    factor [R] that is returned: `factor`, raised where it is far below them.

    Not added to the weights there: of large gradients that almost cancel, these would leave their own rounding.
    """
    column, in_tile, first = _columns(tile)
    at = weights.gather(1, column)
    # A factor far below the values is raised, so that the quotient is finite: by 2^-30 of the largest value over the
    # largest weight, it adds that share to others. A weight is at most e^HEADROOM, or at the target the sum of all.
    largest = values.abs().amax(1)
    size = largest * 2.0**-30 / at.abs().amax(1).clamp_min(math.exp(HEADROOM))
    # Of what is far below any gradient, that share is no number: 0 / 0 would be NaN.
    size = size.clamp_min(torch.finfo(size.dtype).tiny).masked_fill(largest == 0, 0.0)
    factor = torch.copysign(factor.abs().maximum(size), factor)
    quotients = torch.where(factor[:, None] == 0, 0.0, values / factor[:, None])
    at = torch.where(in_tile, quotients.to(at.dtype), at)
    weights.scatter_(1, column, torch.where(in_tile, at, at.gather(1, first)))
    return factor


def target_slopes(tile: Tile) -> Tensor:
    """dz / d(h.w) [R, K] at the targets of a raw tile, [R, 1] without a soft cap."""
    return _slopes(None if tile.transform.get("softcap") is None else _at(tile, _columns(tile)[0]), tile.transform)


def moved_targets(targets: Tensor, largest: Tensor, grad_logprobs: Tensor) -> Tensor:
    """[N, K]: what a gradient of log p_k adds at each target to that of log p_t, for the largest targets t [N].

    Which target is the largest is not decided again: of equal log-probs, the logits may differ.
    """
    is_top = targets == largest[:, None]
    # What repeats the largest target moves nothing: w_t - w_t would leave a rounding far above 1 - p_t.
    moved = torch.where(is_top, 0.0, grad_logprobs)
    return moved.scatter_(1, is_top.int().argmax(1, keepdim=True), -moved.sum(1, keepdim=True))


def hidden_gradient(head: Head, d_top: Tensor, largest: Tensor, grad_logprobs: Tensor) -> Tensor:
    """dL/dh [N, D] under a frozen head from d log p_t / dh [N, D] of the largest targets t [N]."""
    moved = moved_targets(head.targets, largest, grad_logprobs)
    gradient = d_top * grad_logprobs.sum(1, keepdim=True)
    # In cache on a CPU; on a GPU in few launches, and with its temporaries within the default budget of a tile.
    budget = SLICE_BYTES if gradient.device.type == "cpu" else buffers.DEFAULT_TILE_BYTES // 4
    for rows in buffers.chunks(len(gradient), max(1, budget // (gradient[:1].nbytes or 1))):
        transform, x = head.transform(rows), None
        for k, token in enumerate(head.targets[rows].clamp_min(0).t()):
            w = head.weight[token].to(head.hidden.dtype).to(head.dtype)
            if head.softcap is not None:
                x = (head.hidden[rows].to(head.dtype) * w).sum(1, keepdim=True)
                x = x if head.bias is None else x + head.bias[token, None]
            gradient[rows].addcmul_(moved[rows, k, None] * _slopes(x, transform), w)
    return gradient.masked_fill_((grad_logprobs == 0).all(1, keepdim=True), 0.0)


def _columns(tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
    """(columns [R, K] that can be read and written, whether each target is in this tile, the first that is [R, 1]).

    A target of another tile has the column of the first target in this one, so that no column is written with two
    values; without any it has some column.
    """
    last = tile.logits.shape[1] - 1
    in_tile = (tile.targets >= 0) & (tile.targets <= last)
    first = in_tile.int().argmax(1, keepdim=True)
    return torch.where(in_tile, tile.targets, tile.targets.gather(1, first).clamp(0, last)), in_tile, first


def _at(tile: Tile, column: Tensor) -> Tensor:
    """h.w + b [R, K] at columns of a raw tile."""
    raw, bias = tile.logits.gather(1, column), tile.transform.get("bias")
    return raw if bias is None else raw + bias[column]


def _slopes(x: Tensor | None, transform: LogitTransform) -> Tensor:
    """dz / d(h.w) [R, K] for x = h.w + b [R, K]; [R, 1] without a soft cap, which alone needs x."""
    scale, softcap = transform.get("logit_scale", 1.0), transform.get("softcap")
    slope = scale / transform["temperature"][:, None]
    return slope if softcap is None or x is None else slope * distributions.cap_slope(x * (scale / softcap))
