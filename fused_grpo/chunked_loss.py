"""`fused_linear_grpo_loss` through the head, a chunk of logits at a time. U = 2*N*D*V FLOP, one GEMM over the head.

Where the loss of a token needs nothing but the token, each chunk is done with once: 3U with a trainable head, 2U with a
frozen one. In short:

    for rows of hidden:
        weights, scale, statistics = softmax_weights(rows @ weight.T, targets)    # d log p / d logits = scale * weights
        upstream = token_loss(statistics).gradient                                # d loss / d log p
        factor = upstream * scale
        d_hidden[rows] = factor * (weights @ weight)
        d_weight += weights.T @ (factor * rows)

Where it needs its sequence, or a threshold over all tokens, there are two phases: the statistics of every chunk first,
then the loss, then the gradients. The last logits are still there, those of other chunks are recomputed: 4U less what
is left of the chunk budget, and 3U where everything fits it.

With a head in shards, each rank makes the logits of its own columns, chunks of as many rows on all ranks; their
statistics are merged over the group before the loss, once per chunk. From there on all ranks know the same, to the bit,
and decide alike. What the shards add to dH is summed once, at the end, in fp32: one large message, and no rank has to
know whether another found rows with a gradient in a chunk.

Rows that cannot have a gradient (masked, zero advantage) are sorted out before, and take no part in the GEMMs of dH and
dW. Rows that turn out to have none (clipped) take part with a factor of 0: to move them would cost a GPU a wait for
their number, and a CPU the moving.
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
from fused_grpo.config import GRPOLossConfig
from fused_grpo.head import Head, Tile
from fused_grpo.head_gradients import HeadGradients
from fused_grpo.logprob_plans import may_wait, power_of_two_scale
from fused_grpo.loss_gradients import LossGradients, statistics_of, value_and_gradient
from fused_grpo.shards import Shards
from fused_grpo.statistics import RowState, Statistics, no_columns

Score = Literal["all", "needed"]


class Done(NamedTuple):
    """What is left of a loss once every gradient is taken."""

    statistics: dict[str, Tensor]
    logprobs: Tensor  # [N], 0 for tokens that were not scored; so are the three below
    entropy: Tensor | None  # None where nobody asked for it
    upstream: tuple[Tensor, Tensor | None]  # of the log-probs and of the entropies: what the gradients came from
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
) -> Done:
    """Log-probs, loss and the gradients that are wanted of hidden, weight (in fp32 if not `rounded`) and bias.

    With `shards`, weight and bias are those of this rank, and the targets of `head` are relative to it.
    """
    differentiated = any(wanted.values())
    # A shard whose rank wants no gradient meets the same rows in the same order as the others.
    order, active = _rows_in_order(inputs, config, score, differentiated or shards is not None)
    rows = head.select(order)
    memory = rows.chunk_memory(passes, chunk_bytes, vocab_size=None if shards is None else max(shards.sizes))
    how: dict[str, Any] = {**wanted, "scale": _scale(rows, inputs), "every_row": False, "rounded": rounded}
    how |= {"one_group": len(memory) >= len(rows.targets)}
    gradients = HeadGradients(rows, **how, hidden_dtype=None if shards is None else head.dtype)
    taken = gradients if differentiated else None
    chunks = _Chunks(rows, memory, inputs, config, passes, taken, active, entropy, shards)
    go = chunks.in_two_phases if reference.needs_other_tokens(inputs, config) else chunks.one_by_one
    statistics, seen, upstream = go()
    del chunks, go, memory  # before dW is rounded beside its accumulator
    per_token = [
        None if values is None else _everywhere(values, order, len(head.targets))
        for values in (seen.logprobs, seen.entropy, upstream.logprobs, upstream.entropy)
    ]
    d_hidden, d_weight, d_bias = gradients.finish()
    if shards is not None and d_hidden is not None:
        d_hidden = shards.add_up(d_hidden).to(head.hidden.dtype)
    return Done(statistics, per_token[0], per_token[1], (per_token[2], per_token[3]), (d_hidden, d_weight, d_bias))  # type: ignore[arg-type]


def _needs_all_entropies(inputs: LossInputs, config: GRPOLossConfig) -> bool:
    """Whether a quantile, or the number of tokens above it, has yet to be found."""
    unknown = inputs.entropy_threshold is None or (config.entropy_coef > 0 and inputs.num_entropy_tokens is None)
    return config.top_entropy_quantile < 1.0 and unknown


def _rows_in_order(
    inputs: LossInputs, config: GRPOLossConfig, score: Score, differentiated: bool
) -> tuple[Tensor | None, int]:
    """The rows to score, None for all of them in order, and how many of them, the first, may have a gradient.

    On a GPU this waits for two numbers: the one time that a call waits, but for losses in two phases. While a CUDA
    graph is captured nothing can wait, so all rows are taken.
    """
    mask, advantages = inputs.tokens.mask, inputs.tokens.advantages
    if not may_wait(mask):
        return None, len(mask)
    needed = score == "needed" and not _needs_all_entropies(inputs, config)
    moves = mask
    if (needed or differentiated) and not (config.beta or config.entropy_coef):
        moves = mask & (advantages != 0)
        if reference.needs_other_tokens(inputs, config):
            # A sequence's ratio carries the gradient of one of its tokens to all of them.
            moves = mask & (inputs.sequences.spread(inputs.sequences.sum(moves), len(mask)) > 0)
    active, scored = torch.stack([moves.sum(), mask.sum()]).tolist()
    if active == len(mask):
        return None, active
    # Stable: rows stay in order within those that may have a gradient, and within the others.
    order = (2 - mask.to(torch.int8) - moves.to(torch.int8)).argsort(stable=True)
    return order[: active if needed else scored], active


def _scale(head: Head, inputs: LossInputs) -> Tensor | None:
    """For fp16 d-logits: the ratio of a token is not known yet, and up to 2^10 of it must not overflow."""
    tokens = inputs.tokens
    largest = torch.where(tokens.mask, tokens.weights * (tokens.advantages.abs() + 1), 0.0)
    return power_of_two_scale(head, largest if head.index is None else largest[head.index], exponent=6)


@dataclass(frozen=True)
class _Chunks:
    """A call's chunks. Both ways through them give (statistics, the head's rows, the upstream gradients of each)."""

    head: Head
    memory: Tensor  # for the logits of one
    inputs: LossInputs
    config: GRPOLossConfig
    passes: ModuleType
    gradients: HeadGradients | None  # None where none is wanted
    active: int  # the rows that may have a gradient: the first
    entropy: bool  # whether anybody asks for it
    shards: Shards | None

    def one_by_one(self) -> tuple[dict[str, Tensor], Statistics, LossGradients]:
        # Only whole rows leave their weights, and an entropy's gradient is not a multiple of them.
        at_once = self.head.takes_weights and not self.config.entropy_coef and self.shards is None
        at_once = at_once and self.gradients is not None
        tokens, seen, parts, sums = self.inputs.tokens.of(self.head.index), [], [], []
        for tile in self.head.tiles(self.memory):
            inputs = replace(self.inputs, tokens=tokens.of(tile.rows))
            mine = tile.first(max(0, self.active - tile.rows.start))
            first = slice(len(mine.targets))
            if at_once:
                options = {"entropy": self.entropy, "dtype": self.head.gemm_dtype, **tile.arguments}
                weights, scale, known = self.passes.softmax_weights_(tile.logits, tile.targets, **options)
                rows = Statistics(*known)
            else:
                rows = self._statistics(tile)
            done, some = value_and_gradient(rows.logprobs, rows.entropy, inputs, config=self.config, passes=self.passes)
            if self.gradients is not None and len(mine.targets):
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
        logprobs = _everywhere(rows.logprobs, index, count)
        entropy = None if rows.entropy is None else _everywhere(rows.entropy, index, count)
        done, sums = value_and_gradient(logprobs, entropy, inputs, config=self.config, passes=self.passes)
        statistics = statistics_of([sums], done, inputs.tokens.mask, self.passes)
        done = done if index is None else done.of(index)
        recomputed = 0
        if self.gradients is not None:
            last = tile.rows
            self._add_known(tile, rows.rows(last), done.of(last))
            left = done.have_gradient()[: last.start].nonzero()[:, 0]
            recomputed = len(left)
            for tile in self.head.select(left).tiles(self.memory) if recomputed else ():
                some = left[tile.rows]
                self._add_known(tile, rows.rows(some), done.of(some))
        return {**statistics, "recomputed": torch.full_like(statistics["loss"], recomputed)}, rows, done

    def _statistics(self, tile: Tile) -> Statistics:
        """Of whole rows, of which a rank of several has a vocabulary slice."""
        if tile.logits.shape[1]:
            state = self.passes.row_statistics(tile.logits, tile.targets, entropy=self.entropy, **tile.arguments)
        else:
            state = no_columns(len(tile.targets), dtype=tile.logits.dtype, device=tile.logits.device)
        parts = [RowState(*state)] if self.shards is None else self.shards.gather(RowState(*state))
        return Statistics(*self.passes.finish_rows(parts, entropy=self.entropy))

    def _add_known(self, tile: Tile, rows: Statistics, done: LossGradients) -> None:
        """Take the gradients of rows whose statistics are known."""
        if self.gradients is not None and tile.logits.numel():
            options: dict[str, Any] = {"grad_logprobs": done.logprobs, "grad_entropy": done.entropy}
            self.gradients.add_known(tile, self.passes, rows, **options)


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """One [N] from those of consecutive tiles, which all have it or none."""
    return None if parts[0] is None else torch.cat(parts)  # type: ignore[arg-type]


def _everywhere(values: Tensor, index: Tensor | None, count: int) -> Tensor:
    """[N] from those of the rows in `index`, 0 elsewhere."""
    return values if index is None else values.new_zeros(count).index_copy_(0, index, values)
