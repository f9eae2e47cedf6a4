"""What `chunked_loss.py` does with the rows of a chunk: their statistics, and then their part of the gradients.

Its loop is the same for all of them. They differ in what they leave in a tile, and in what they need beside it:

    WeightedRows    the statistics and the softmax weights in one pass; the gradients are products of the weights
    KnownRows       the statistics; the gradients need another pass over the logits
    ShardedRows     the same, of rows whose columns are on several ranks
    TaughtRows      the divergence from a teacher, and with it the statistics; one gradient of both losses
    RevisitedRows   the same, where the logits are recomputed for the gradients
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fused_grpo._maths.statistics import RowState, Statistics, Upstream, no_columns
from fused_grpo.head.chunked_divergence import Teacher
from fused_grpo.head.gradients import HeadGradients
from fused_grpo.head.head import Tile
from fused_grpo.head.sharded import Shards
from fused_grpo.passes.protocol import RowPasses, TileDivergence


class Seen(NamedTuple):
    """What a visit found out of the rows of a tile."""

    statistics: Statistics
    weights: tuple[Tensor, Tensor] | None = None  # E [R, C] and its scale [R], as of `softmax_weights_`
    divergence: TileDivergence | None = None

    @property
    def known(self) -> tuple[Tensor, Tensor | None]:
        """(log p, entropy), each [R]."""
        return self.statistics.logprobs, self.statistics.entropy


class Visitor(Protocol):
    """Visits the rows of a tile of raw logits, and adds their gradients once d loss / d log p is known."""

    def visit_(self, tile: Tile) -> Seen: ...

    def add(self, tile: Tile, seen: Seen, upstream: Upstream) -> None: ...


@dataclass(frozen=True)
class WeightedRows:
    """Rows whose gradients are multiples of their softmax weights. The first `active` rows may have one."""

    passes: RowPasses
    gradients: HeadGradients
    entropy: bool
    active: int
    dtype: torch.dtype  # of the weights

    def visit_(self, tile: Tile) -> Seen:
        weights, scale, known = self.passes.softmax_weights_(
            tile.logits, tile.targets, entropy=self.entropy, dtype=self.dtype, **tile.transform
        )
        return Seen(Statistics(*known), weights=(weights, scale))

    def add(self, tile: Tile, seen: Seen, upstream: Upstream) -> None:
        assert seen.weights is not None
        tile = tile.first(max(0, self.active - tile.rows.start))
        if count := len(tile.targets):
            weights, scale = (values[:count] for values in seen.weights)
            self.gradients.add_weights(tile, self.passes, weights, scale, upstream.logprobs[:count])


@dataclass(frozen=True)
class KnownRows:
    """Rows whose statistics are known before their gradients are computed, if any are."""

    passes: RowPasses
    gradients: HeadGradients | None
    entropy: bool
    active: int

    def visit_(self, tile: Tile) -> Seen:
        return self._finished([self._state(tile)])

    def add(self, tile: Tile, seen: Seen, upstream: Upstream) -> None:
        tile = tile.first(max(0, self.active - tile.rows.start))
        if self.gradients is not None and tile.logits.numel():
            rows = slice(len(tile.targets))
            statistics, upstream = seen.statistics.rows(rows), upstream.rows(rows)
            self.gradients.add_known(tile, self.passes, statistics, upstream)

    def to_revisit(self, upstream: Upstream) -> Tensor:
        """Which rows [N] are needed again for their gradients."""
        return upstream.have_gradient()

    def _state(self, tile: Tile) -> RowState:
        return RowState(*self.passes.row_statistics(tile.logits, tile.targets, entropy=self.entropy, **tile.transform))

    def _finished(self, parts: list[RowState]) -> Seen:
        return Seen(Statistics(*self.passes.finish_rows(parts, entropy=self.entropy)))


@dataclass(frozen=True)
class ShardedRows(KnownRows):
    """Rows of which each rank has the logits of its own columns."""

    shards: Shards

    def visit_(self, tile: Tile) -> Seen:
        return self._finished(self.shards.gather(self._state(tile)))

    def _state(self, tile: Tile) -> RowState:
        if tile.logits.shape[1]:
            return super()._state(tile)
        return no_columns(len(tile.targets), dtype=tile.logits.dtype, device=tile.logits.device)


@dataclass(frozen=True)
class TaughtRows:
    """Rows beside those of a teacher."""

    teacher: Teacher
    gradients: HeadGradients | None
    entropy: bool

    def visit_(self, tile: Tile) -> Seen:
        pair = self.teacher.visit_(tile, entropy=self.entropy, differentiated=self.gradients is not None)
        return Seen(Statistics(*pair.statistics()), divergence=pair)

    def add(self, tile: Tile, seen: Seen, upstream: Upstream) -> None:
        assert seen.divergence is not None
        self.teacher.finish(tile, seen.divergence, self.gradients, upstream.logprobs)


@dataclass(frozen=True)
class RevisitedRows(KnownRows):
    """Rows beside those of a teacher, with gradients only once the log-probs of all rows are known."""

    teacher: Teacher

    def visit_(self, tile: Tile) -> Seen:
        seen = super().visit_(tile)
        if self.gradients is None:
            self.teacher.finish(tile, self.teacher.visit_(tile, differentiated=False))
        return seen

    def add(self, tile: Tile, seen: Seen, upstream: Upstream) -> None:
        self.teacher.finish(tile, self.teacher.visit_(tile), self.gradients, upstream.logprobs)

    def to_revisit(self, upstream: Upstream) -> Tensor:
        return torch.ones_like(upstream.logprobs, dtype=torch.bool)
