"""`Distillation`: a teacher in the pass of the GRPO loss, for `fused_linear_grpo_loss(..., distillation=)`.

`chunked_divergence.py` has the algorithm; this file has the arguments, and what they can be combined with.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fused_grpo import _dispatch
from fused_grpo._checks import is_number
from fused_grpo._loss_inputs import LossInputs
from fused_grpo.chunked_divergence import Teacher, TwoHeads
from fused_grpo.config import GRPOLossConfig
from fused_grpo.divergence import DivergenceKind, check_kind, check_pair, head_of
from fused_grpo.errors import InputError, UnsupportedError
from fused_grpo.head import Head
from fused_grpo.option_types import LARGEST


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


def check_together(distillation: Distillation | None, config: GRPOLossConfig, **options: Any) -> None:
    """Check a distillation, and the loss that it is added to.

    Raises:
        InputError: another type, an unknown kind, or numbers out of range.
        UnsupportedError: `options` (score, support, process_group) or an entropy bonus that cannot be combined with it.
    """
    if distillation is None:
        return
    if not isinstance(distillation, Distillation):
        raise InputError(f"got distillation of type {type(distillation).__name__}, want a Distillation or None")
    check_kind(distillation.kind, distillation.beta)
    if not is_number(distillation.coef, 0.0, LARGEST):
        raise InputError(f"got coef={distillation.coef!r} of a distillation, want a finite number >= 0")
    obstacles = {
        "a process_group": (options["process_group"] is not None, "both distributions whole on each rank"),
        "support": (options["support"] is not None, "divergences over the whole vocabulary"),
        "score='needed'": (options["score"] == "needed", "every token, since each has a divergence; fix: score='all'"),
        f"entropy_coef={config.entropy_coef}": (config.entropy_coef > 0, "0; kind='reverse_kl' has an entropy bonus"),
    }
    for name, (given, want) in obstacles.items():
        if given:
            fix = (
                "" if "fix: " in want else "; fix: leave either, or take fused_linear_divergence for a loss of its own"
            )
            raise UnsupportedError(f"got distillation with {name}, want {want}{fix}")


def teacher_of(
    distillation: Distillation | None,
    student: Head,
    hidden: Tensor,
    temperature: float | Tensor,
    inputs: LossInputs,
    impl: str,
) -> Teacher | None:
    """The teacher of a student, whose `hidden` has its own shape, after the checks of both; None without one.

    The weight of a token's divergence is that of its loss, so that micro-batches add up in the same way.
    """
    if distillation is None:
        return None
    d = distillation
    head = head_of("teacher", d.hidden, d.weight, d.bias, temperature, d.logit_scale, d.softcap)
    check_pair(TwoHeads(student, head), hidden, d.hidden)
    if impl != "reference":  # which rounds it itself; here once for all chunks
        head = replace(head, weight=head.weight.to(head.hidden.dtype))
    weights = d.coef * inputs.tokens.weights
    return Teacher(head, weights, torch.zeros_like(weights), d.kind, d.beta, _dispatch.passes(impl))
