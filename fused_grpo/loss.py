"""`grpo_loss`: the GRPO loss of given log-probs. Its gradient is computed in the forward pass."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fused_grpo._maths import factors, formulas
from fused_grpo._maths.statistics import compute_dtype
from fused_grpo.config import DEFAULT_LOSS, GRPOLossConfig
from fused_grpo.errors import InputError, UnsupportedError
from fused_grpo.head.checks import (
    LossArguments,
    check_plan,
    check_tensors,
    checked_config,
    loss_inputs,
    outside_graphs,
)
from fused_grpo.head.chunked_loss import AttachGradients, loss_and_gradient
from fused_grpo.passes import choice


class GRPOLossOutput(NamedTuple):
    """A loss, its metrics, and the log-probs that it was computed from."""

    loss: Tensor
    """0-d, fp32 (fp64 for fp64 inputs)."""
    metrics: dict[str, Tensor]
    """Detached 0-d tensors of this call: `policy_term` (the policy's part of the loss, without all that is added to
    it), and means over its unmasked tokens, except for counts and extremes: `loss_tokens` (the count), `ratio_mean`,
    `ratio_min`, `ratio_max`, `clip_ratio_low`, `clip_ratio_high`, `clip_ratio_region`, `effective_weight` (the factor
    of the policy term after corrections and masks), `zero_gradient_fraction`, and where their inputs are given
    `entropy` (nats), `kl`, `sampling_difference_mean` and `_max` (|log p - sampling log p|). With score centering
    `centering_sampler_mass` and `centering_trainer_mass` (the probability of the sampler's tokens that were given,
    under each), and `centering_l1` (the sum of |c| over them). The `kl` of "k3" is inf where its sum over the tokens
    is no number of fp32: from log p_ref - log p = 88.7 of one token on. No collective, no synchronization."""
    logprobs: Tensor
    """Detached log-probs in the shape of the tokens. They can be the `old_logprobs` of a second iteration."""


@outside_graphs
def grpo_loss(
    logprobs: Tensor,
    *,
    advantages: Tensor,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    sampling_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    entropy_threshold: float | Tensor | None = None,
    num_tokens: float | Tensor | None = None,
    num_sequences: float | Tensor | None = None,
    num_entropy_tokens: float | Tensor | None = None,
    covariance_selected: Tensor | None = None,
    config: GRPOLossConfig | None = None,
    impl: choice.Impl = "auto",
) -> GRPOLossOutput:
    """The GRPO loss of given log-probs, differentiable with respect to `logprobs` and `entropy`.

    Equals, with r = exp(logprobs - old_logprobs) and m the mask (for "dapo"; docs/loss.md has the others):
        `l = -torch.min(r * A, r.clamp(1 - epsilon, 1 + epsilon_high) * A) + beta * kl`
        `loss = (l * m).sum() / num_tokens`

    Args:
        logprobs: padded [B, T], or packed [N] with `cu_seqlens`. Floating; computed in fp32 (fp64 for fp64).
        advantages: [B], one per sequence, or the shape of `logprobs`, one per token. Packed, they are one per sequence
            where B = N, which differs if a sequence is empty: [N, 1] is always one per token.
        mask: shape of `logprobs`, non-zero for tokens in the loss. It is 0 for padding, for tool outputs, and for
            truncated completions that should not count. None: all tokens are in the loss.
        cu_seqlens: [B+1] int32, the start of each packed sequence, and N.
        old_logprobs: log-probs under the policy that sampled. None: on policy, `logprobs.detach()`.
        ref_logprobs: log-probs under the reference model; needed where `config.beta > 0`.
        sampling_logprobs: the log-probs of the sampler, for `config.sampling_correction`, `config.sequence_rejection`,
            "dppo_*", "ipo" and "dro". A token with NaN is not corrected.
        entropy: per-token entropy (nats), for the metric, `config.entropy_coef` and `config.top_entropy_quantile`.
        entropy_threshold: the least entropy of a token in the loss, for a `config.top_entropy_quantile` over the whole
            optimizer step. None: the quantile of this call's tokens.
        num_tokens: unmasked tokens of the whole step. None: of this call.
        num_sequences: sequences of the whole step ("grpo", "sapo", "gmpo", "luspo", "dr_grpo"). None: of this call.
        num_entropy_tokens: tokens of the whole step with an entropy bonus: those above `config.top_entropy_quantile`.
            None: `num_tokens`, or with a quantile the tokens of this call.
        covariance_selected: shape of `logprobs`, non-zero for the tokens that `config.clip_cov_ratio` or
            `config.kl_cov_ratio` selects from the whole step. None: from the tokens of this call.
        config: the variant and its constants. None: `GRPOLossConfig()`.
        impl: "auto", "triton", "torch" (any device) or "reference" (autograd through the formulas).

    Raises:
        InputError: shapes, dtypes or devices that disagree, or a value out of range.
        UnavailableError: impl="triton" where Triton cannot run.
        UnsupportedError: a config with score centering, which `fused_linear_grpo_loss` has.

    Source: arXiv:2402.03300 eq. 3 (GRPO), arXiv:2503.14476 eq. 8 (DAPO); formulas and names as in TRL.
    """
    config = DEFAULT_LOSS if config is None else checked_config(config)
    if config.score_centering != "off":
        raise UnsupportedError(
            f"got score_centering={config.score_centering!r} with log-probs of the sampled tokens alone; "
            "fix: fused_linear_grpo_loss, which has the logits of others"
        )
    check_plan(impl)
    check_loss_tokens(logprobs, entropy, config)
    dtype = compute_dtype(logprobs)
    given = LossArguments(
        advantages=advantages,
        mask=mask,
        cu_seqlens=cu_seqlens,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        sampling_logprobs=sampling_logprobs,
        entropy_threshold=entropy_threshold,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        num_entropy_tokens=num_entropy_tokens,
        covariance_selected=covariance_selected,
    )
    inputs = loss_inputs(given, logprobs.shape, config, dtype=dtype, device=logprobs.device)
    flat, flat_entropy = (None if x is None else x.reshape(-1).to(dtype) for x in (logprobs, entropy))
    assert flat is not None
    chosen = choice.choose(impl, logprobs)
    passes = choice.passes(chosen)
    upstream, statistics = loss_and_gradient(flat, flat_entropy, inputs, config, passes)
    if chosen == "reference":
        loss = factors.grpo_loss(flat, flat_entropy, inputs, config)[0]
    else:
        attached = (statistics["loss"], upstream, None, passes)
        loss = AttachGradients.apply(*attached, flat, flat_entropy)  # type: ignore[no-untyped-call]
    metrics = formulas.finish_metrics(statistics, inputs, has_entropy=entropy is not None)
    return GRPOLossOutput(loss, metrics, logprobs.detach())


def check_loss_tokens(logprobs: Tensor, entropy: Tensor | None, config: GRPOLossConfig) -> None:
    """Check the log-probs and entropies.

    Raises:
        InputError: dtypes, shapes or devices that cannot be right, or no entropy where the config needs it.
    """
    check_tensors({"entropy": entropy}, logprobs=logprobs)
    for name, tensor in (("logprobs", logprobs), ("entropy", entropy)):
        if tensor is not None and not tensor.is_floating_point():
            raise InputError(f"got {name} of dtype {tensor.dtype}, want a floating dtype")
    if entropy is not None and entropy.shape != logprobs.shape:
        raise InputError(f"got entropy {tuple(entropy.shape)}, want {tuple(logprobs.shape)}: one per token")
    if entropy is None and (config.entropy_coef or config.top_entropy_quantile < 1.0):
        raise InputError(
            f"got entropy_coef={config.entropy_coef} and top_entropy_quantile={config.top_entropy_quantile} without "
            "entropy; fix: pass entropy, which linear_logprobs_and_entropy gives"
        )
