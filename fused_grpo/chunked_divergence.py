"""The divergence of two models through their heads, a chunk of both models' logits at a time.

U is 2*N*D*V FLOP for the student and for the teacher, each with its own D. Whole rows of both are in memory together,
so each chunk is visited once: the student's logits, the teacher's, dH and dW, 4U for every kind, 2U without a gradient.
In short:

    for rows of hidden:
        student, teacher = student_rows @ student_weight.T, teacher_rows @ teacher_weight.T
        divergence[rows], gradient = divergence_gradient_(student, teacher, upstream[rows])      # d loss / d logits
        d_hidden[rows] = gradient @ student_weight
        d_weight += gradient.T @ student_rows
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fused_grpo import chunking
from fused_grpo.head import Head, Tile
from fused_grpo.head_gradients import HeadGradients
from fused_grpo.logprob_plans import power_of_two_scale
from fused_grpo.statistics import RowState, Statistics
from fused_grpo.torch_passes import Divergence

# fp16 ends at 2^16: d-logits are at most the upstream gradient times a log-ratio, which may be hundreds.
_FP16_EXPONENT = 6

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class TwoHeads:
    """The rows of a student and of a teacher, with one vocabulary."""

    student: Head
    teacher: Head

    def select(self, index: Tensor | None) -> TwoHeads:
        """Some of the rows."""
        return TwoHeads(self.student.select(index), self.teacher.select(index))

    def chunk_memory(self, passes: ModuleType, chunk_bytes: int | None) -> tuple[Tensor, Tensor]:
        """[R, V] for the logits of each. The slopes of the student's soft cap take as much on the torch path."""
        tiles = 2 if self.student.softcap is None else 3
        if chunk_bytes is None and self.student.hidden.device.type == "cpu":
            chunk_bytes = chunking.CPU_PAIR_BYTES
        budget = None if chunk_bytes is None else max(1, chunk_bytes // tiles)
        rows = min(head.chunk_rows(budget) for head in (self.student, self.teacher))
        where = {"dtype": self.student.dtype, "device": self.student.hidden.device}
        shape = rows, len(self.student.weight)
        return passes.empty_tile(*shape, **where), passes.empty_tile(*shape, **where)

    def tiles(self, memory: tuple[Tensor, Tensor]) -> Iterator[tuple[Tile, Tile]]:
        """Whole rows of both, chunk by chunk."""
        yield from zip(self.student.tiles(memory[0]), self.teacher.tiles(memory[1]), strict=True)


class OnePass:
    """`torch_passes.Divergence` by the kernel, which computes the divergence and the gradient in one launch.

    So the statistics of the student's softmax are a pass of their own.
    """

    def __init__(
        self,
        passes: ModuleType,
        student: Tensor,
        teacher: Tensor,
        *,
        targets: Tensor,
        entropy: bool,
        differentiated: bool,
        **how: Any,
    ) -> None:
        self._passes, self._targets, self._entropy = passes, targets, entropy
        self._tiles, self._how = (student, teacher), how
        self._divergence: Tensor | None = None

    @property
    def divergence(self) -> Tensor:
        if self._divergence is None:
            self._divergence, _ = self._passes.divergence_gradient_(*self._tiles, upstream=None, **self._how)
        return self._divergence

    def statistics(self) -> Statistics:
        head = self._how["student_head"]
        state = self._passes.row_statistics(self._tiles[0], self._targets, entropy=self._entropy, **head)
        return Statistics(*self._passes.finish_rows([RowState(*state)], entropy=self._entropy))

    def gradient_(self, upstream: Tensor, grad_logprobs: Tensor, *, dtype: torch.dtype) -> Tensor:
        how = {"upstream": upstream, "targets": self._targets, "grad_logprobs": grad_logprobs, "dtype": dtype}
        self._divergence, gradient = self._passes.divergence_gradient_(*self._tiles, **how, **self._how)
        return gradient  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Teacher:
    """A teacher in the pass of another loss: its logits cost U, its divergence and that loss share dH and dW."""

    head: Head
    weights: Tensor  # [N], d loss / d divergence
    divergence: Tensor  # [N], 0 for the rows that have not been visited
    kind: str
    beta: float
    passes: ModuleType
    memory: Tensor | None = None  # [R, V] for its logits of a chunk

    def visit_(self, tile: Tile, *, entropy: bool = False, differentiated: bool = True) -> Divergence | OnePass:
        """The divergence of whole rows of the student's raw logits, which are overwritten, and their statistics."""
        assert self.memory is not None
        rows = self._rows(tile)
        mine = {name: getattr(self.head, name)[rows] for name in ("hidden", "targets", "temperature")}
        theirs = next(replace(self.head, **mine).tiles(self.memory))
        how: dict[str, Any] = {"kind": self.kind, "beta": self.beta, "entropy": entropy, "targets": tile.targets}
        how |= {"student_head": tile.arguments, "teacher_head": theirs.arguments, "differentiated": differentiated}
        # In plain torch the sweep for the divergence also gives the statistics.
        if hasattr(self.passes, "Divergence"):
            return Divergence(tile.logits, theirs.logits, **how)
        return OnePass(self.passes, tile.logits, theirs.logits, **how)

    def finish(
        self,
        tile: Tile,
        found: Divergence | OnePass,
        gradients: HeadGradients | None = None,
        grad_logprobs: Tensor | None = None,
    ) -> None:
        """Keep the divergences of visited rows; with `gradients`, add those of both losses, the other's from [R]."""
        rows = self._rows(tile)
        if gradients is not None:
            assert grad_logprobs is not None
            scale = 1.0 if gradients.scale is None else gradients.scale
            upstream = self.weights[rows] * scale, grad_logprobs * scale
            gradients.add_gradient(tile, found.gradient_(*upstream, dtype=tile.hidden.dtype))
        self.divergence[rows] = found.divergence

    @staticmethod
    def _rows(tile: Tile) -> slice | Tensor:
        return tile.rows if tile.index is None else tile.index

    def added_to(self, statistics: dict[str, Tensor]) -> dict[str, Tensor]:
        """The statistics of the other loss, with the divergences in them and in the loss."""
        loss = statistics["loss"] + (self.weights * self.divergence).sum()
        return {**statistics, "loss": loss, "distillation": self.divergence.sum()}


def chunked_divergence(
    heads: TwoHeads,
    passes: ModuleType,
    *,
    kind: str,
    beta: float,
    weights: Tensor,
    chunk_bytes: int | None,
    wanted: dict[str, bool],
    rounded: bool = True,
) -> tuple[Tensor, Gradients]:
    """The divergences [R] of the rows, and the gradients of the student's hidden, weight and bias that are wanted.

    The gradients are those of sum(weights * divergence), `weights` [R]; that of the weight is fp32 if not `rounded`.
    """
    memory, student = heads.chunk_memory(passes, chunk_bytes), heads.student
    scale = power_of_two_scale(student, weights, exponent=_FP16_EXPONENT)
    options: dict[str, Any] = {**wanted, "scale": scale, "rounded": rounded}
    gradients = HeadGradients(student, one_group=len(memory[0]) >= len(weights), **options)
    upstream = (weights if scale is None else weights * scale) if any(wanted.values()) else None
    how: dict[str, Any] = {"kind": kind, "beta": beta, "dtype": student.gemm_dtype}
    found = []
    for tile, teacher in heads.tiles(memory):
        mine = None if upstream is None else upstream[tile.rows]
        how |= {"student_head": tile.arguments, "teacher_head": teacher.arguments, "upstream": mine}
        divergence, gradient = passes.divergence_gradient_(tile.logits, teacher.logits, **how)
        if gradient is not None:
            gradients.add_gradient(tile, gradient)
        found.append(divergence)
    return torch.cat(found), gradients.finish()
