"""`grpo_loss`: the GRPO loss of log-probs that you already have."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fused_grpo import reference
from fused_grpo._layout import token_inputs
from fused_grpo.config import GRPOLossConfig
from fused_grpo.errors import InputError
from fused_grpo.reference import compute_dtype


class GRPOLossOutput(NamedTuple):
    """A loss and what was learnt on the way."""

    loss: Tensor
    """0-d, fp32 (fp64 for fp64 inputs)."""
    metrics: dict[str, Tensor]
    """Detached 0-d tensors of this call, means over its unmasked tokens unless the name says otherwise: `policy_loss`
    (with the weights of the loss), `num_tokens` (the count), `ratio_mean`, `ratio_min`, `ratio_max`, `clip_ratio_low`,
    `clip_ratio_high`, `clip_ratio_region`, and where their inputs are known `entropy` (nats), `kl`,
    `sampling_difference_mean` and `_max` (|log p - sampling log p|). No collective, no synchronisation."""
    logprobs: Tensor
    """Detached log-probs in the shape of the tokens: the `old_logprobs` of a second iteration, at no cost."""


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
    num_tokens: float | Tensor | None = None,
    num_sequences: float | Tensor | None = None,
    config: GRPOLossConfig | None = None,
) -> GRPOLossOutput:
    """The clipped-ratio GRPO loss with its KL term, differentiable with respect to `logprobs`.

    Equals, with r = exp(logprobs - old_logprobs) and m the mask (for "dapo"):
        `l = -torch.min(r * A, r.clamp(1 - epsilon, 1 + epsilon_high) * A) + beta * kl`
        `loss = (l * m).sum() / num_tokens`

    Args:
        logprobs: padded [B, T], or packed [N] with `cu_seqlens`. Floating; computed in fp32 (fp64 for fp64).
        advantages: [B], one per sequence, or the shape of `logprobs`.
        mask: shape of `logprobs`, non-zero for tokens that count. None: all of them.
        cu_seqlens: [B+1] int32, where each packed sequence starts, and N.
        old_logprobs: log-probs under the policy that sampled. None: on policy, `logprobs.detach()`.
        ref_logprobs: log-probs under the reference model; needed where `config.beta > 0`.
        sampling_logprobs: the sampler's own log-probs; measured against `logprobs` in the metrics.
        entropy: per-token entropy (nats), for the metric.
        num_tokens: unmasked tokens of the whole optimizer step ("dapo"). None: of this call.
        num_sequences: sequences of the whole optimizer step ("grpo"). None: of this call.
        config: the variant and its constants. None: `GRPOLossConfig()`.

    Raises:
        InputError: shapes, dtypes or devices that disagree, or a value out of range.

    Source: arXiv:2402.03300 eq. 3 (GRPO), arXiv:2503.14476 eq. 8 (DAPO); formulas and names as in TRL.
    """
    config = GRPOLossConfig() if config is None else config
    if not logprobs.is_floating_point():
        raise InputError(f"got logprobs of dtype {logprobs.dtype}, want a floating dtype")
    if entropy is not None and entropy.shape != logprobs.shape:
        raise InputError(f"got entropy {tuple(entropy.shape)}, want {tuple(logprobs.shape)}: one per token")
    dtype = compute_dtype(logprobs)
    tokens = token_inputs(
        logprobs.shape,
        dtype=dtype,
        device=logprobs.device,
        advantages=advantages,
        mask=mask,
        cu_seqlens=cu_seqlens,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        sampling_logprobs=sampling_logprobs,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        config=config,
    )
    flat_entropy = None if entropy is None else entropy.detach().to(dtype).reshape(-1)
    loss, statistics = reference.token_loss(
        logprobs.reshape(-1).to(dtype), **tokens.rows(slice(None)), entropy=flat_entropy, **config.token_terms()
    )
    metrics = reference.finish_metrics(
        statistics,
        has_ref=ref_logprobs is not None,
        has_sampling=sampling_logprobs is not None,
        has_entropy=entropy is not None,
    )
    return GRPOLossOutput(loss, metrics, logprobs.detach())
