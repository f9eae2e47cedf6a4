"""`fused_linear_grpo_loss` through the head, a chunk of logits at a time. U = 2*N*D*V FLOP, one GEMM over the head.

Where the loss of a token depends on that token alone, each chunk is visited once: 3U with a trainable head, 2U with a
frozen one. In short:

    for rows of hidden:
        weights, scale, statistics = softmax_weights(rows @ weight.T, targets)    # d log p / d logits = scale * weights
        upstream = token_loss(statistics).gradient                                # d loss / d log p
        factor = upstream * scale
        d_hidden[rows] = factor * (weights @ weight)
        d_weight += weights.T @ (factor * rows)

Where it depends on the whole sequence, or on a threshold over all tokens, there are two phases: first the statistics of
every chunk, then the loss, then the gradients. The logits of the last chunk are still in memory, those of the other
chunks are recomputed: 4U, or 3U where all rows fit in one chunk.

With a sharded head, each rank computes the logits of its own columns. Chunks have the same rows on all ranks, and their
statistics are merged over the group before the loss, once per chunk. From then on all ranks have the same statistics,
bit for bit, and take the same decisions. The parts of dH are summed over the ranks once, at the end, in fp32: one large
message, and no rank needs to know whether another rank found rows with a gradient in a chunk.

Rows that cannot have a gradient (masked, zero advantage) are removed beforehand and take no part in the GEMMs of dH and
dW. Rows whose gradient turns out to be 0 (clipped) take part with a factor of 0: to remove them, a GPU would have to
synchronize for their number, and a CPU would have to move rows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fused_grpo._maths import formulas
from fused_grpo._maths.inputs import LossInputs
from fused_grpo._maths.statistics import Statistics, Upstream
from fused_grpo.config import GRPOLossConfig
from fused_grpo.head.chunked_divergence import Teacher, TwoHeads
from fused_grpo.head.gradients import Gradients, HeadGradients, Wanted
from fused_grpo.head.head import Head
from fused_grpo.head.logprob_plans import may_synchronize, power_of_two_scale
from fused_grpo.head.loss_gradients import statistics_of, value_and_gradient
from fused_grpo.head.sharded import Shards
from fused_grpo.head.visits import KnownRows, RevisitedRows, Seen, ShardedRows, TaughtRows, Visitor, WeightedRows
from fused_grpo.passes.protocol import RowPasses

Score = Literal["all", "needed"]


class LossPlan(NamedTuple):
    """How a loss is computed, and what of it."""

    chunk_bytes: int | None
    wanted: Wanted
    score: Score
    entropy: bool = True
    rounded: bool = True  # else the gradient of the weight is fp32


class ChunkedLoss(NamedTuple):
    """The results of a loss whose gradients have been taken."""

    statistics: dict[str, Tensor]
    logprobs: Tensor  # [N], 0 for tokens that were not scored, like the three below
    entropy: Tensor | None  # None where it was not requested
    upstream: Upstream  # d loss / d log-probs and d loss / d entropies
    gradients: Gradients  # for an upstream gradient of 1


def chunked_loss(
    head: Head,
    inputs: LossInputs,
    config: GRPOLossConfig,
    passes: RowPasses,
    plan: LossPlan,
    *,
    shards: Shards | None = None,
    teacher: Teacher | None = None,
) -> ChunkedLoss:
    """Log-probs, loss and the gradients that are wanted of hidden, weight and bias.

    With `shards`, weight and bias are those of this rank, and the targets of `head` are relative to it. With a
    `teacher`, every unmasked row has a gradient.
    """
    wanted, entropy = plan.wanted, plan.entropy
    # A rank that wants no gradient visits the same rows in the same order as the other ranks. Beside a teacher rows
    # stay where they are, since all have a gradient.
    removes_rows = (any(wanted) or shards is not None) and teacher is None
    order, active = rows_in_order(inputs, config, plan.score, removes_rows)
    rows, count, two_phases = head.select(order), len(head.targets), formulas.needs_other_tokens(inputs, config)
    if teacher is None:
        memory = rows.chunk_memory(passes, plan.chunk_bytes, vocab_size=None if shards is None else max(shards.sizes))
    else:
        memory, of_teacher = TwoHeads(rows, teacher.head.select(order)).chunk_memory(passes, plan.chunk_bytes)
        teacher = replace(teacher, memory=of_teacher)
        del of_teacher
    one_group = len(memory) >= len(rows.targets)
    gradients = HeadGradients(
        rows,
        wanted,
        one_group=one_group,
        every_row=one_group or not two_phases,
        scale=_scale(rows, inputs, teacher),
        hidden_dtype=None if shards is None else head.dtype,
        rounded=plan.rounded,
    )
    added = gradients if any(wanted) else None
    if two_phases:
        again = _revisitor(passes, added, entropy, shards, teacher)
        statistics, seen, upstream = _in_two_phases(rows, memory, inputs, config, passes, again)
        del again
    else:
        once = _visitor(rows, passes, added, entropy, shards, teacher, active, config)
        statistics, seen, upstream = _one_by_one(rows, memory, inputs, config, passes, once)
        del once
    statistics = statistics if teacher is None else teacher.added_to(statistics)
    del memory, teacher  # before dW is rounded beside its accumulator
    d_hidden, d_weight, d_bias = gradients.finish()
    if shards is not None and d_hidden is not None:
        d_hidden = shards.sum_over_ranks(d_hidden).to(head.hidden.dtype)
    return ChunkedLoss(
        statistics,
        _scattered(seen.logprobs, order, count),
        None if seen.entropy is None else _scattered(seen.entropy, order, count),
        Upstream(*(None if g is None else _scattered(g, order, count) for g in upstream)),  # type: ignore[arg-type]
        (d_hidden, d_weight, d_bias),
    )


def _visitor(
    head: Head,
    passes: RowPasses,
    gradients: HeadGradients | None,
    entropy: bool,
    shards: Shards | None,
    teacher: Teacher | None,
    active: int,
    config: GRPOLossConfig,
) -> Visitor:
    """Of rows that are visited once."""
    if teacher is not None:
        return TaughtRows(teacher, gradients, entropy)
    if shards is not None:
        return ShardedRows(passes, gradients, entropy, active, shards)
    # The gradient of an entropy is no multiple of softmax weights.
    if gradients is not None and head.takes_weights and not config.entropy_coef:
        return WeightedRows(passes, gradients, entropy, active, head.gemm_dtype)
    return KnownRows(passes, gradients, entropy, active)


def _revisitor(
    passes: RowPasses, gradients: HeadGradients | None, entropy: bool, shards: Shards | None, teacher: Teacher | None
) -> KnownRows:
    """Of rows that are visited again: by then, which of them have a gradient is known."""
    if teacher is not None:
        return RevisitedRows(passes, gradients, entropy, sys.maxsize, teacher)
    if shards is not None:
        return ShardedRows(passes, gradients, entropy, sys.maxsize, shards)
    return KnownRows(passes, gradients, entropy, sys.maxsize)


def _one_by_one(
    head: Head, memory: Tensor, inputs: LossInputs, config: GRPOLossConfig, passes: RowPasses, visitor: Visitor
) -> tuple[dict[str, Tensor], Statistics, Upstream]:
    """(statistics of the loss, of the rows, d loss / d of the rows): each chunk is visited once."""
    tokens, visits, gradients, sums = inputs.tokens.of(head.index), [], [], []
    for tile in head.tiles(memory):
        seen = visitor.visit_(tile)
        inputs = replace(inputs, tokens=tokens.of(tile.rows))
        upstream, part = value_and_gradient(*seen.known, inputs, config=config, passes=passes)
        visitor.add(tile, seen, upstream)
        visits.append(seen.statistics)
        gradients.append(upstream)
        sums.append(part)
    upstream = Upstream(*(_joined(values) for values in zip(*gradients, strict=True)))  # type: ignore[arg-type]
    statistics = statistics_of(sums, upstream, tokens.mask, passes)
    return {**statistics, "recomputed": torch.zeros_like(statistics["loss"])}, Statistics.joined(visits), upstream


def _in_two_phases(
    head: Head,
    memory: Tensor,
    inputs: LossInputs,
    config: GRPOLossConfig,
    passes: RowPasses,
    visitor: KnownRows,
) -> tuple[dict[str, Tensor], Statistics, Upstream]:
    """The same where the loss of a token depends on others: all chunks, the loss, then chunks with a gradient again."""
    index, count, visits = head.index, len(inputs.tokens.mask), []
    for tile in head.tiles(memory):
        visits.append(visitor.visit_(tile).statistics)
    rows = Statistics.joined(visits)
    if index is not None:
        scored = torch.zeros_like(inputs.tokens.mask).index_fill_(0, index, True)
        inputs = replace(inputs, tokens=replace(inputs.tokens, mask=scored))
    logprobs = _scattered(rows.logprobs, index, count)
    entropy = None if rows.entropy is None else _scattered(rows.entropy, index, count)
    upstream, sums = value_and_gradient(logprobs, entropy, inputs, config=config, passes=passes)
    statistics = statistics_of([sums], upstream, inputs.tokens.mask, passes)
    upstream, recomputed = upstream if index is None else upstream.rows(index), 0
    if visitor.gradients is not None:
        last = tile.rows
        visitor.add(tile, Seen(rows.rows(last)), upstream.rows(last))
        others = visitor.to_revisit(upstream)[: last.start].nonzero()[:, 0]
        recomputed = len(others)
        for tile in head.select(others).tiles(memory) if recomputed else ():
            again = others[tile.rows]
            visitor.add(tile, Seen(rows.rows(again)), upstream.rows(again))
    return {**statistics, "recomputed": torch.full_like(statistics["loss"], recomputed)}, rows, upstream


def _needs_all_tokens(inputs: LossInputs, config: GRPOLossConfig) -> bool:
    """Whether the entropy quantile, the number of tokens above it, or a selection must be computed from all tokens."""
    if config.selects_by_covariance and inputs.covariance_selected is None:
        return True
    unknown = inputs.entropy_threshold is None or (config.entropy_coef > 0 and inputs.num_entropy_tokens is None)
    return config.top_entropy_quantile < 1.0 and unknown


def rows_in_order(
    inputs: LossInputs, config: GRPOLossConfig, score: Score, differentiated: bool
) -> tuple[Tensor | None, int]:
    """The rows to score, None for all of them in order, and how many of the first ones may have a gradient.

    On a GPU this synchronizes for two numbers, once per call; only losses in two phases synchronize again. A CUDA graph
    under capture cannot synchronize, so all rows are taken.
    """
    mask, advantages = inputs.tokens.mask, inputs.tokens.advantages
    if not may_synchronize(mask):
        return None, len(mask)
    needed = score == "needed" and not _needs_all_tokens(inputs, config)
    moves = mask
    if (needed or differentiated) and not (config.beta or config.entropy_coef or config.kl_cov_ratio):
        moves = mask & (advantages != 0)
        if formulas.needs_other_tokens(inputs, config):
            # Through the ratio of a sequence, the gradient of one token reaches all its tokens.
            moves = mask & (inputs.sequences.spread(inputs.sequences.sum(moves), len(mask)) > 0)
    active, scored = torch.stack([moves, mask]).sum(1).tolist()
    if active == len(mask):
        return None, active
    # Stable: rows stay in order within those that may have a gradient, and within the others.
    order = (2 - mask.to(torch.int8) - moves.to(torch.int8)).argsort(stable=True)
    return order[: active if needed else scored], active


def _scale(head: Head, inputs: LossInputs, teacher: Teacher | None) -> Tensor | None:
    """The scale of fp16 d-logits. Ratios are not known yet: those up to 2^10 must not overflow."""
    if head.takes_weights:  # what follows would be launches for nothing
        return None
    tokens = inputs.tokens
    largest = torch.where(tokens.mask, tokens.weights * (tokens.advantages.abs() + 1), 0.0)
    largest = largest if teacher is None else largest + teacher.weights
    return power_of_two_scale(head, largest if head.index is None else largest[head.index], exponent=6)


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """One [N] from the parts of consecutive tiles; None where the parts are None."""
    return parts[0] if len(parts) == 1 or parts[0] is None else torch.cat(parts)  # type: ignore[arg-type]


def _scattered(values: Tensor, index: Tensor | None, count: int) -> Tensor:
    """[N] with the values of the rows in `index`, 0 elsewhere."""
    return values if index is None else values.new_zeros(count).index_copy_(0, index, values)
