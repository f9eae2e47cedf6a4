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

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fused_grpo._maths import formulas
from fused_grpo.head.head import Gradients, Head, HeadGradients, Tile, Wanted
from fused_grpo.head.logprob_plans import power_of_two_scale
from fused_grpo.passes import buffers
from fused_grpo.passes.protocol import RowPasses, TileDivergence

# fp16 ends at 2^16: d-logits are at most the upstream gradient times a log-ratio, which may be hundreds.
_FP16_EXPONENT = 6


@dataclass(frozen=True)
class TwoHeads:
    """The rows of a student and of a teacher, with one vocabulary."""

    student: Head
    teacher: Head

    def select(self, index: Tensor | None) -> TwoHeads:
        """Some of the rows."""
        return TwoHeads(self.student.select(index), self.teacher.select(index))

    def blank(self, kept: Tensor) -> TwoHeads:
        """All of the rows, with hidden states of 0 in those that are not `kept` [N]."""
        return TwoHeads(self.student.blank(kept), self.teacher.blank(kept))

    def chunk_memory(self, passes: RowPasses, chunk_bytes: int | None) -> tuple[Tensor, Tensor]:
        """[R, V] for the logits of each. The slopes of the student's soft cap take as much on the torch path."""
        tiles = 2 if self.student.softcap is None else 3
        if chunk_bytes is None and self.student.hidden.device.type == "cpu":
            chunk_bytes = buffers.CPU_PAIR_BYTES
        budget = None if chunk_bytes is None else max(1, chunk_bytes // tiles)
        rows = min(buffers.chunk_rows(head.sizes(), budget) for head in (self.student, self.teacher))
        dtype, device, columns = self.student.dtype, self.student.hidden.device, len(self.student.weight)
        student, teacher = (passes.empty_tile(rows, columns, dtype=dtype, device=device) for _ in range(2))
        return student, teacher


@dataclass(frozen=True)
class Teacher:
    """A teacher in the pass of another loss: its logits cost U, its divergence and that loss share dH and dW."""

    head: Head
    mask: Tensor  # [N] bool, the rows that count
    weights: Tensor  # [N], d loss / d divergence
    divergence: Tensor  # [N], 0 for the rows that have not been visited
    kind: str
    beta: float
    passes: RowPasses
    memory: Tensor | None = None  # [R, V] for its logits of a chunk

    def blank(self) -> Teacher:
        """This, with hidden states of 0 in the rows that do not count: all are visited."""
        return replace(self, head=self.head.blank(self.mask))

    def with_memory(self, student: Head, index: Tensor | None, chunk_bytes: int | None) -> tuple[Tensor, Teacher]:
        """(memory [R, V] for the logits of a student's chunk, this with as much), for rows `index` of the student."""
        heads = TwoHeads(student, self.head.select(index))
        memory, own_memory = heads.chunk_memory(self.passes, chunk_bytes)
        return memory, replace(self, memory=own_memory)

    def visit_(self, tile: Tile, *, entropy: bool = False, differentiated: bool = True) -> TileDivergence:
        """The divergence of whole rows of the student's raw logits, which are overwritten, and their statistics."""
        assert self.memory is not None
        rows, head = tile.rows_of_head, self.head
        head = replace(head, hidden=head.hidden[rows], targets=head.targets[rows], temperature=head.temperature[rows])
        teacher = next(head.tiles(self.memory))
        return self.passes.Divergence(
            tile.logits,
            teacher.logits,
            kind=self.kind,
            beta=self.beta,
            student_head=tile.transform,
            teacher_head=teacher.transform,
            targets=tile.targets,
            entropy=entropy,
            differentiated=differentiated,
        )

    def add(self, tile: Tile, pair: TileDivergence, gradients: HeadGradients, grad_logprobs: Tensor) -> None:
        """Add the gradients of both losses of visited rows, the other's from [R], and keep their divergences."""
        rows, scale = tile.rows_of_head, 1.0 if gradients.scale is None else gradients.scale
        upstream = self.weights[rows] * scale, grad_logprobs * scale
        gradients.add_logits_gradient(tile, pair.gradient_(*upstream, dtype=tile.hidden.dtype))
        self.keep(tile, pair)

    def keep(self, tile: Tile, pair: TileDivergence) -> None:
        """Keep the divergences of visited rows, after their gradient if they have one: a kernel gives both at once."""
        self.divergence[tile.rows_of_head] = pair.divergence

    def added_to(self, statistics: dict[str, Tensor], without: Tensor) -> dict[str, Tensor]:
        """The statistics of the other loss, `without` [N] whose gradient these tokens are, with this part of it."""
        divergence = torch.where(self.mask, self.divergence, 0.0)
        loss = statistics["loss"] + (self.weights * divergence).sum()
        mean = formulas.over_tokens(divergence.sum(), statistics)
        zero = formulas.over_tokens((without & (self.weights == 0)).sum(), statistics)
        return {**statistics, "loss": loss, "distillation": mean, "zero_gradient_fraction": zero}


def chunked_divergence(
    heads: TwoHeads,
    passes: RowPasses,
    *,
    kind: str,
    beta: float,
    weights: Tensor,
    chunk_bytes: int | None,
    wanted: Wanted,
    rounded: bool = True,
) -> tuple[Tensor, Gradients]:
    """The divergences [R] of the rows, and the gradients of the student's hidden, weight and bias that are wanted.

    The gradients are those of sum(weights * divergence), `weights` [R]; that of the weight is fp32 if not `rounded`.
    """
    memory, student = heads.chunk_memory(passes, chunk_bytes), heads.student
    scale = power_of_two_scale(student, weights, exponent=_FP16_EXPONENT)
    gradients = HeadGradients(student, wanted, one_group=len(memory[0]) >= len(weights), scale=scale, rounded=rounded)
    upstream = (weights if scale is None else weights * scale) if any(wanted) else None
    divergences = []
    for tile, teacher in zip(student.tiles(memory[0]), heads.teacher.tiles(memory[1]), strict=True):
        divergence, gradient = passes.divergence_gradient_(
            tile.logits,
            teacher.logits,
            kind=kind,
            beta=beta,
            upstream=None if upstream is None else upstream[tile.rows],
            student_head=tile.transform,
            teacher_head=teacher.transform,
            dtype=student.gemm_dtype,
        )
        if gradient is not None:
            gradients.add_logits_gradient(tile, gradient)
        divergences.append(divergence)
    return torch.cat(divergences), gradients.finish()
