"""The two ways of `fused_linear_grpo_loss` through the head. U = 2*N*D*V FLOP, one GEMM over the head.

Chunk by chunk, where the loss of a token needs nothing but the token, 3U with a trainable head, 2U with a frozen one:

    logits -> log p, entropy -> loss, g = dL/d log p -> d-logits over the same memory -> dH, dW

In two phases, where it needs its sequence, or a threshold over all tokens: log-probs of every chunk first, then the
loss, then d-logits. The last logits are still there, those of other chunks are made again: 4U less what is left of the
chunk budget, and 3U where everything fits it.

Rows that cannot have a gradient (masked, zero advantage) are sorted out before, rows that turn out to have none
(clipped, left out by a correction) before the d-logits: neither takes part in the GEMMs of dH and dW.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fused_grpo import planner, reference
from fused_grpo._layout import LossInputs, TokenInputs
from fused_grpo.config import GRPOLossConfig
from fused_grpo.head import Head, HeadGradients, Tile
from fused_grpo.loss import LossGradients, value_and_gradient
from fused_grpo.planner import BLOCK_BYTES
from fused_grpo.plans import power_of_two_scale, rows_of

Score = Literal["all", "needed"]


class Done(NamedTuple):
    """What is left of a loss once every gradient is taken."""

    statistics: dict[str, Tensor]
    logprobs: Tensor  # [N], 0 for tokens that were not scored
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None]  # of hidden, weight, bias, for an upstream of 1


class _Rows(NamedTuple):
    """Of the rows of a tile, each [R]."""

    logprobs: Tensor
    entropy: Tensor
    maximum: Tensor
    total: Tensor


def fused_loss(
    head: Head,
    inputs: LossInputs,
    config: GRPOLossConfig,
    passes: ModuleType,
    *,
    chunk_bytes: int | None,
    wanted: dict[str, bool],
    score: Score,
    rounded: bool = True,
) -> Done:
    """Log-probs, loss and the gradients that are wanted of hidden, weight (in fp32 if not `rounded`) and bias."""
    count = len(head.targets)
    head = head.select(_rows_in_order(inputs, config, score, any(wanted.values())))
    gradients = HeadGradients(
        head,
        head.chunk_shape(chunk_bytes),
        hidden=wanted["hidden"],
        weight=wanted["weight"],
        bias=wanted["bias"],
        scale=_scale(head, inputs),
        every_row=False,
        rounded=rounded,
    )
    plan = _in_two_phases if needs_other_tokens(inputs, config) else _chunk_by_chunk
    statistics, logprobs = plan(head, inputs, config, passes, chunk_bytes, gradients if any(wanted.values()) else None)
    return Done(statistics, _everywhere(logprobs, head.index, count), gradients.finish())


def needs_other_tokens(inputs: LossInputs, config: GRPOLossConfig) -> bool:
    """Whether the loss of a token depends on the log-probs or entropies of others."""
    corrected = inputs.tokens.sampling_logprobs is not None and config.sampling_correction is not None
    return bool(
        config.importance_sampling_level == "sequence"
        or config.loss_type == "vespo"
        or config.off_policy_mask_threshold is not None
        or (corrected and str(config.sampling_correction).startswith("sequence"))
        or _needs_all_entropies(inputs, config)
    )


def _needs_all_entropies(inputs: LossInputs, config: GRPOLossConfig) -> bool:
    """Whether a quantile, or the number of tokens above it, has yet to be found."""
    unknown = inputs.entropy_threshold is None or (config.entropy_coef > 0 and inputs.num_entropy_tokens is None)
    return config.top_entropy_quantile < 1.0 and unknown


def _rows_in_order(inputs: LossInputs, config: GRPOLossConfig, score: Score, differentiated: bool) -> Tensor | None:
    """The rows to score, those that may have a gradient first; None for all of them in order."""
    mask, advantages = inputs.tokens.mask, inputs.tokens.advantages
    needed = score == "needed" and not _needs_all_entropies(inputs, config)
    if config.beta or config.entropy_coef or not (needed or differentiated):
        return rows_of(mask)
    moves = mask & (advantages != 0)
    if needs_other_tokens(inputs, config):
        # A sequence's ratio carries the gradient of one of its tokens to all of them.
        moves = mask & (inputs.sequences.spread(inputs.sequences.sum(moves), len(mask)) > 0)
    active = rows_of(moves)
    if needed or active is None:
        return active
    return torch.cat([active, (mask & ~moves).nonzero()[:, 0]])


def _scale(head: Head, inputs: LossInputs) -> Tensor | None:
    """For fp16 d-logits: the ratio of a token is not known yet, and up to 2^10 of it must not overflow."""
    tokens = inputs.tokens
    largest = torch.where(tokens.mask, tokens.weights * (tokens.advantages.abs() + 1), 0.0)
    return power_of_two_scale(head, largest if head.index is None else largest[head.index], exponent=6)


def _chunk_by_chunk(
    head: Head,
    inputs: LossInputs,
    config: GRPOLossConfig,
    passes: ModuleType,
    chunk_bytes: int | None,
    gradients: HeadGradients | None,
) -> tuple[dict[str, Tensor], Tensor]:
    """(statistics, log-probs of the head's rows)."""
    parts, logprobs = [], []
    for tile in head.tiles(head.chunk_shape(chunk_bytes)):
        rows = _statistics(tile, passes)
        here = TokenInputs(**inputs.tokens.rows(tile.rows if tile.index is None else tile.index))
        done = value_and_gradient(rows.logprobs, rows.entropy, replace(inputs, tokens=here), config, passes)
        parts.append(done.statistics)
        logprobs.append(rows.logprobs)
        if gradients is not None:
            _take_gradient(tile, rows, done, passes, head, gradients)
    statistics = reference.merge_statistics(parts)
    return {**statistics, "recomputed": torch.zeros_like(statistics["loss"])}, torch.cat(logprobs)


def _in_two_phases(
    head: Head,
    inputs: LossInputs,
    config: GRPOLossConfig,
    passes: ModuleType,
    chunk_bytes: int | None,
    gradients: HeadGradients | None,
) -> tuple[dict[str, Tensor], Tensor]:
    """(statistics, log-probs of the head's rows)."""
    shape, count, seen = head.chunk_shape(chunk_bytes), len(inputs.tokens.mask), []
    for tile in head.tiles(shape):
        seen.append(_statistics(tile, passes))
    rows = _Rows(*(torch.cat(values) for values in zip(*seen, strict=True)))
    logprobs, entropy = (_everywhere(values, head.index, count) for values in (rows.logprobs, rows.entropy))
    if head.index is not None:
        scored = torch.zeros_like(inputs.tokens.mask).index_fill_(0, head.index, True)
        inputs = replace(inputs, tokens=replace(inputs.tokens, mask=scored))
    done = value_and_gradient(logprobs, entropy, inputs, config, passes)
    if head.index is not None:
        of_rows = (None if x is None else x[head.index] for x in (done.logprobs, done.entropy))
        done = LossGradients(done.statistics, *of_rows)  # type: ignore[arg-type]
    again = torch.zeros((), dtype=head.dtype, device=head.hidden.device)
    if gradients is not None:
        kept = tile.rows
        _take_gradient(tile, _Rows(*(x[kept] for x in rows)), _of(done, kept), passes, head, gradients)
        del tile  # its memory is free for the chunks that come now
        left = (_has_gradient(done) & (torch.arange(len(rows.logprobs), device=again.device) < kept.start)).nonzero()[
            :, 0
        ]
        again = again + len(left)
        once_more = head.select(left)
        for tile in once_more.tiles(shape) if len(left) else ():
            index = left[tile.rows]
            _take_gradient(tile, _Rows(*(x[index] for x in rows)), _of(done, index), passes, head, gradients)
    return {**done.statistics, "recomputed": again}, rows.logprobs


def _statistics(tile: Tile, passes: ModuleType) -> _Rows:
    logprobs, entropy, (maximum, total, *_) = passes.row_statistics(
        tile.logits, tile.targets, **tile.arguments, entropy=True
    )
    return _Rows(logprobs, entropy, maximum, total)


def _of(done: LossGradients, rows: slice | Tensor) -> LossGradients:
    return LossGradients(done.statistics, done.logprobs[rows], None if done.entropy is None else done.entropy[rows])


def _has_gradient(done: LossGradients) -> Tensor:
    return done.logprobs != 0 if done.entropy is None else (done.logprobs != 0) | (done.entropy != 0)


def _take_gradient(
    tile: Tile, rows: _Rows, done: LossGradients, passes: ModuleType, head: Head, gradients: HeadGradients
) -> None:
    """Turn the tile into d-logits, of the rows that have a gradient, and take them into dH, dW, db."""
    order = kept_first_(tile.logits, rows_of(_has_gradient(done)))
    if order is not None:
        rows, done = _Rows(*(x[order] for x in rows)), _of(done, order)
        tile = tile.select(order)
    if not len(rows.logprobs):
        return
    grad_entropy = None if done.entropy is None else gradients.scaled(done.entropy)
    dlogits = passes.logits_gradient_(
        tile.logits,
        tile.targets,
        maximum=rows.maximum,
        total=rows.total,
        logprobs=rows.logprobs,
        entropy=None if grad_entropy is None else rows.entropy,
        grad_logprobs=gradients.scaled(done.logprobs),
        grad_entropy=grad_entropy,
        **tile.arguments,
        dtype=head.gemm_dtype,
    )
    gradients.add(tile, dlogits)


def kept_first_(logits: Tensor, kept: Tensor | None) -> Tensor | None:
    """Move the rows `kept` [K], ascending, to the front of `logits` [R, C]; the row that each came from, [K].

    Only rows that lie behind the front move, each into a place whose own row is not kept. None: all rows stay.
    """
    if kept is None:
        return None
    count = len(kept)
    order = torch.arange(count, device=kept.device)
    is_kept = torch.zeros(len(logits), dtype=torch.bool, device=kept.device).index_fill_(0, kept, True)
    holes, movers = (~is_kept[:count]).nonzero()[:, 0], kept[kept >= count]
    height = max(1, BLOCK_BYTES // max(1, logits[:1].nbytes))
    for some in planner.chunks(len(holes), height):
        logits[holes[some]] = logits[movers[some]]
    return order.index_copy_(0, holes, movers)


def _everywhere(values: Tensor, index: Tensor | None, count: int) -> Tensor:
    """[N] from those of the rows in `index`, 0 elsewhere."""
    return values if index is None else values.new_zeros(count).index_copy_(0, index, values)
