"""`fused_linear_divergence`: distillation of one language-model head into another, without the logits of either.

`chunked_divergence.py` has the algorithm; this file has the arguments and autograd. As in `fused_loss.py`, the
gradients are taken in the forward pass and scaled in the backward pass; use `torch.no_grad()` for evaluation.
`Distillation` is the same divergence as a term of `fused_linear_grpo_loss`.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fused_grpo._maths import distributions
from fused_grpo._maths.formulas import LossInputs
from fused_grpo._maths.statistics import full_precision
from fused_grpo.config import LARGEST, GRPOLossConfig
from fused_grpo.errors import InputError, UnsupportedError
from fused_grpo.head.checks import (
    HeadOptions,
    check_main_grad,
    check_normaliser,
    check_plan,
    check_temperature_values,
    check_tensors,
    is_number,
    may_synchronize,
    outside_graphs,
)
from fused_grpo.head.chunked_divergence import Teacher, TwoHeads, chunked_divergence
from fused_grpo.head.chunked_loss import AttachGradients
from fused_grpo.head.head import Head, Wanted, flatten_head
from fused_grpo.head.logprob_plans import rows_of
from fused_grpo.passes import choice

DivergenceKind = Literal["reverse_kl", "forward_kl", "jsd"]


class DivergenceOutput(NamedTuple):
    """The loss, and the divergence of each token."""

    loss: Tensor
    """0-d, differentiable: the sum of the divergences over the normaliser."""
    divergence: Tensor
    """The shape of the tokens, detached, in nats, never negative, 0 where masked."""


@outside_graphs
def fused_linear_divergence(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    kind: DivergenceKind = "reverse_kl",
    beta: float = 0.5,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    num_tokens: float | Tensor | None = None,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
    weight_main_grad: Tensor | None = None,
    chunk_bytes: int | None = None,
    impl: choice.Impl = "auto",
) -> DivergenceOutput:
    """The divergence of a student from a teacher over the whole vocabulary, with gradients for the student.

    Equals: `p, q = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)`
            `divergence = (p.exp() * (p - q)).sum(-1)    # reverse_kl`
            `loss = divergence[mask].sum() / num_tokens`

    Args:
        student_hidden, teacher_hidden: [..., D] of the same tokens, fp32, bf16 or fp16 (fp64 both, without Triton). D
            and dtype may differ.
        student_weight, teacher_weight: [V, D], nn.Linear's layout, of the same vocabulary; of another dtype than the
            hidden states, they are cast to theirs. Nothing of the teacher gets a gradient.
        kind: with p of the student and q of the teacher, "reverse_kl" is KL(p | q), "forward_kl" is KL(q | p), and
            "jsd" is beta KL(q | m) + (1 - beta) KL(p | m) with m = (1 - beta) p + beta q.
        beta: of "jsd", between 0 and 1. (TRL's beta of 0 is "forward_kl" here, and 1 is "reverse_kl".)
        temperature: divides the logits of both; a number, or one per token. Not differentiated, and no factor
            temperature^2 multiplies the loss.
        mask: [...], nonzero for the tokens of the loss; None for all. Others cost nothing, whatever they hold.
        num_tokens: what the sum is divided by, of the whole optimizer step. None: the unmasked tokens of this call.
        student_bias, teacher_bias: [V], any floating dtype.
        student_logit_scale, teacher_logit_scale, student_softcap, teacher_softcap: as in `linear_logprobs`.
        weight_main_grad: [V, D] fp32, contiguous: the backward pass adds dW of the student to it, unrounded, and
            `student_weight` itself gets no gradient.
        chunk_bytes: budget for the chunks of logits that exist at a time, in bytes: two, or three with a
            `student_softcap`. None: 320 MiB on a CPU; on a GPU for each of them that of `fused_linear_grpo_loss`.
        impl: "auto", "triton", "torch" (any device) or "reference" (full logits and autograd).

    Returns:
        `DivergenceOutput(loss, divergence)`, fp32 (fp64 for fp64 inputs).

    Numerics: logits and all reductions in fp32; equal logits give exactly 0; a token that the models are almost certain
        of keeps its divergence and gradient. Two runs are bitwise equal. The error of "jsd" grows as 1 / beta near 0
        and as 1 / (1 - beta) near 1; a token that is more than e^60 (e^600 in fp64) times less probable than the most
        probable one counts as that. A KL is infinite if a token has probability in its first argument alone (by a
        bias of -inf in the other); gradients may be NaN then.
    Memory: the chunks, O(N), the requested gradients and their fp32 accumulators, as in `fused_linear_grpo_loss`.

    Raises:
        InputError: shapes, dtypes, devices or values that cannot be right.
        UnavailableError: impl="triton" where Triton cannot run.
        UnsupportedError: torch.func and forward-mode AD; create_graph=True, in the backward pass.

    Source: On-Policy Distillation of Language Models, Agarwal et al. 2023, https://arxiv.org/abs/2306.13649, eq. 1.
    """
    chunk_bytes, _ = check_plan(impl, chunk_bytes)
    check_kind(kind, beta)
    student_options = HeadOptions(student_bias, temperature, student_logit_scale, student_softcap)
    teacher_options = HeadOptions(teacher_bias, 1.0, teacher_logit_scale, teacher_softcap)
    student = head_of("student", student_hidden, student_weight, student_options, mask=mask)
    teacher = head_of("teacher", teacher_hidden, teacher_weight, teacher_options)
    heads = TwoHeads(student, replace(teacher, temperature=student.temperature))
    check_pair(heads, student_hidden, teacher_hidden)
    if isinstance(temperature, Tensor):
        check_temperature_values(heads.student.temperature)
    weights = _weights(student_hidden, mask, num_tokens)
    chosen = choice.choose(impl, student_hidden)
    if weight_main_grad is not None:
        check_main_grad(weight_main_grad, student_weight, chosen)
    index = rows_of(weights != 0)
    # Under capture of a CUDA graph no row is left out, and those that are masked may hold anything.
    masked = None if may_synchronize(weights) else weights == 0
    rows = heads.select(index) if masked is None else heads.blank(~masked)
    weights = weights.to(heads.student.dtype)
    row_weights = weights if index is None else weights[index]
    with full_precision(student_hidden):
        if chosen == "reference":
            divergence = reference_divergence(rows, kind, beta)
            loss, divergence = (row_weights * divergence).sum(), divergence.detach().clamp_min(0.0)
        else:
            passes = choice.passes(chosen)
            wanted = Wanted.of(heads.student)
            with torch.no_grad():
                divergence, gradients = chunked_divergence(
                    rows,
                    passes,
                    kind=kind,
                    beta=beta,
                    weights=row_weights,
                    chunk_bytes=chunk_bytes,
                    wanted=wanted,
                    rounded=weight_main_grad is None,
                )
                loss = (row_weights * divergence).sum()
            leaves = (heads.student.hidden, student_weight, heads.student.bias)
            loss = AttachGradients.apply(loss, gradients, weight_main_grad, passes, *leaves)  # type: ignore[no-untyped-call]
    if index is not None:
        divergence = divergence.new_zeros(len(weights)).index_copy_(0, index, divergence)
    elif masked is not None:
        divergence = divergence.masked_fill(masked, 0.0)
    return DivergenceOutput(loss, divergence.view(student_hidden.shape[:-1]))


def check_kind(kind: str, beta: float) -> None:
    """Check which divergence is wanted.

    Raises:
        InputError: an unknown kind, or a beta that is no share; of "jsd", 0 and 1 neither.
    """
    kinds = get_args(DivergenceKind)
    if not isinstance(kind, str) or kind not in kinds:
        raise InputError(f"got kind={kind!r}, want {', '.join(map(repr, kinds[:-1]))} or {kinds[-1]!r}")
    is_share = is_number(beta, 0.0, 1.0)
    if not is_share or (kind == "jsd" and not 0.0 < beta < 1.0):
        fix = "; fix: kind='forward_kl' for TRL's 0, kind='reverse_kl' for its 1" if is_share else ""
        raise InputError(f"got beta={beta!r}, want a number between 0 and 1{fix}")


def head_of(which: str, hidden: Tensor, weight: Tensor, options: HeadOptions, *, mask: Any = None) -> Head:
    """The head of flat rows, after its checks; errors name the model."""
    check_tensors(**{f"{which}_hidden": hidden, f"{which}_weight": weight})
    targets = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
    try:
        return flatten_head(hidden, weight, targets, options, mask=mask)
    except InputError as error:
        raise type(error)(f"of the {which}: {error}") from None


def check_pair(heads: TwoHeads, student_hidden: Tensor, teacher_hidden: Tensor) -> None:
    """Check that the two models have the same tokens and vocabulary.

    Raises:
        InputError: other leading shapes, vocabularies or devices, or one model in fp64.
    """
    student, teacher = heads.student, heads.teacher
    if student_hidden.shape[:-1] != teacher_hidden.shape[:-1]:
        raise InputError(
            f"got student_hidden {tuple(student_hidden.shape)} and teacher_hidden {tuple(teacher_hidden.shape)}, "
            "want the same tokens: equal shapes but for D"
        )
    if len(student.weight) != len(teacher.weight):
        raise InputError(
            f"got vocabularies of {len(student.weight)} and {len(teacher.weight)}, want one; fix: where one head is "
            "padded with unused tokens, pass its first rows, weight[:V]"
        )
    if student.dtype != teacher.dtype:
        raise InputError(
            f"got a student in {student_hidden.dtype} and a teacher in {teacher_hidden.dtype}, want fp64 for both or "
            "for none; fix: .float()"
        )
    check_tensors(student_hidden=student_hidden, teacher_hidden=teacher_hidden)


def _weights(hidden: Tensor, mask: Tensor | None, num_tokens: float | Tensor | None) -> Tensor:
    """The weight of each token in the loss, [N] fp64 where the device has it, so that counts stay exact."""
    shape = hidden.shape[:-1]
    if mask is None:
        mask = torch.ones(shape, dtype=torch.bool, device=hidden.device)
    check_tensors(student_hidden=hidden, mask=mask)
    if mask.shape != shape:
        raise InputError(f"got mask {tuple(mask.shape)}, want {tuple(shape)}: one per token")
    if num_tokens is not None:
        check_normaliser("num_tokens", num_tokens, hidden.device)
    on = (mask != 0).reshape(-1).double()
    return on / (on.sum().clamp_min(1.0) if num_tokens is None else num_tokens)


def reference_divergence(heads: TwoHeads, kind: str, beta: float) -> Tensor:
    """The divergences [R] through full logits and autograd."""
    both = (heads.student, heads.teacher)
    student, teacher = (distributions.logits(head.hidden_of(), head.weight, **head.transform()) for head in both)
    return distributions.divergence(student, teacher.detach(), kind=kind, beta=beta)


@dataclass(frozen=True, eq=False)
class Distillation:
    """A teacher, and how much the policy's divergence from it counts in a loss; nothing of it gets a gradient.

    Args:
        hidden: [..., D] of the tokens of the policy's `hidden`; D and dtype may differ, fp64 is for both or for none.
        weight: [V, D], of the same vocabulary.
        coef: what the divergences are multiplied by, at least 0.
        kind, beta: as in `fused_linear_divergence`.
        bias, logit_scale, softcap: of the teacher, as in `linear_logprobs`. The policy's temperature divides its
            logits, too.
    """

    hidden: Tensor
    weight: Tensor
    _: KW_ONLY
    coef: float
    kind: DivergenceKind = "reverse_kl"
    beta: float = 0.5
    bias: Tensor | None = None
    logit_scale: float = 1.0
    softcap: float | None = None


def check_together(
    distillation: Distillation, config: GRPOLossConfig, *, score: str, support: Any, process_group: Any
) -> None:
    """Check a distillation, and the loss that it is added to.

    Raises:
        InputError: another type, an unknown kind, or numbers out of range.
        UnsupportedError: a score, a support, a process_group or an entropy bonus that cannot be combined with it.
    """
    if not isinstance(distillation, Distillation):
        raise InputError(f"got distillation of type {type(distillation).__name__}, want a Distillation or None")
    check_kind(distillation.kind, distillation.beta)
    if not is_number(distillation.coef, 0.0, LARGEST):
        raise InputError(f"got coef={distillation.coef!r} of a distillation, want a finite number >= 0")
    obstacles = {
        "a process_group": (process_group is not None, "both distributions whole on each rank"),
        "support": (support is not None, "divergences over the whole vocabulary"),
        "score='needed'": (score == "needed", "every token, since each has a divergence; fix: score='all'"),
        f"entropy_coef={config.entropy_coef}": (config.entropy_coef > 0, "0; kind='reverse_kl' has an entropy bonus"),
    }
    leave_it = "; fix: leave either, or take fused_linear_divergence for a loss of its own"
    for name, (given, want) in obstacles.items():
        if given:
            raise UnsupportedError(f"got distillation with {name}, want {want}{'' if 'fix: ' in want else leave_it}")


def teacher_of(
    distillation: Distillation,
    student: Head,
    hidden: Tensor,
    inputs: LossInputs,
    impl: str,
) -> Teacher:
    """The teacher of a student, whose `hidden` has its own shape, after the checks of both.

    The weight of a token's divergence is that of its loss, so that micro-batches add up in the same way.
    """
    d = distillation
    head = head_of("teacher", d.hidden, d.weight, HeadOptions(d.bias, 1.0, d.logit_scale, d.softcap))
    head = replace(head, temperature=student.temperature)
    check_pair(TwoHeads(student, head), hidden, d.hidden)
    if impl != "reference":  # which rounds it itself; here once for all chunks
        head = replace(head, weight=head.weight.to(head.hidden.dtype))
    weights = d.coef * inputs.tokens.weights
    return Teacher(head, inputs.tokens.mask, weights, torch.zeros_like(weights), d.kind, d.beta, choice.passes(impl))
