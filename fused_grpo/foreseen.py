"""Log-probs whose gradient is taken before it is asked for: how a loss that somebody else computes costs three GEMMs.

A log-prob op cannot know its upstream gradient in the forward pass, so it makes the logits twice, 4U with a trainable
head. But where it is known which GRPO loss will be computed from the log-probs, that gradient is known, too:
`foreseen_logprobs` takes dH and dW for it while the logits are there, 3U. In the backward pass, what comes from
upstream is compared with what was foreseen:

    upstream = s * foreseen   (within rounding, s one number)   the gradients are there, times s
    anything else                                               the logits are made again for the real one, 5U

So whatever the caller does with the log-probs, the gradients are right; foreseeing it only makes them cheap.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from fused_grpo import _impl
from fused_grpo._checks import check_differentiated_once
from fused_grpo._graphs import outside_graphs
from fused_grpo._layout import LossInputs
from fused_grpo.config import GRPOLossConfig
from fused_grpo.fused_loss import scaled
from fused_grpo.head import Head, full_precision
from fused_grpo.logprobs import LogProbs, linear_logprobs_and_entropy
from fused_grpo.loss_plans import fused_loss

TOLERANCE = 1e-5
"""How far the upstream gradient of a token may be from the foreseen one, relative to the largest: fp32 rounding."""

logger = logging.getLogger("fused_grpo")


@outside_graphs
def foreseen_logprobs(
    head: Head,
    inputs: LossInputs,
    config: GRPOLossConfig,
    *,
    chunk_bytes: int | None = None,
    impl: _impl.Impl = "auto",
) -> LogProbs:
    """Log-probs and entropies [N] of the head's rows, for a caller who computes the loss of `config` from them.

    Args:
        head: as `flatten_head` gives it; targets in [0, V).
        inputs: of that loss, as `loss_inputs` gives them. Rows that they mask are not scored: their log-prob is the old
            one, 0 without it, and their entropy 0.
        config: the loss.
        chunk_bytes, impl: as in `fused_linear_grpo_loss`, but for "reference".

    Memory: as `fused_linear_grpo_loss`, and hidden states and weight stay saved until the backward pass.
    """
    options = {"passes": _impl.passes(_impl.choose(impl, head.hidden)), "chunk_bytes": chunk_bytes}
    return LogProbs(*_Foreseen.apply(head.hidden, head.weight, head.bias, head, inputs, config, options))  # type: ignore[no-untyped-call]


class _Foreseen(torch.autograd.Function):
    """The gradients of a loss to come, kept with what is needed if another one comes."""

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
        wanted = dict(zip(("hidden", "weight", "bias"), ctx.needs_input_grad, strict=False))
        with full_precision(hidden):
            done = fused_loss(head, inputs, config, options.pop("passes"), **options, wanted=wanted, score="all")
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias)
        ctx.foreseen, ctx.gradients = done.upstream, done.gradients
        ctx.targets, ctx.options = head.targets, head.row_arguments(slice(None)) | {"bias": None}
        old = inputs.tokens.old_logprobs
        logprobs = torch.where(inputs.tokens.mask, done.logprobs, 0.0 if old is None else old)
        assert done.entropy is not None
        return logprobs, done.entropy

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        check_differentiated_once()
        leaves = ctx.saved_tensors  # raises where they, and the gradients, are gone already
        factor = factor_between(ctx.foreseen, upstream)
        if factor is None:
            logger.info("the gradient from upstream is not that of the loss foreseen: the logits are made again for it")
            return *_from_scratch(ctx, leaves, upstream), None, None, None, None
        kept = torch._C._autograd._get_current_graph_task_keep_graph()
        gradients = scaled(ctx.gradients, factor, in_place=not kept)
        if not kept:
            ctx.gradients = None
        return *gradients, None, None, None, None


def factor_between(foreseen: tuple[Tensor, Tensor | None], upstream: tuple[Tensor | None, ...]) -> Tensor | None:
    """The number s, 0-d, with upstream = s * foreseen; None where there is none. Waits for the device."""
    expected, actual = (
        torch.cat([torch.zeros_like(foreseen[0]) if x is None else x for x in pair]) for pair in (foreseen, upstream)
    )
    if not expected.any():
        return None if actual.any() else expected.new_ones(())
    largest = expected.abs().argmax()
    ratio = actual[largest] / expected[largest]
    # A gradient that nobody has scaled differs by rounding only, and need not be touched.
    ratio = torch.where((ratio - 1).abs() <= TOLERANCE, 1.0, ratio)
    error = (actual - ratio * expected).abs().amax()
    return ratio if error <= TOLERANCE * actual.abs().amax() else None


def _from_scratch(
    ctx: Any, leaves: tuple[Tensor | None, ...], upstream: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """The gradients of hidden, weight and bias for what really came."""
    asked = ctx.needs_input_grad[:3]
    hidden, weight, bias = (
        None if leaf is None else leaf.detach().requires_grad_(wanted)
        for leaf, wanted in zip(leaves, asked, strict=True)
    )
    assert hidden is not None
    assert weight is not None
    with torch.enable_grad():
        values = linear_logprobs_and_entropy(hidden, weight, ctx.targets, **{**ctx.options, "bias": bias})
        loss = sum((value * some).sum() for value, some in zip(values, upstream, strict=True) if some is not None)
    if isinstance(loss, Tensor):
        loss.backward()
    return tuple(None if leaf is None else leaf.grad for leaf in (hidden, weight, bias))
