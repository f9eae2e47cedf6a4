"""The two ways of `fused_linear_grpo_loss` through the head. U = 2*N*D*V FLOP, one GEMM over the head.

Chunk by chunk, where the loss of a token needs nothing but the token, 3U with a trainable head, 2U with a frozen one:

    logits -> log p, entropy -> loss, g = dL/d log p -> d-logits over the same memory -> dH, dW

In two phases, where it needs its sequence, or a threshold over all tokens: log-probs of every chunk first, then the
loss, then d-logits. The last logits are still there, those of other chunks are made again: 4U less what is left of the
chunk budget, and 3U where everything fits it.

With a head in shards, each rank makes the logits of its own columns, chunks of as many rows on all ranks; their
statistics are merged over the group before the loss, once per chunk. From there on all ranks know the same, to the bit,
and decide alike. What the shards add to dH is summed once, at the end, in fp32: one large message, and no rank has to
know whether another found rows with a gradient in a chunk.

Rows that cannot have a gradient (masked, zero advantage) are sorted out before, rows that turn out to have none
(clipped, left out by a correction) before the d-logits: neither takes part in the GEMMs of dH and dW. On a CPU, where
rows are dear to move, a few of the latter stay, with factors of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fused_grpo import planner, reference
from fused_grpo._layout import LossInputs, TokenInputs
from fused_grpo.config import GRPOLossConfig
from fused_grpo.head import Head, Tile
from fused_grpo.head_gradients import HeadGradients, softmax_factors
from fused_grpo.loss import LossGradients, value_and_gradient
from fused_grpo.planner import BLOCK_BYTES, TileShape
from fused_grpo.plans import in_columns, power_of_two_scale, rows_of, takes_weights
from fused_grpo.statistics import RowState, adrift, finish_rows, start_rows
from fused_grpo.vocab_parallel import Shards

Score = Literal["all", "needed"]


# Up to this share of a chunk's rows is rather kept in the GEMMs of dH and dW than moved out of their way.
_FEW = 1 / 8


class Done(NamedTuple):
    """What is left of a loss once every gradient is taken."""

    statistics: dict[str, Tensor]
    logprobs: Tensor  # [N], 0 for tokens that were not scored; so are the three below
    entropy: Tensor | None  # None where nobody asked for it
    upstream: tuple[Tensor, Tensor | None]  # of the log-probs and of the entropies: what the gradients came from
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None]  # of hidden, weight, bias, for an upstream of 1


class _Rows(NamedTuple):
    """Of the rows of a tile, each [R]."""

    logprobs: Tensor
    entropy: Tensor | None
    shift: Tensor
    total: Tensor

    def of(self, rows: slice | Tensor) -> _Rows:
        return _Rows(*(None if x is None else x[rows] for x in self))  # type: ignore[arg-type]

    @staticmethod
    def joined(parts: list[_Rows]) -> _Rows:
        """Of consecutive tiles."""
        return _Rows(*map(_joined, zip(*parts, strict=True)))  # type: ignore[arg-type]


def fused_loss(
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
    rows = head.select(_rows_in_order(inputs, config, score, differentiated or shards is not None))
    vocab_size = None if shards is None else max(shards.sizes)
    shape = rows.chunk_shape(chunk_bytes, vocab_size=vocab_size, in_columns=in_columns(rows, passes))
    how: dict[str, Any] = {**wanted, "scale": _scale(rows, inputs), "every_row": False, "rounded": rounded}
    gradients = HeadGradients(rows, shape, **how, hidden_dtype=None if shards is None else head.dtype)
    # The weights of a shard would be relative to the maximum of its own columns.
    as_weights = differentiated and takes_weights(rows, passes) and not config.entropy_coef and shards is None
    taken = gradients if differentiated else None
    anchored = as_weights and not entropy and in_columns(rows, passes)
    step = _Step(rows, shape, inputs, config, passes, taken, as_weights, anchored, entropy, shards)
    statistics, seen, upstream = step.in_two_phases() if needs_other_tokens(inputs, config) else step.chunk_by_chunk()
    per_token = [
        None if values is None else _everywhere(values, rows.index, len(head.targets))
        for values in (seen.logprobs, seen.entropy, upstream.logprobs, upstream.entropy)
    ]
    d_hidden, d_weight, d_bias = gradients.finish()
    if shards is not None and d_hidden is not None:
        d_hidden = shards.add_up(d_hidden).to(head.hidden.dtype)
    return Done(statistics, per_token[0], per_token[1], (per_token[2], per_token[3]), (d_hidden, d_weight, d_bias))  # type: ignore[arg-type]


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


@dataclass
class _Step:
    """A call's way through the head. Both ways give (statistics, the head's rows, the upstream gradients of each)."""

    head: Head
    shape: TileShape
    inputs: LossInputs
    config: GRPOLossConfig
    passes: ModuleType
    gradients: HeadGradients | None  # None where none is wanted
    as_weights: bool
    """Leave e^(z - m) in the tiles, from which no pass over them but the GEMMs leads to the gradients."""
    anchored: bool
    """Make those weights relative to an anchor."""
    entropy: bool  # whether anybody asks for it
    shards: Shards | None
    adrift: int = 0
    """Rows whose logits were made again for a row of their chunk that was adrift."""

    def chunk_by_chunk(self) -> tuple[dict[str, Tensor], _Rows, LossGradients]:
        seen, parts = [], []
        for tile in self.head.tiles(self.shape):
            rows = self._statistics(tile)
            here = TokenInputs(**self.inputs.tokens.rows(tile.rows if tile.index is None else tile.index))
            inputs = replace(self.inputs, tokens=here)
            done = value_and_gradient(rows.logprobs, rows.entropy, inputs, config=self.config, passes=self.passes)
            seen.append(rows)
            parts.append(done)
            self._take_gradient(tile, rows, done)
        statistics = reference.merge_statistics([part.statistics for part in parts])
        statistics["recomputed"] = torch.full_like(statistics["loss"], self.adrift)
        upstream = (_joined([part.logprobs for part in parts]), _joined([part.entropy for part in parts]))
        return statistics, _Rows.joined(seen), LossGradients(statistics, *upstream)  # type: ignore[arg-type]

    def in_two_phases(self) -> tuple[dict[str, Tensor], _Rows, LossGradients]:
        index, inputs, seen = self.head.index, self.inputs, []
        for tile in self.head.tiles(self.shape):
            seen.append(self._statistics(tile))
        rows = _Rows.joined(seen)
        if index is not None:
            scored = torch.zeros_like(inputs.tokens.mask).index_fill_(0, index, True)
            inputs = replace(inputs, tokens=replace(inputs.tokens, mask=scored))
        count = len(inputs.tokens.mask)
        logprobs = _everywhere(rows.logprobs, index, count)
        entropy = None if rows.entropy is None else _everywhere(rows.entropy, index, count)
        done = value_and_gradient(logprobs, entropy, inputs, config=self.config, passes=self.passes)
        if index is not None:
            done = done.of(index)
        again = torch.full_like(done.statistics["loss"], self.adrift)
        if self.gradients is not None:
            first = tile.rows.start
            self._take_gradient(tile, rows.of(tile.rows), done.of(tile.rows))
            del tile  # its memory is free for the chunks that come now
            left = _has_gradient(done)[:first].nonzero()[:, 0]
            again = again + len(left)
            for tile in self.head.select(left).tiles(self.shape) if len(left) else ():
                some = rows.of(left[tile.rows])
                if self.as_weights:
                    self.passes.weights_(tile.logits, tile.targets, maximum=some.shift, **tile.arguments)
                self._take_gradient(tile, some, done.of(left[tile.rows]))
        return {**done.statistics, "recomputed": again}, rows, done

    def _statistics(self, tile: Tile) -> _Rows:
        """Of whole rows, of which a rank of several has a stretch."""
        options = {**tile.arguments, "entropy": self.entropy}
        if self.shards is None and not self.as_weights:
            logprobs, entropy, (shift, total, *_) = self.passes.row_statistics(tile.logits, tile.targets, **options)
            return _Rows(logprobs, entropy, shift, total)
        if self.shards is None:
            state = self._weigh_(tile)
        else:
            state = start_rows(len(tile.targets), dtype=tile.logits.dtype, device=tile.logits.device)
            if tile.logits.shape[1]:
                state = RowState(*self.passes.row_statistics(tile.logits, tile.targets, **options)[2])
            state = self.shards.merge(state)
        logprobs, entropy = finish_rows(state)
        return _Rows(logprobs, entropy if self.entropy else None, state.shift, state.total)

    def _weigh_(self, tile: Tile) -> RowState:
        """Leave e^(z - m) in a tile: m is the anchor of a row, or all have none if one of them is adrift."""
        like: dict[str, Any] = {"dtype": tile.logits.dtype, "device": tile.logits.device}
        options = {**tile.arguments, "weights": tile.logits.dtype}
        if self.anchored:
            state = start_rows(len(tile.targets), **like)
            self.passes.fold_tile_(tile.logits, tile.targets, state, **options, anchored=True)
            if adrift(state) is None:
                return state
            self.adrift += len(tile.targets)
            tile.make_()
        state = start_rows(len(tile.targets), **like)
        self.passes.fold_tile_(tile.logits, tile.targets, state, **options, entropy=self.entropy)
        return state

    def _take_gradient(self, tile: Tile, rows: _Rows, done: LossGradients) -> None:
        """Take the rows of the tile that have a gradient into dH, dW, db."""
        if self.gradients is None:
            return
        # A GPU would have to wait for the answer: it is asked only where it may be yes.
        ask = tile.index is not None or not tile.logits.is_cuda or _may_vanish(self.inputs, self.config)
        kept = rows_of(_has_gradient(done)) if ask else None
        order = None if kept is None or self._may_stay(rows, kept) else kept_first_(tile.logits, kept)
        if order is not None:
            tile, rows, done = tile.select(order), rows.of(order), done.of(order)
        if not tile.logits.numel():
            return
        upstream = self.gradients.scaled(done.logprobs)
        if self.as_weights:
            options = {"logprobs": rows.logprobs, "total": rows.total, "upstream": upstream}
            self.gradients.add(tile, tile.logits, softmax_factors(self.head, tile, tile.targets, **options))
            return
        grad_entropy = None if done.entropy is None else self.gradients.scaled(done.entropy)
        dlogits = self.passes.logits_gradient_(
            tile.logits,
            tile.targets,
            maximum=rows.shift,
            total=rows.total,
            logprobs=rows.logprobs,
            entropy=None if grad_entropy is None else rows.entropy,
            grad_logprobs=upstream,
            grad_entropy=grad_entropy,
            **tile.arguments,
            dtype=self.head.gemm_dtype,
        )
        self.gradients.add(tile, dlogits)

    def _may_stay(self, rows: _Rows, kept: Tensor) -> bool:
        """Whether rows without a gradient are too few to be worth moving: as weights they are multiplied by 0."""
        few = len(rows.total) - len(kept) <= _FEW * len(rows.total)
        return self.as_weights and few and bool(torch.isfinite(rows.total).all())


def _may_vanish(inputs: LossInputs, config: GRPOLossConfig) -> bool:
    """Whether a token with an advantage may turn out to have no gradient: clipped, or left out."""
    left_out = config.off_policy_mask_threshold is not None or config.top_entropy_quantile < 1.0
    corrected = inputs.tokens.sampling_logprobs is not None and str(config.sampling_correction).endswith("mask")
    return inputs.tokens.old_logprobs is not None or left_out or corrected


def _has_gradient(done: LossGradients) -> Tensor:
    return done.logprobs != 0 if done.entropy is None else (done.logprobs != 0) | (done.entropy != 0)


def kept_first_(logits: Tensor, kept: Tensor) -> Tensor:
    """Move the rows `kept` [K], ascending, to the front of `logits` [R, C]; the row that each came from, [K].

    Only rows that lie behind the front move, each into a place whose own row is not kept.
    """
    count = len(kept)
    order = torch.arange(count, device=kept.device)
    is_kept = torch.zeros(len(logits), dtype=torch.bool, device=kept.device).index_fill_(0, kept, True)
    holes, movers = (~is_kept[:count]).nonzero()[:, 0], kept[kept >= count]
    width = max(1, BLOCK_BYTES // max(1, len(holes) * logits.element_size()))
    for columns in planner.chunks(logits.shape[1] if len(holes) else 0, width):
        logits[holes, columns] = logits[movers, columns]
    return order.index_copy_(0, holes, movers)


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """One [N] from those of consecutive tiles, which all have it or none."""
    return None if parts[0] is None else torch.cat(parts)  # type: ignore[arg-type]


def _everywhere(values: Tensor, index: Tensor | None, count: int) -> Tensor:
    """[N] from those of the rows in `index`, 0 elsewhere."""
    return values if index is None else values.new_zeros(count).index_copy_(0, index, values)
