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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fused_grpo import reference
from fused_grpo._loss_inputs import LossInputs
from fused_grpo.chunked_divergence import Teacher, TwoHeads
from fused_grpo.config import GRPOLossConfig
from fused_grpo.head import Head, Tile
from fused_grpo.head_gradients import HeadGradients
from fused_grpo.logprob_plans import may_synchronize, power_of_two_scale
from fused_grpo.loss_gradients import LossGradients, statistics_of, value_and_gradient
from fused_grpo.shards import Shards
from fused_grpo.statistics import RowState, Statistics, no_columns

Score = Literal["all", "needed"]


class ChunkedLoss(NamedTuple):
    """The results of a loss whose gradients have been taken."""

    statistics: dict[str, Tensor]
    logprobs: Tensor  # [N], 0 for tokens that were not scored, like the three below
    entropy: Tensor | None  # None where it was not requested
    upstream: tuple[Tensor, Tensor | None]  # d loss / d log-probs and d loss / d entropies
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None]  # of hidden, weight, bias, for an upstream of 1


def chunked_loss(
    head: Head,
    inputs: LossInputs,
    config: GRPOLossConfig,
    passes: ModuleType,
    *,
    chunk_bytes: int | None,
    wanted: dict[str, bool],
    score: Score,
    entropy: bool = True,
    rounded: bool = True,
    shards: Shards | None = None,
    teacher: Teacher | None = None,
) -> ChunkedLoss:
    """Log-probs, loss and the gradients that are wanted of hidden, weight (in fp32 if not `rounded`) and bias.

    With `shards`, weight and bias are those of this rank, and the targets of `head` are relative to it. With a
    `teacher`, every unmasked row has a gradient.
    """
    differentiated = any(wanted.values())
    # A rank that wants no gradient visits the same rows in the same order as the other ranks. Beside a teacher the rows
    # that move stay where they are, since all rows have a gradient.
    moves_alone = (differentiated or shards is not None) and teacher is None
    order, active = rows_in_order(inputs, config, score, moves_alone)
    rows = head.select(order)
    if teacher is None:
        visitor = None
        memory = rows.chunk_memory(passes, chunk_bytes, vocab_size=None if shards is None else max(shards.sizes))
    else:
        memory, visited = TwoHeads(rows, teacher.head.select(order)).chunk_memory(passes, chunk_bytes)
        visitor = replace(teacher, memory=visited)
        del visited
    two_phases = reference.needs_other_tokens(inputs, config)
    how: dict[str, Any] = {**wanted, "scale": _scale(rows, inputs, teacher), "rounded": rounded}
    one_group = len(memory) >= len(rows.targets)
    how |= {"every_row": one_group or not two_phases, "one_group": one_group}
    gradients = HeadGradients(rows, **how, hidden_dtype=None if shards is None else head.dtype)
    taken = gradients if differentiated else None
    chunks = _Chunks(rows, memory, inputs, config, passes, taken, active, entropy, shards, visitor)
    go = chunks.in_two_phases if two_phases else chunks.one_by_one
    statistics, seen, upstream = go()
    del chunks, go, memory, visitor  # before dW is rounded beside its accumulator
    logprobs, entropies, *upstream_gradients = (
        None if values is None else _scattered(values, order, len(head.targets))
        for values in (seen.logprobs, seen.entropy, upstream.logprobs, upstream.entropy)
    )
    statistics = statistics if teacher is None else teacher.added_to(statistics)
    d_hidden, d_weight, d_bias = gradients.finish()
    if shards is not None and d_hidden is not None:
        d_hidden = shards.sum_over_ranks(d_hidden).to(head.hidden.dtype)
    return ChunkedLoss(statistics, logprobs, entropies, tuple(upstream_gradients), (d_hidden, d_weight, d_bias))  # type: ignore[arg-type]


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
        if reference.needs_other_tokens(inputs, config):
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


@dataclass(frozen=True)
class _Chunks:
    """The chunks of a call. `one_by_one` and `in_two_phases` return (statistics, rows, gradients)."""

    head: Head
    memory: Tensor  # for the logits of one
    inputs: LossInputs
    config: GRPOLossConfig
    passes: ModuleType
    gradients: HeadGradients | None  # None where none is wanted
    active: int  # how many rows, the first ones, may have a gradient
    entropy: bool  # whether it is requested
    shards: Shards | None
    teacher: Teacher | None

    def one_by_one(self) -> tuple[dict[str, Tensor], Statistics, LossGradients]:
        # Softmax weights need whole rows, and the gradient of an entropy is not a multiple of them.
        at_once = self.head.takes_weights and not self.config.entropy_coef and self.shards is None
        at_once = at_once and self.gradients is not None and self.teacher is None
        tokens, seen, parts, sums = self.inputs.tokens.of(self.head.index), [], [], []
        for tile in self.head.tiles(self.memory):
            inputs = replace(self.inputs, tokens=tokens.of(tile.rows))
            mine = tile.first(max(0, self.active - tile.rows.start))
            first = slice(len(mine.targets))
            if at_once:
                options = {"entropy": self.entropy, "dtype": self.head.gemm_dtype, **tile.arguments}
                weights, scale, known = self.passes.softmax_weights_(tile.logits, tile.targets, **options)
                rows = Statistics(*known)
            elif self.teacher is not None:
                found = self.teacher.visit_(tile, entropy=self.entropy, differentiated=self.gradients is not None)
                rows = found.statistics()
            else:
                rows = self._statistics(tile)
            done, some = value_and_gradient(rows.logprobs, rows.entropy, inputs, config=self.config, passes=self.passes)
            if self.teacher is not None:
                self.teacher.finish(tile, found, self.gradients, done.logprobs)
            elif self.gradients is not None and len(mine.targets):
                if at_once:
                    self.gradients.add_weights(mine, self.passes, weights[first], scale[first], done.logprobs[first])
                else:
                    self._add_known(mine, rows.rows(first), done.of(first))
            seen.append(rows)
            parts.append(done)
            sums.append(some)
        upstream = LossGradients(*(_joined(values) for values in zip(*parts, strict=True)))  # type: ignore[arg-type]
        statistics = statistics_of(sums, upstream, tokens.mask, self.passes)
        return {**statistics, "recomputed": torch.zeros_like(statistics["loss"])}, Statistics.joined(seen), upstream

    def in_two_phases(self) -> tuple[dict[str, Tensor], Statistics, LossGradients]:
        index, inputs, seen = self.head.index, self.inputs, []
        for tile in self.head.tiles(self.memory):
            seen.append(self._statistics(tile))
        rows = Statistics.joined(seen)
        if index is not None:
            scored = torch.zeros_like(inputs.tokens.mask).index_fill_(0, index, True)
            inputs = replace(inputs, tokens=replace(inputs.tokens, mask=scored))
        count = len(inputs.tokens.mask)
        logprobs = _scattered(rows.logprobs, index, count)
        entropy = None if rows.entropy is None else _scattered(rows.entropy, index, count)
        done, sums = value_and_gradient(logprobs, entropy, inputs, config=self.config, passes=self.passes)
        statistics = statistics_of([sums], done, inputs.tokens.mask, self.passes)
        done = done if index is None else done.of(index)
        recomputed = 0
        if self.gradients is not None:
            last = tile.rows
            self._add_known(tile, rows.rows(last), done.of(last))
            left = (done.have_gradient() | (self.teacher is not None))[: last.start].nonzero()[:, 0]
            recomputed = len(left)
            for tile in self.head.select(left).tiles(self.memory) if recomputed else ():
                some = left[tile.rows]
                self._add_known(tile, rows.rows(some), done.of(some))
        return {**statistics, "recomputed": torch.full_like(statistics["loss"], recomputed)}, rows, done

    def _statistics(self, tile: Tile) -> Statistics:
        """The statistics of whole rows; a rank of a group has a vocabulary slice of each."""
        if tile.logits.shape[1]:
            state = self.passes.row_statistics(tile.logits, tile.targets, entropy=self.entropy, **tile.arguments)
        else:
            state = no_columns(len(tile.targets), dtype=tile.logits.dtype, device=tile.logits.device)
        if self.teacher is not None and self.gradients is None:
            self.teacher.finish(tile, self.teacher.visit_(tile, differentiated=False))
        parts = [RowState(*state)] if self.shards is None else self.shards.gather(RowState(*state))
        return Statistics(*self.passes.finish_rows(parts, entropy=self.entropy))

    def _add_known(self, tile: Tile, rows: Statistics, done: LossGradients) -> None:
        """Add the gradients of rows whose statistics are known."""
        if self.gradients is not None and self.teacher is not None:
            self.teacher.finish(tile, self.teacher.visit_(tile), self.gradients, done.logprobs)
        elif self.gradients is not None and tile.logits.numel():
            options: dict[str, Any] = {"grad_logprobs": done.logprobs, "grad_entropy": done.entropy}
            self.gradients.add_known(tile, self.passes, rows, **options)


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """One [N] from the parts of consecutive tiles; None where the parts are None."""
    return parts[0] if len(parts) == 1 or parts[0] is None else torch.cat(parts)  # type: ignore[arg-type]


def _scattered(values: Tensor, index: Tensor | None, count: int) -> Tensor:
    """[N] with the values of the rows in `index`, 0 elsewhere."""
    return values if index is None else values.new_zeros(count).index_copy_(0, index, values)
