"""Log-probs with speculative gradients: three GEMMs for a loss that other code computes from the log-probs.

A log-prob op does not know its upstream gradient in the forward pass, so it recomputes the logits, 4U with a trainable
head. But if the GRPO loss that follows is known, its gradient is known, too. `speculative_logprobs` computes dH and dW
for this speculative gradient while the logits are in memory, 3U. The backward pass compares it with the upstream
gradient:

    upstream = s * speculative   (within rounding, s one number)   the result is the speculative dH and dW, times s
    otherwise                                                      the logits are recomputed for the real gradient, 5U

So the gradients are right for any use of the log-probs; speculation only makes them cheaper.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_grpo._maths.formulas import LossInputs
from fused_grpo._maths.statistics import full_precision
from fused_grpo.config import GRPOLossConfig
from fused_grpo.head.checks import differentiated_once, outside_graphs, save_for_backward, saved_tensors
from fused_grpo.head.chunked_loss import ChunkedLoss, LossPlan, chunked_loss, scaled
from fused_grpo.head.head import Head, Wanted
from fused_grpo.head.logprob_plans import rows_of
from fused_grpo.logprobs import LogProbs, linear_logprobs_and_entropy
from fused_grpo.passes import choice

TOLERANCE = 1e-4
"""The largest difference between the upstream gradient of a token and the speculative one, relative to the sum of its
own size and the median size. Log-ratios of a long sequence are summed in fp32."""

logger = logging.getLogger("fused_grpo")


@outside_graphs
def speculative_logprobs(
    head: Head,
    inputs: LossInputs,
    config: GRPOLossConfig,
    *,
    chunk_bytes: int | None = None,
    impl: choice.Impl = "auto",
) -> LogProbs:
    """Log-probs and entropies [N] of the head's rows, for a caller who computes the loss of `config` from them.

    Args:
        head: as `flatten_head` gives it; targets in [0, V).
        inputs: of that loss, as `loss_inputs` gives them. Masked rows have no gradient, but they get log-probs.
        config: the loss.
        chunk_bytes, impl: as in `fused_linear_grpo_loss`, but for "reference".

    Returns:
        fp32 (fp64 for fp64 inputs), differentiable with respect to the head's hidden states, weight and bias, once.

    Memory: as `fused_linear_grpo_loss`, and hidden states and weight stay saved until the backward pass.

    Raises:
        UnavailableError: impl="triton" where Triton cannot run.
        UnsupportedError: create_graph=True, in the backward pass.
    """
    options = {"impl": choice.choose(impl, head.hidden), "chunk_bytes": chunk_bytes}
    return LogProbs(*_Speculative.apply(head.hidden, head.weight, head.bias, head, inputs, config, options))  # type: ignore[no-untyped-call]


class _Speculative(torch.autograd.Function):
    """Keeps the gradients of the speculated loss, and the inputs to recompute them for another loss."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        inputs: LossInputs,
        config: GRPOLossConfig,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        plan = LossPlan(options["chunk_bytes"], Wanted(*ctx.needs_input_grad[:3]), "all")
        with full_precision(hidden):
            result = chunked_loss(head, inputs, config, choice.passes(options["impl"]), plan)
        ctx.set_materialize_grads(False)
        save_for_backward(ctx, (hidden, weight, bias, head.targets, head.temperature))
        ctx.speculative, ctx.gradients = result.upstream, result.gradients
        ctx.options = {**head.transform(), **options}
        return _with_masked_rows(result, head, inputs, options)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        # Raises in a second backward pass, whose gradients are freed already, and where one of them was changed.
        saved = saved_tensors(ctx)
        factor = factor_between(ctx.speculative, upstream)
        kept = torch._C._autograd._get_current_graph_task_keep_graph()
        gradients = ctx.gradients
        if not kept:
            ctx.gradients = None
        if factor is None:
            del gradients
            logger.info("the gradient from upstream is not the speculative one: the logits are recomputed for it")
            return *_from_scratch(ctx, saved, upstream), None, None, None, None
        passes = choice.passes(ctx.options["impl"])
        return *scaled(gradients, factor, passes, in_place=not kept), None, None, None, None


def _with_masked_rows(
    result: ChunkedLoss, head: Head, inputs: LossInputs, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of all rows: the caller may also read those of masked rows."""
    assert result.entropy is not None
    left_out = rows_of(~inputs.tokens.mask)
    if left_out is not None and not len(left_out):
        return result.logprobs, result.entropy
    rows = slice(None) if left_out is None else left_out
    arguments = {**head.transform(), "temperature": head.temperature[rows], **options}
    with torch.no_grad():
        values = linear_logprobs_and_entropy(head.hidden[rows], head.weight, head.targets[rows], **arguments)
    logprobs, entropy = result.logprobs.clone(), result.entropy.clone()
    logprobs[rows], entropy[rows] = values
    return logprobs, entropy


def factor_between(guess: tuple[Tensor, Tensor | None], upstream: tuple[Tensor | None, ...]) -> Tensor | None:
    """The number s, 0-d, with upstream = s * guess; None where there is none. Synchronizes once.

    The tolerance of each token is relative to its own size, plus the median size for tokens whose terms cancel. It is
    not relative to the largest gradient, which would hide differences of the other tokens.
    """
    expected, actual = (
        torch.cat([torch.zeros_like(guess[0]) if x is None else x for x in pair]) for pair in (guess, upstream)
    )
    if not len(expected):
        return expected.new_ones(())
    sizes = expected.abs()
    # Gathered: indexing with one number would synchronize.
    largest, at = sizes.max(0, keepdim=True)
    ratio = torch.where(largest > 0, actual.gather(0, at) / expected.gather(0, at), 1.0)[0]
    # An unscaled gradient differs by rounding only: with a factor of exactly 1 it is not multiplied.
    ratio = torch.where((ratio - 1).abs() <= TOLERANCE, 1.0, ratio)
    middling = torch.where(sizes > 0, sizes, torch.nan).nanmedian().nan_to_num(0.0)
    near = (actual - ratio * expected).abs() <= TOLERANCE * ratio.abs() * (sizes + middling)
    return ratio if near.all() else None


def _from_scratch(ctx: Any, saved: Sequence[Any], upstream: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The gradients of hidden, weight and bias for the real upstream gradient, from recomputed logits."""
    needed = ctx.needs_input_grad[:3]
    hidden, weight, bias = (
        None if leaf is None else leaf.detach().requires_grad_(wanted)
        for leaf, wanted in zip(saved, needed, strict=False)
    )
    assert hidden is not None
    assert weight is not None
    # Autocast was applied in the forward pass, if it was on there; it may be on here alone.
    with torch.enable_grad(), full_precision(hidden):
        options = {**ctx.options, "bias": bias, "temperature": saved[4]}
        values = linear_logprobs_and_entropy(hidden, weight, saved[3], **options)
        loss = sum(
            (value * gradient).sum() for value, gradient in zip(values, upstream, strict=True) if gradient is not None
        )
    if isinstance(loss, Tensor):
        loss.backward()
    return tuple(None if leaf is None else leaf.grad for leaf in (hidden, weight, bias))
