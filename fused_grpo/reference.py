"""The maths, once, in plain torch: the oracle that every fast path is held against, and their documentation.

Letters: N tokens, D hidden size, V vocabulary. Any floating dtype works, fp64 included; autograd does the derivatives.

**Log-probs.** The logit of token v in row n is

    z = softcap(logit_scale * (h_n . w_v + b_v)) / temperature_n        softcap(x) = c * tanh(x / c)

    log p = z_target - logsumexp(z)          H = -sum_v p_v log p_v

with the gradients that the kernels write by hand (g = dL/d log p, g_H = dL/dH, t the target):

    dL/dz_v = g * ([v = t] - p_v) - g_H * p_v * (log p_v + H)

    dL/d(h.w_v + b_v) = dL/dz_v / temperature * (1 - tanh^2(x / c)) * logit_scale

**Loss.** With d = log p - log p_old and the ratio r = exp(d), one token costs

    l = -min(r * A, clip(r, 1 - epsilon, 1 + epsilon_high) * A) + beta * kl
    kl = exp(q) - q - 1        q = log p_ref - log p

(kl times r with `use_bias_correction_kl`), so that

    dl/d log p = -r * A, or 0 where clipped (A > 0 and r > 1 + epsilon_high, or A < 0 and r < 1 - epsilon)
               + beta * (1 - exp(q)), or + beta * r * (kl + 1 - exp(q)) where bias-corrected

and the loss is sum(weights * l). The weights hold the mask and the normaliser of the loss type (`_layout.py`), which is
what makes the sum over micro-batches equal the loss of the whole step. On policy, `old_logprobs=None` stands for
`logprobs.detach()`: r is 1 and still carries the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """fp32 for anything narrower: logits are never rounded below it."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def transform_logits(
    raw: Tensor, *, bias: Tensor | None, temperature: Tensor, logit_scale: float, softcap: float | None
) -> Tensor:
    """z [N, V] from raw = h.w [N, V], bias [V] and temperature [N]."""
    x = logit_scale * (raw if bias is None else raw + bias.to(raw.dtype))
    capped = x if softcap is None else softcap * torch.tanh(x / softcap)
    return capped / temperature.to(raw.dtype)[:, None]


def logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None,
    temperature: Tensor,
    logit_scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """log p of the targets and the entropy, both [N], through full logits [N, V] and autograd."""
    dtype = compute_dtype(hidden)
    raw = hidden.to(dtype) @ as_rounded(weight, hidden.dtype).to(dtype).t()
    z = transform_logits(raw, bias=bias, temperature=temperature, logit_scale=logit_scale, softcap=softcap)
    log_p = torch.log_softmax(z, dim=-1)
    # A banned token, at -inf, adds nothing to the entropy; 0 * -inf would.
    finite = log_p.masked_fill(log_p == -torch.inf, 0.0)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * finite).sum(-1)


def as_rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`weight` with the values that `dtype` would give it, and a gradient that is not rounded."""
    if weight.dtype == dtype:
        return weight
    # Neighbours differ by a number that both can hold, so the sum is the rounded value to the bit.
    return weight + (weight.detach().to(dtype).to(weight.dtype) - weight.detach())


def token_loss(
    logprobs: Tensor,
    *,
    advantages: Tensor,
    weights: Tensor,
    mask: Tensor,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    sampling_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    epsilon_low: float,
    epsilon_high: float,
    beta: float,
    bias_correction_kl: bool,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss (0-d, differentiable) and its statistics: detached 0-d sums over the mask, for `finish_metrics`.

    All inputs are [N]. Masked tokens are replaced before any arithmetic, so NaN or inf there touches neither the loss
    nor a gradient.
    """
    logprobs, advantages, weights = (torch.where(mask, x, 0.0) for x in (logprobs, advantages, weights))
    current = logprobs.detach()
    ratio = torch.exp(logprobs - (current if old_logprobs is None else torch.where(mask, old_logprobs, 0.0)))
    policy = -torch.minimum(ratio * advantages, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * advantages)
    kl = torch.zeros_like(logprobs)
    if ref_logprobs is not None:
        log_ratio_ref = torch.where(mask, ref_logprobs - logprobs, 0.0)
        kl = torch.expm1(log_ratio_ref) - log_ratio_ref
    # With beta = 0 the KL is a metric and nothing else: an infinite one must not become 0 * inf in the loss.
    regulariser = beta * (kl * ratio if bias_correction_kl else kl) if beta else 0.0
    loss = (weights * (policy + regulariser)).sum()

    ratio, on = ratio.detach(), mask.to(logprobs.dtype)
    difference = torch.zeros_like(current)
    if sampling_logprobs is not None:
        difference = torch.where(mask, current - sampling_logprobs, 0.0).abs()
    statistics = {
        "loss": loss.detach(),
        "policy_loss": (weights * policy).sum().detach(),
        "num_tokens": on.sum(),
        "kl": kl.sum().detach(),
        "entropy": torch.zeros_like(on).sum() if entropy is None else torch.where(mask, entropy, 0.0).sum().detach(),
        "ratio": (ratio * on).sum(),
        "clip_low": (on * ((ratio < 1 - epsilon_low) & (advantages < 0))).sum(),
        "clip_high": (on * ((ratio > 1 + epsilon_high) & (advantages > 0))).sum(),
        "sampling_difference": difference.sum(),
        "sampling_difference_max": largest(difference).clamp_min(0.0),
        "ratio_min": -largest(torch.where(mask, -ratio, -torch.inf)),
        "ratio_max": largest(torch.where(mask, ratio, -torch.inf)),
    }
    return loss, statistics


def largest(values: Tensor) -> Tensor:
    """max() that gives -inf for no values at all."""
    return values.max() if values.numel() else values.new_tensor(-torch.inf)


def merge_statistics(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The statistics of several chunks as if they had been one: sums add, extremes compete."""
    merged = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
    reduce = {"_max": torch.amax, "_min": torch.amin}
    return {name: reduce.get(name[-4:], torch.sum)(values, 0) for name, values in merged.items()}


def finish_metrics(
    statistics: dict[str, Tensor], *, has_ref: bool, has_sampling: bool, has_entropy: bool
) -> dict[str, Tensor]:
    """Means over tokens from the sums; what was not given as input is left out. Extremes of no tokens are infinite."""
    num_tokens = statistics["num_tokens"]
    per_token = 1.0 / num_tokens.clamp_min(1.0)
    metrics = {
        "policy_loss": statistics["policy_loss"],
        "num_tokens": num_tokens,
        "ratio_mean": statistics["ratio"] * per_token,
        "ratio_min": statistics["ratio_min"],
        "ratio_max": statistics["ratio_max"],
        "clip_ratio_low": statistics["clip_low"] * per_token,
        "clip_ratio_high": statistics["clip_high"] * per_token,
        "clip_ratio_region": (statistics["clip_low"] + statistics["clip_high"]) * per_token,
    }
    if has_entropy:
        metrics["entropy"] = statistics["entropy"] * per_token
    if has_ref:
        metrics["kl"] = statistics["kl"] * per_token
    if has_sampling:
        metrics["sampling_difference_mean"] = statistics["sampling_difference"] * per_token
        metrics["sampling_difference_max"] = statistics["sampling_difference_max"]
    return metrics
