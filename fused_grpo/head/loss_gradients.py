"""The gradient of the GRPO loss in the log-probs, taken together with its value. Both public losses use it.

The derivatives have a closed form (`formulas.py`), so one pass over the tokens gives the loss, its metrics and
d loss / d log p. The backward pass (`AttachGradients`) only scales the gradients by the upstream one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fused_grpo._maths import formulas
from fused_grpo._maths.inputs import LossInputs
from fused_grpo._maths.statistics import Upstream
from fused_grpo.config import GRPOLossConfig, TokenTerms
from fused_grpo.head.checks import differentiated_once
from fused_grpo.passes import torch_passes
from fused_grpo.passes.protocol import RowPasses
from fused_grpo.passes.torch_passes.row_passes import transformed


def value_and_gradient(
    logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs, *, config: GRPOLossConfig, passes: RowPasses
) -> tuple[Upstream, Any]:
    """The gradients, and sums for `statistics_of`, from the log-probs [N] and entropies [N] of some tokens."""
    # The torch path runs a small backward pass of its own. Hooks of the caller must not see its saved tensors: those
    # of activation checkpointing would run the whole region again to recompute them.
    hooks = nullcontext() if transformed() else saved_tensors_hooks(_unchanged, _unchanged)
    with torch.no_grad(), hooks:
        logprobs, factors = logprobs.detach(), formulas.token_factors(logprobs, entropy, inputs, config)
        of_sequence, entropy_weights = config.ratio_of_sequence, factors["entropy_weights"]
        gradient, of_ratio, sums = passes.grpo_token_loss(
            logprobs,
            log_ratio=formulas.sequence_log_ratio(logprobs, inputs, config) if of_sequence else None,
            inputs={
                **inputs.tokens.rows(slice(None)),
                **factors,
                "entropy": None if entropy is None else entropy.detach(),
            },
            terms=TokenTerms.of(config),
        )
        if of_ratio is not None:
            gradient = gradient + formulas.share_of_ratio(logprobs, of_ratio, inputs, config)
        upstream = None if entropy_weights is None else -torch.where(inputs.tokens.mask, entropy_weights, 0.0)
        return Upstream(gradient, upstream), sums


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def statistics_of(sums: Sequence[Any], upstream: Upstream, mask: Tensor, passes: RowPasses) -> dict[str, Tensor]:
    """The statistics of all tokens, and the number of unmasked ones without a gradient."""
    zero = (mask > upstream.have_gradient()).sum()  # in the mask and without: one operation on two bools
    return {**passes.token_statistics(sums), "zero_gradient": zero.to(upstream.logprobs.dtype)}


class AttachGradients(torch.autograd.Function):
    """A loss whose gradients in `leaves` are known: the backward pass multiplies them by the upstream gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: Tensor,
        gradients: Sequence[Tensor | None],
        weight_main_grad: Tensor | None,
        passes: RowPasses,
        *leaves: Tensor | None,
    ) -> Tensor:
        ctx.gradients, ctx.weight_main_grad, ctx.passes = list(gradients), weight_main_grad, passes
        return loss.clone()

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "Trying to backward through the loss a second time; its gradients were handed over the first time; "
                "fix: retain_graph=True on the first backward pass"
            )
        gradients = ctx.gradients.copy()
        if ctx.weight_main_grad is not None and gradients[1] is not None:
            ctx.weight_main_grad.addcmul_(gradients[1], upstream.to(gradients[1].dtype))
            gradients[1] = None
        kept = torch._C._autograd._get_current_graph_task_keep_graph()
        ctx.gradients = ctx.gradients if kept else None
        return None, None, None, None, *scaled(gradients, upstream, ctx.passes, in_place=not kept)


def scaled(
    gradients: Sequence[Tensor | None], factor: Tensor, passes: RowPasses, *, in_place: bool
) -> list[Tensor | None]:
    """Gradients times a 0-d factor. In place, autograd can take them as `.grad` without a copy."""
    own = (gradient if gradient is None or in_place else gradient.clone() for gradient in gradients)
    return [gradient if gradient is None else _scaled_in_place(gradient, factor, passes) for gradient in own]


def _scaled_in_place(gradient: Tensor, factor: Tensor, passes: RowPasses) -> Tensor:
    scale_: Callable[[Tensor, Tensor], Tensor] = (passes if gradient.is_contiguous() else torch_passes).scale_
    return scale_(gradient, factor)
