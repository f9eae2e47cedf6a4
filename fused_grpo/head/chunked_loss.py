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

The loop above is `_by_weights`, for gradients that are multiples of softmax weights; the other kinds of rows are those
of `visited_rows.py`.

The derivatives of the loss in the log-probs have a closed form (`formulas.py`), so one pass over the tokens gives the
loss, its metrics and d loss / d log p. The backward pass (`AttachGradients`) only scales the gradients by the upstream
one. `grpo_loss` takes the same two steps from log-probs that are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fused_grpo._maths import factors, formulas
from fused_grpo._maths.formulas import LossInputs
from fused_grpo._maths.moments import RowsMoments
from fused_grpo._maths.statistics import Statistics, Upstream, joined, picked
from fused_grpo.config import GRPOLossConfig
from fused_grpo.head.checks import differentiated_once, leaves_out_rows, may_synchronize
from fused_grpo.head.chunked_divergence import Teacher
from fused_grpo.head.head import Gradients, Head, HeadGradients, Wanted, softmax_weights_of
from fused_grpo.head.logprob_plans import power_of_two_scale
from fused_grpo.head.visited_rows import Beside, KnownRows, Seen, Sweep, visitor_of
from fused_grpo.passes import torch_passes
from fused_grpo.passes.protocol import RowPasses, SoftmaxWeightsForward

Score = Literal["all", "needed"]


class LossPlan(NamedTuple):
    """How a loss is computed, and what of it."""

    chunk_bytes: int | None
    wanted: Wanted
    score: Score
    entropy: bool = True
    rounded: bool = True  # else the gradient of the weight is fp32
    squares: bool = False  # sum p^2 of each row, too


ALONE = Beside()


class ChunkedLoss(NamedTuple):
    """The results of a loss whose gradients have been taken."""

    statistics: dict[str, Tensor]
    logprobs: Tensor  # [N], 0 for tokens that were not scored, like the three below
    entropy: Tensor | None  # None where it was not requested
    upstream: Upstream  # d loss / d log-probs and d loss / d entropies
    gradients: Gradients  # for an upstream gradient of 1
    squares: Tensor | None = None  # [N] sum p^2, where they are wanted


@torch.no_grad()
def chunked_loss(
    head: Head,
    inputs: LossInputs,
    config: GRPOLossConfig,
    passes: RowPasses,
    plan: LossPlan,
    beside: Beside = ALONE,
) -> ChunkedLoss:
    """Log-probs, loss and the gradients that are wanted of hidden, weight and bias.

    With shards, weight and bias are those of this rank, and the targets of `head` are relative to it. With a
    teacher, every unmasked row has a gradient. With centering, the targets of `head` are those of its rows and H.
    """
    shards, teacher, centering = beside
    in_phases = formulas.needs_other_tokens(inputs, config)
    mask, rows, index, active = inputs.tokens.mask, head, None, len(head.targets)
    if leaves_out_rows(mask) or ((teacher is not None or plan.score == "needed") and may_synchronize(mask)):
        # A rank that wants no gradient visits the same rows in the same order as the other ranks. Beside a teacher
        # rows stay where they are, since all have a gradient.
        active_first = (any(plan.wanted) or shards is not None) and teacher is None
        inputs, index, active = rows_to_score(inputs, config, plan.score, active_first=active_first)
        rows = head if index is None else head.select(index)
    else:
        rows, teacher = head.blank(mask), None if teacher is None else teacher.blank()
    # The gradient of an entropy is no multiple of softmax weights.
    weighted = any(plan.wanted) and rows.gemm_on_softmax and not (teacher or shards or in_phases or config.entropy_coef)
    kernel = None
    if weighted and not plan.squares and passes.softmax_weights_forward is not None:
        kernel = rows.softmax_weights_kernel(passes, plan.chunk_bytes, plan.wanted)
    if teacher is None:
        dtype, vocab_size = rows.gemm_dtype if kernel else rows.dtype, 0 if shards is None else max(shards.sizes)
        memory = rows.chunk_memory(passes, plan.chunk_bytes, plan.wanted, dtype, vocab_size)
    else:
        memory, teacher = teacher.with_memory(rows, index, plan.chunk_bytes)
    one_group = len(memory) >= len(rows.targets)
    gradients = HeadGradients(
        rows,
        plan.wanted,
        one_group=one_group,
        every_row=one_group or not in_phases,
        scale=None if rows.gemm_on_softmax else _scale(rows, inputs, teacher),
        hidden_dtype=None if shards is None else head.dtype,
        rounded=plan.rounded,
    )
    moments = RowsMoments(len(head.weight)) if plan.squares else None
    sweep = Sweep(passes, gradients if any(plan.wanted) else None, plan.entropy, active, moments)
    if weighted and centering is None:
        statistics, seen, upstream = _by_weights(rows, memory, inputs, config, sweep, kernel)
    else:
        loop, beside = _in_two_phases if in_phases else _one_by_one, beside._replace(teacher=teacher)
        visitor = visitor_of(sweep, beside, weighted=weighted, two_phases=in_phases)
        statistics, seen, upstream = loop(rows, memory, inputs, config, visitor)
        del visitor
    statistics.setdefault("recomputed_fraction", torch.zeros_like(statistics["loss"]))
    squares = None
    if moments is not None:
        squares = moments.finish(seen if centering is None else centering.largest_statistics(index, seen))[0]
    logprobs, entropy, (d_logprobs, d_entropy) = seen.logprobs, seen.entropy, upstream
    if index is not None:
        logprobs, entropy, d_logprobs, d_entropy, squares = (
            _scattered(values, index, len(head.targets))
            for values in (logprobs, entropy, d_logprobs, d_entropy, squares)
        )
        upstream = Upstream(d_logprobs, d_entropy)
    part = teacher if centering is None else centering
    if part is not None:
        statistics = part.added_to(statistics, inputs.tokens.mask > upstream.have_gradient())
    # Before dW is rounded beside its accumulator.
    del memory, beside, part, teacher, sweep
    d_hidden, d_weight, d_bias = gradients.finish()
    if shards is not None and d_hidden is not None:
        d_hidden = shards.sum_over_ranks(d_hidden).to(head.hidden.dtype)
    return ChunkedLoss(statistics, logprobs, entropy, upstream, (d_hidden, d_weight, d_bias), squares)


def _by_weights(
    head: Head,
    memory: Tensor,
    inputs: LossInputs,
    config: GRPOLossConfig,
    sweep: Sweep,
    kernel: SoftmaxWeightsForward | None,
) -> tuple[dict[str, Tensor], Statistics, Upstream]:
    """(statistics of the loss, of the rows, d loss / d of the rows), where gradients are multiples of softmax weights.

    Each chunk is visited once.
    """
    passes, gradients, entropy, active, moments = sweep
    assert gradients is not None
    visits = []
    tokens = inputs.tokens if head.index is None else inputs.tokens.rows(head.index)
    for tile in head.tiles(memory, multiply=kernel is None):
        weights, scale, rows = softmax_weights_of(
            tile, passes, kernel, entropy=entropy, moments=moments, dtype=tile.hidden.dtype
        )
        given = {**vars(tokens.rows(tile.rows)), "entropy": rows.entropy}
        gradient, _, sums = passes.grpo_token_loss(rows.logprobs, inputs=given, terms=config.token_terms)
        if (count := active - tile.rows.start) > 0:
            active_rows, first = slice(count), tile if count >= len(scale) else tile.first(count)
            gradients.add_softmax_weights(
                first, passes, picked(weights, active_rows), picked(scale, active_rows), picked(gradient, active_rows)
            )
        visits.append((rows, Upstream(gradient, None), sums))
    row_statistics, upstreams, parts = zip(*visits, strict=True)
    statistics = passes.token_statistics(parts)
    if len(visits) == 1:
        return statistics, row_statistics[0], upstreams[0]
    return statistics, joined(row_statistics), joined(upstreams)


def _one_by_one(
    head: Head, memory: Tensor, inputs: LossInputs, config: GRPOLossConfig, visitor: KnownRows
) -> tuple[dict[str, Tensor], Statistics, Upstream]:
    """The same for rows of any kind, where each chunk is visited once."""
    passes, gradients, _, active, _ = visitor.sweep
    visits = []
    tokens = inputs.tokens if head.index is None else inputs.tokens.rows(head.index)
    for tile in head.tiles(memory):
        seen = visitor.visit_(tile)
        inputs = replace(inputs, tokens=tokens.rows(tile.rows))
        upstream, sums = _value_and_gradient(seen.statistics.logprobs, seen.statistics.entropy, inputs, config, passes)
        if gradients is not None and (count := active - tile.rows.start) > 0:
            visitor.add(tile.first(count), seen, upstream, gradients)
        visits.append((seen.statistics, upstream, sums))
    row_statistics, upstreams, parts = zip(*visits, strict=True)
    upstream = joined(upstreams)
    return _statistics_of(parts, upstream, tokens.mask, config, passes), joined(row_statistics), upstream


def _in_two_phases(
    head: Head, memory: Tensor, inputs: LossInputs, config: GRPOLossConfig, visitor: KnownRows
) -> tuple[dict[str, Tensor], Statistics, Upstream]:
    """The same where the loss of a token depends on others: all chunks, the loss, then chunks with a gradient again."""
    index, count, row_statistics = head.index, len(inputs.tokens.mask), []
    for tile in head.tiles(memory):
        row_statistics.append(visitor.visit_(tile).statistics)
    rows = joined(row_statistics)
    logprobs, entropy = rows.logprobs, rows.entropy
    if index is not None:
        logprobs, entropy = (_scattered(values, index, count) for values in (logprobs, entropy))
    upstream, statistics = loss_and_gradient(logprobs, entropy, inputs, config, visitor.sweep.passes)
    visitor.all_seen(logprobs, entropy, inputs, config)
    upstream, recomputed = upstream if index is None else upstream.rows(index), 0
    if (gradients := visitor.sweep.gradients) is not None:
        last = tile.rows
        visitor.add(tile, Seen(rows.rows(last)), upstream.rows(last), gradients)
        revisited = visitor.to_revisit(head, upstream)[: last.start].nonzero()[:, 0]
        recomputed = len(revisited)
        for tile in head.select(revisited).tiles(memory) if recomputed else ():
            tile_index = revisited[tile.rows]
            visitor.add(tile, Seen(rows.rows(tile_index)), upstream.rows(tile_index), gradients)
    fraction = formulas.over_tokens(torch.full_like(statistics["loss"], recomputed), statistics)
    return {**statistics, "recomputed_fraction": fraction}, rows, upstream


def rows_to_score(
    inputs: LossInputs, config: GRPOLossConfig, score: Score, *, active_first: bool
) -> tuple[LossInputs, Tensor | None, int]:
    """(the inputs, whose mask has the rows to score; these rows [R], None for all of them in order; how many of the
    first of them may have a gradient). With `active_first` rows that cannot have one come after those that may.

    On a GPU this synchronizes for two numbers, once per call; only losses in two phases synchronize again. Not to be
    called where `may_synchronize` is False.
    """
    mask, advantages, moves = inputs.tokens.mask, inputs.tokens.advantages, inputs.tokens.mask
    # A selection, the entropy quantile or the number of tokens above it may have to be computed from all tokens.
    selects = config.selects_by_covariance and inputs.covariance_selected is None
    unknown = inputs.entropy_threshold is None or (config.entropy_coef > 0 and inputs.num_entropy_tokens is None)
    needed = score == "needed" and not (selects or (config.top_entropy_quantile < 1.0 and unknown))
    all_token_terms = (config.beta, config.entropy_coef, config.kl_cov_ratio, config.log_ratio_penalty)
    if (needed or active_first) and not any(all_token_terms):
        moves = mask & (advantages != 0)
        if formulas.needs_other_tokens(inputs, config):
            # Through the ratio of a sequence, the gradient of one token reaches all its tokens.
            moves = mask & (inputs.sequences.spread(inputs.sequences.sum(moves), len(mask)) > 0)
    active, scored = torch.stack([moves, mask]).sum(1).tolist()
    if active == len(mask):
        return inputs, None, active
    # Stable: rows stay in order within those that may have a gradient, and within the others.
    order = (2 - mask.to(torch.int8) - moves.to(torch.int8)).argsort(stable=True)
    if needed:
        inputs = replace(inputs, tokens=replace(inputs.tokens, mask=moves))
    return inputs, order[: active if needed else scored], active


def _scattered(values: Any, index: Tensor, count: int) -> Any:
    """[N] with the values of the rows in `index`, 0 elsewhere; None where there are none."""
    return None if values is None else values.new_zeros(count).index_copy_(0, index, values)


def _scale(head: Head, inputs: LossInputs, teacher: Teacher | None) -> Tensor | None:
    """The scale of fp16 d-logits. Ratios are not known yet: those up to 2^10 must not overflow."""
    tokens = inputs.tokens
    largest = torch.where(tokens.mask, tokens.weights * (tokens.advantages.abs() + 1), 0.0)
    largest = largest if teacher is None else largest + teacher.weights
    return power_of_two_scale(head, largest if head.index is None else largest[head.index], exponent=6)


def loss_and_gradient(
    logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs, config: GRPOLossConfig, passes: RowPasses
) -> tuple[Upstream, dict[str, Tensor]]:
    """(the gradients, the loss and its metrics) from the log-probs [N] and entropies [N] of all tokens."""
    upstream, sums = _value_and_gradient(logprobs, entropy, inputs, config, passes)
    return upstream, _statistics_of([sums], upstream, inputs.tokens.mask, config, passes)


def _value_and_gradient(
    logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs, config: GRPOLossConfig, passes: RowPasses
) -> tuple[Upstream, Any]:
    """The gradients, and sums for `_statistics_of`, of some tokens."""
    with torch.no_grad():
        logprobs, entropy = logprobs.detach(), None if entropy is None else entropy.detach()
        token_factors: dict[str, Tensor | None] = {}
        if config.entropy_coef or formulas.needs_other_tokens(inputs, config):
            token_factors = factors.token_factors(logprobs, entropy, inputs, config)
        gradient, ratio_gradient, sums = passes.grpo_token_loss(
            logprobs,
            log_ratio=factors.sequence_log_ratio(logprobs, inputs, config) if config.ratio_of_sequence else None,
            inputs={**vars(inputs.tokens), **token_factors, "entropy": entropy},
            terms=config.token_terms,
        )
        if ratio_gradient is not None:
            gradient = gradient + factors.share_of_ratio(logprobs, ratio_gradient, inputs, config)
        weights = token_factors.get("entropy_weights")
        return Upstream(gradient, None if weights is None else -torch.where(inputs.tokens.mask, weights, 0.0)), sums


def _statistics_of(
    sums: Sequence[Any], upstream: Upstream, mask: Tensor, config: GRPOLossConfig, passes: RowPasses
) -> dict[str, Tensor]:
    """The loss and the metrics of all tokens. `passes` know of the part of the gradient that is a token's own."""
    statistics = passes.token_statistics(sums)
    if config.ratio_of_sequence or upstream.entropy is not None:
        zero = (mask > upstream.have_gradient()).sum()
        statistics["zero_gradient_fraction"] = formulas.over_tokens(zero.to(upstream.logprobs.dtype), statistics)
    return statistics


class AttachGradients(torch.autograd.Function):
    """A loss whose gradients in `leaves` are known: the backward pass multiplies them by the upstream gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: Tensor,
        gradients: Sequence[Tensor | None],
        weight_main_grad: Tensor | None,
        passes: RowPasses,
        *leaves: Tensor | None,
    ) -> Tensor:
        ctx.gradients, ctx.weight_main_grad, ctx.passes = list(gradients), weight_main_grad, passes
        return loss.clone()

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "Trying to backward through the loss a second time; its gradients were handed over the first time; "
                "fix: retain_graph=True on the first backward pass"
            )
        gradients = ctx.gradients.copy()
        if ctx.weight_main_grad is not None and gradients[1] is not None:
            weight_node, _ = ctx.next_functions[3]  # behind the loss, the main gradient and the hidden states
            if _is_asked_for(weight_node):
                ctx.weight_main_grad.addcmul_(gradients[1], upstream.to(gradients[1].dtype))
            gradients[1] = None
        kept = torch._C._autograd._get_current_graph_task_keep_graph()
        ctx.gradients = ctx.gradients if kept else None
        return None, None, None, None, *scaled(gradients, upstream, ctx.passes, in_place=not kept)


def _is_asked_for(node: Any) -> bool:
    """Whether this backward pass reaches a node: `inputs=` and `torch.autograd.grad` leave others out."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # what `torch.autograd.grad` asks for, where it is a leaf
        return True


def scaled(
    gradients: Sequence[Tensor | None], factor: Tensor, passes: RowPasses, *, in_place: bool
) -> list[Tensor | None]:
    """Gradients times a 0-d factor. In place, autograd can take them as `.grad` without a copy."""
    results = [gradient if gradient is None or in_place else gradient.clone() for gradient in gradients]
    given = [gradient for gradient in results if gradient is not None]
    for gradient in (gradient for gradient in given if not gradient.is_contiguous()):
        torch_passes.scale_(gradient, factor)
    dense = [gradient for gradient in given if gradient.is_contiguous()]
    for pair in zip_longest(dense[::2], dense[1::2]):
        passes.scale_(pair[0], factor, pair[1])
    return results
