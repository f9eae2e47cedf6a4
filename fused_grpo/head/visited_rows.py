"""What differs between kinds of rows of a loss: what they leave in a tile of logits, and what they need beside it.

A loop of `chunked_loss.py` visits each tile for its statistics, and adds its gradients once d loss / d log p is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fused_grpo._maths import factors
from fused_grpo._maths.formulas import LossInputs
from fused_grpo._maths.moments import RowsMoments
from fused_grpo._maths.statistics import RowState, Statistics, Upstream
from fused_grpo.config import GRPOLossConfig
from fused_grpo.head import several_targets
from fused_grpo.head.centering import Centering
from fused_grpo.head.chunked_divergence import Teacher
from fused_grpo.head.head import Head, HeadGradients, Tile, softmax_weights_of
from fused_grpo.head.several_targets import KnownTargets
from fused_grpo.head.sharded import Shards
from fused_grpo.passes.protocol import RowPasses, TileDivergence


class Beside(NamedTuple):
    """What a loss has beside its head."""

    shards: Shards | None = None
    teacher: Teacher | None = None
    centering: Centering | None = None


class Sweep(NamedTuple):
    """What a sweep over the chunks has for each of them. Only the first `active` rows may have a gradient."""

    passes: RowPasses
    gradients: HeadGradients | None
    entropy: bool
    active: int
    moments: RowsMoments | None = None  # takes those of all rows


class Seen(NamedTuple):
    """What a visit found out of the rows of a tile."""

    statistics: Statistics
    weights: tuple[Tensor, Tensor] | None = None  # E [R, C] and its scale [R], as of `softmax_weights_`
    slopes: Tensor | None = None  # [R, K] or [R, 1], dz / d(h.w) at the targets
    divergence: TileDivergence | None = None


@dataclass(frozen=True)
class KnownRows:
    """Rows whose statistics are known before their gradients are computed, if any are; the base of the other kinds."""

    sweep: Sweep

    def visit_(self, tile: Tile) -> Seen:
        """What the loss needs of the rows of a tile of raw logits, which may be overwritten."""
        return self._finished([self._state(tile)])

    def add(self, tile: Tile, seen: Seen, upstream: Upstream, gradients: HeadGradients) -> None:
        """Add the gradients of a tile, perhaps of the first of its rows, now that d loss / d log p is known."""
        rows = slice(len(tile.targets))
        if tile.logits.numel():
            gradients.add_known(tile, self.sweep.passes, seen.statistics.rows(rows), upstream.rows(rows))

    def all_seen(self, logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs, config: GRPOLossConfig) -> None:
        """Where there are two phases, after the first: what is [N] of all tokens."""

    def to_revisit(self, head: Head, upstream: Upstream) -> Tensor:
        """Which rows [R] are needed again for their gradients, where there are two phases."""
        return upstream.have_gradient()

    def _state(self, tile: Tile) -> RowState:
        passes, _, entropy, _, moments = self.sweep
        return several_targets.row_statistics(tile, passes, entropy=entropy, moments=moments)

    def _finished(self, parts: list[RowState]) -> Seen:
        return Seen(Statistics(*self.sweep.passes.finish_rows(parts, entropy=self.sweep.entropy)))


@dataclass(frozen=True)
class ShardedRows(KnownRows):
    """Rows of which each rank has the logits of its own columns."""

    shards: Shards

    def visit_(self, tile: Tile) -> Seen:
        return self._finished(self.shards.gather(self._state(tile)))


@dataclass(frozen=True)
class TaughtRows(KnownRows):
    """Rows beside those of a teacher."""

    teacher: Teacher

    def visit_(self, tile: Tile) -> Seen:
        pair = self.teacher.visit_(tile, entropy=self.sweep.entropy, differentiated=self.sweep.gradients is not None)
        seen = Seen(Statistics(*pair.statistics()), divergence=pair)
        if self.sweep.gradients is None:
            self.teacher.keep(tile, pair)
        return seen

    def add(self, tile: Tile, seen: Seen, upstream: Upstream, gradients: HeadGradients) -> None:
        assert seen.divergence is not None
        self.teacher.add(tile, seen.divergence, gradients, upstream.logprobs)


@dataclass(frozen=True)
class RevisitedRows(KnownRows):
    """Rows beside those of a teacher, with gradients only once the log-probs of all rows are known."""

    teacher: Teacher

    def visit_(self, tile: Tile) -> Seen:
        seen = super().visit_(tile)
        if self.sweep.gradients is None:
            self.teacher.keep(tile, self.teacher.visit_(tile, differentiated=False))
        return seen

    def add(self, tile: Tile, seen: Seen, upstream: Upstream, gradients: HeadGradients) -> None:
        self.teacher.add(tile, self.teacher.visit_(tile), gradients, upstream.logprobs)

    def to_revisit(self, head: Head, upstream: Upstream) -> Tensor:
        return torch.ones_like(upstream.logprobs, dtype=torch.bool)


@dataclass(frozen=True)
class CentredRows(KnownRows):
    """Rows whose targets are their own token and the tokens of a head, of which score centering needs log-probs."""

    centering: Centering
    shards: Shards | None = None

    def visit_(self, tile: Tile) -> Seen:
        state = self._state(tile)
        parts = [state] if self.shards is None else self.shards.gather(state)
        return self._own(tile, several_targets.finish_rows(parts, self.sweep.passes, entropy=self.sweep.entropy))

    def add(self, tile: Tile, seen: Seen, upstream: Upstream, gradients: HeadGradients) -> None:
        if tile.logits.numel():
            targets = self._known_targets(tile, seen, upstream, 1.0 if gradients.scale is None else gradients.scale)
            gradient = several_targets.logits_gradient_(tile, self.sweep.passes, targets, dtype=tile.hidden.dtype)
            gradients.add_logits_gradient(tile, gradient)

    def all_seen(self, logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs, config: GRPOLossConfig) -> None:
        self.centering.weigh(factors.token_factors(logprobs, entropy, inputs, config)["policy_weights"])

    def to_revisit(self, head: Head, upstream: Upstream) -> Tensor:
        weights = self.centering.weights
        return upstream.have_gradient() | ((weights if head.index is None else weights[head.index]) != 0)

    def _known_targets(self, tile: Tile, seen: Seen, upstream: Upstream, scale: float | Tensor = 1.0) -> KnownTargets:
        """What the gradients of a tile's rows need of all their targets."""
        rows = slice(len(tile.targets))
        grad_logprobs, grad_entropy = upstream.rows(rows)
        return several_targets.known_targets(
            tile.targets,
            self.centering.every_logprob(tile.rows_of_head, seen.statistics.rows(rows)),
            self.centering.upstream(tile.rows_of_head, grad_logprobs) * scale,
            None if grad_entropy is None else grad_entropy * scale,
        )

    def _own(self, tile: Tile, statistics: Statistics) -> Seen:
        return Seen(statistics._replace(logprobs=self.centering.keep(tile.rows_of_head, statistics.logprobs)))


@dataclass(frozen=True)
class WeightedCentredRows(CentredRows):
    """The same in one pass: softmax weights, with the gradients at the targets put over theirs."""

    def visit_(self, tile: Tile) -> Seen:
        passes, _, entropy, _, moments = self.sweep
        slopes = several_targets.target_slopes(tile)
        largest_tile, below = several_targets.largest_target(tile)
        weights, scale, statistics = softmax_weights_of(
            largest_tile, passes, None, entropy=entropy, moments=moments, dtype=tile.hidden.dtype
        )
        seen = self._own(tile, several_targets.for_each_target(statistics, below))
        return seen._replace(weights=(weights, scale), slopes=slopes)

    def add(self, tile: Tile, seen: Seen, upstream: Upstream, gradients: HeadGradients) -> None:
        assert seen.weights is not None
        assert seen.slopes is not None
        targets, rows = self._known_targets(tile, seen, upstream), slice(len(tile.targets))
        weights, scale = (x[rows] for x in seen.weights)
        values, factor = targets.at_targets * seen.slopes[rows], scale * targets.grad_logprobs
        factor = several_targets.put_gradients_(weights, tile, values, factor)
        gradients.add_softmax_weights(tile, self.sweep.passes, weights, factor, torch.ones_like(factor))


def visitor_of(sweep: Sweep, beside: Beside, *, weighted: bool, two_phases: bool) -> KnownRows:
    """What visits the rows of a loss; `weighted` where their gradients are multiples of softmax weights but for H's."""
    shards, teacher, centering = beside
    if teacher is not None:
        return RevisitedRows(sweep, teacher) if two_phases else TaughtRows(sweep, teacher)
    if centering is not None:
        return (WeightedCentredRows if weighted else CentredRows)(sweep, centering, shards)
    return KnownRows(sweep) if shards is None else ShardedRows(sweep, shards)
