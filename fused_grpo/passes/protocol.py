"""What happens to a tile of logits: the map between the floors.

`RowPasses` is what the plans through the head are written over. It exists twice, as the modules `fused_grpo.kernels`
(Triton) and `fused_grpo.passes.torch_passes` (any device), with one contract, so that every plan is written once.

Letters: R rows of a tile, C its columns, D hidden size, E kept tokens of all rows, N tokens. A tile is raw h.w, in the
dtype of accumulators; a pass whose name ends in an underscore overwrites it. Whatever is per row is [R]. A target
outside of [0, C) is in another tile.

The softmax weights E of rows are what the GEMMs of their gradients read. There are two ways to them:

    softmax_weights_           overwrites the logits that a GEMM has written
    softmax_weights_forward    is a GEMM that writes E itself, without logits; `prefers_softmax_weights` says where

Two tokens with equal logits, of which the first is the target, have E = (-1, 1) and a scale of -1/2: the gradient of
log p in their logits is (1/2, -1/2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Unpack

import torch
from torch import Tensor

from fused_grpo._maths.distributions import LogitTransform
from fused_grpo._maths.moments import TakesMoments
from fused_grpo._maths.statistics import RowState, Statistics
from fused_grpo.config import TokenTerms

State = tuple[Tensor, Tensor, Tensor, Tensor]
"""The fields of `RowState`."""
Known = tuple[Tensor, Tensor | None, Tensor, Tensor]
"""The fields of `Statistics`."""


class LogprobForward(Protocol):
    """The statistics of rows [N] straight from hidden [N, D] and weight [V, D]: no logit is written to memory."""

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        entropy: bool = False,
        **transform: Unpack[LogitTransform],
    ) -> tuple[Tensor, Tensor | None, State]:
        """(log p, entropy or None, `RowState`)."""


class SoftmaxWeightsForward(Protocol):
    """The softmax weights and statistics of whole rows [N] straight from hidden [N, D] and weight [V, D]."""

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        out: Tensor,
        entropy: bool = False,
        **transform: Unpack[LogitTransform],
    ) -> tuple[Tensor, Tensor, Known]:
        """(E in the memory `out` [N, V], scale, the `Statistics`), as of `softmax_weights_`."""


class TileDivergence(Protocol):
    """The divergence [R] of the softmaxes of two tiles, and afterwards its gradient."""

    @property
    def divergence(self) -> Tensor: ...

    def statistics(self) -> Known:
        """The student's log-probs and entropies, of the targets that were given."""

    def gradient_(self, upstream: Tensor, grad_logprobs: Tensor, *, dtype: torch.dtype) -> Tensor:
        """d loss / d(h.w) over the student's tile, from d loss / d divergence and d loss / d log p of the targets."""


class DivergenceOfTiles(Protocol):
    """Starts a `TileDivergence`. Both tiles are overwritten by the time that it has its gradient."""

    def __call__(
        self,
        student: Tensor,
        teacher: Tensor,
        *,
        kind: str,
        beta: float,
        student_head: LogitTransform,
        teacher_head: LogitTransform,
        targets: Tensor,
        entropy: bool = False,
        differentiated: bool = True,
    ) -> TileDivergence: ...


class RowPasses(Protocol):
    """Passes over the rows of a tile, in Triton and in plain torch."""

    @property
    def logprob_forward(self) -> LogprobForward | None:
        """The kernel without tiles; None where there is none."""

    @property
    def Divergence(self) -> DivergenceOfTiles:
        """The divergence of two tiles in two steps: its value, then its gradient."""

    def prefers_tiles(self, hidden: Tensor) -> bool:
        """Whether tiles of logits are faster than `logprob_forward` for these hidden states."""

    @property
    def softmax_weights_forward(self) -> SoftmaxWeightsForward | None:
        """The kernel for softmax weights without logits; None where there is none."""

    def prefers_softmax_weights(self, hidden: Tensor, weight: Tensor, rows: int) -> bool:
        """Whether `softmax_weights_forward` is faster than logits and `softmax_weights_` for so many rows."""

    def empty_tile(self, rows: int, columns: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory [R, C] for the largest tile; smaller ones are its first rows and columns."""

    def row_statistics(
        self,
        logits: Tensor,
        targets: Tensor,
        *,
        entropy: bool = False,
        moments: TakesMoments | None = None,
        **transform: Unpack[LogitTransform],
    ) -> State:
        """The `RowState` of rows over these columns.

        `moments` takes those of the tile: there, a target of C or more is in a later tile, a negative one before.
        """

    def finish_rows(self, parts: Sequence[RowState], *, entropy: bool) -> Known:
        """The `Statistics` of whole rows from the states of all their columns."""

    def softmax_weights_(
        self,
        logits: Tensor,
        targets: Tensor,
        *,
        statistics: Statistics | None = None,
        entropy: bool = False,
        moments: TakesMoments | None = None,
        dtype: torch.dtype = torch.float32,
        **transform: Unpack[LogitTransform],
    ) -> tuple[Tensor, Tensor, Known]:
        """(E [R, C] in `dtype`, scale, the `Statistics`) with d log p / d(h.w) = scale * E, for the target as well.

        The tile is whole rows, of which `moments` takes those, or `statistics` are those of the whole rows.
        """

    def logits_gradient_(
        self,
        logits: Tensor,
        targets: Tensor,
        *,
        statistics: Statistics,
        grad_logprobs: Tensor,
        grad_entropy: Tensor | None,
        dtype: torch.dtype = torch.float32,
        **transform: Unpack[LogitTransform],
    ) -> Tensor:
        """d loss / d(h.w) [R, C] in `dtype`. A row whose upstream gradients are 0 is 0, whatever it holds."""

    def scale_hidden(self, hidden: Tensor | None, scale: Tensor, grad_logprobs: Tensor) -> tuple[Tensor, Tensor | None]:
        """(factor = scale * grad_logprobs, factor * hidden [R, D])."""

    def scale_(self, values: Tensor, factor: Tensor, others: Tensor | None = None) -> Tensor:
        """Contiguous values, and others, times a 0-d factor, in place."""

    def divergence_gradient_(
        self,
        student: Tensor,
        teacher: Tensor,
        *,
        kind: str,
        beta: float,
        upstream: Tensor | None,
        student_head: LogitTransform,
        teacher_head: LogitTransform,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor | None]:
        """(the divergence, d loss / d(h.w) of the student over its tile, None without d loss / d divergence)."""

    def grpo_token_loss(
        self,
        logprobs: Tensor,
        *,
        log_ratio: Tensor | None = None,
        inputs: Mapping[str, Tensor | None],
        terms: TokenTerms,
    ) -> tuple[Tensor, Tensor | None, Any]:
        """(d loss / d log p [N], d loss / d log_ratio [N] if that is given, sums for `token_statistics`).

        `inputs` are the other [N] arguments of `formulas.token_loss`.
        """

    def token_statistics(self, partials: Sequence[Any]) -> dict[str, Tensor]:
        """The loss and the metrics (`formulas.token_statistics`) of the tokens of several calls."""

    def clean_targets(self, targets: Tensor, *, ignore_index: int, vocab_size: int) -> tuple[Tensor, Tensor]:
        """(which targets are not `ignore_index`, the targets, checked, with 0 in the place of those that are)."""

    def entry_logits(
        self, hidden: Tensor, weight: Tensor, rows: Tensor, tokens: Tensor, *, dtype: torch.dtype
    ) -> Tensor:
        """h.w [E] of rows [E] and tokens [E]."""

    def weighted_rows_(
        self,
        out: Tensor,
        places: Tensor,
        offsets: Tensor,
        index: Tensor,
        factors: Tensor,
        matrix: Tensor,
        *,
        cast: torch.dtype,
        accumulate: bool = False,
    ) -> Tensor:
        """out[places_i] = (out[places_i] +) the sum of factors_e * matrix[index_e] over segment i of the offsets."""
