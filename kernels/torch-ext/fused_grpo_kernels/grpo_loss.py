"""The GRPO loss of log-probs, its gradient and all its statistics, in one read of each input.

With d = log p - log p_old, r = exp(d) and q = log p_ref - log p, one token costs

    l = -min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A) + beta kl        kl = exp(q) - 1 - q

(kl times r with `bias_correction_kl`), so that

    dl/d log p = -r A, or 0 where clipped: A > 0 and r > 1 + epsilon_high, or A < 0 and r < 1 - epsilon_low
               + beta (1 - exp(q)),  or bias-corrected  + beta r (kl + 1 - exp(q))

and the loss is sum(weights * l). Because the derivative is closed-form, no backward pass is needed: whoever calls
scales the gradient by the upstream one. Each program leaves its partial sums; the launcher adds them in fp64 and in a
fixed order, so that a count of tokens is exact and two runs agree to the bit.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device import launching_on
from ._tiles import expm1, expm1_minus_x
from .tuning import FUSED_MULTIPLY_ADD, TOKENS_PER_PROGRAM

SUMS = (
    "loss",
    "policy_loss",
    "num_tokens",
    "kl",
    "entropy",
    "ratio",
    "clip_low",
    "clip_high",
    "sampling_difference",
)
LARGEST = ("sampling_difference_max", "ratio_max")
SMALLEST = ("ratio_min",)
STATISTICS = len(SUMS + LARGEST + SMALLEST)


@triton.jit
def _load_masked(values, tokens, mask):
    """Zero where masked: what lies there, NaN or inf, is not even read. None is all zeros."""
    if values is None:
        return tl.zeros(tokens.shape, tl.float32)
    else:
        return tl.load(values + tokens, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["N"])
def _grpo_loss_kernel(
    logprobs,
    advantages,
    weights,
    mask,
    old_logprobs,
    ref_logprobs,
    sampling_logprobs,
    entropy,
    grad_logprobs,
    partials,
    N,
    lowest_ratio: tl.float32,
    highest_ratio: tl.float32,
    beta: tl.float32,
    BIAS_CORRECTION_KL: tl.constexpr,
    STATISTICS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: tiles of BLOCK tokens. A program owns its tokens' gradients and one row of partials; nothing is shared."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = tokens < N
    on = tl.load(mask + tokens, mask=exists, other=0) != 0
    current = _load_masked(logprobs, tokens, on)
    advantage = _load_masked(advantages, tokens, on)
    weight = _load_masked(weights, tokens, on)

    ratio = tl.full([BLOCK], 1.0, tl.float32)
    if old_logprobs is not None:
        ratio = tl.exp(current - _load_masked(old_logprobs, tokens, on))
    clipped_low = (advantage < 0.0) & (ratio < lowest_ratio)
    clipped_high = (advantage > 0.0) & (ratio > highest_ratio)
    used_ratio = tl.where(clipped_low, lowest_ratio, tl.where(clipped_high, highest_ratio, ratio))
    policy = -used_ratio * advantage
    slope = tl.where(clipped_low | clipped_high, 0.0, -ratio * advantage)

    kl = tl.zeros([BLOCK], tl.float32)
    cost = policy
    if ref_logprobs is not None:
        q = _load_masked(ref_logprobs, tokens, on) - current
        kl = expm1_minus_x(q)
        if BIAS_CORRECTION_KL:
            cost += beta * kl * ratio
            slope += beta * ratio * (kl - expm1(q))
        else:
            cost += beta * kl
            slope -= beta * expm1(q)
    tl.store(grad_logprobs + tokens, tl.where(on, weight * slope, 0.0), mask=exists)

    difference = tl.zeros([BLOCK], tl.float32)
    if sampling_logprobs is not None:
        difference = tl.abs(current - _load_masked(sampling_logprobs, tokens, on))
    one = on.to(tl.float32)
    row = partials + tl.program_id(0).to(tl.int64) * STATISTICS
    tl.store(row + 0, tl.sum(weight * cost))
    tl.store(row + 1, tl.sum(weight * policy))
    tl.store(row + 2, tl.sum(one))
    tl.store(row + 3, tl.sum(kl))
    tl.store(row + 4, tl.sum(_load_masked(entropy, tokens, on)))
    tl.store(row + 5, tl.sum(tl.where(on, ratio, 0.0)))
    tl.store(row + 6, tl.sum(clipped_low.to(tl.float32)))
    tl.store(row + 7, tl.sum(clipped_high.to(tl.float32)))
    tl.store(row + 8, tl.sum(difference))
    tl.store(row + 9, tl.max(difference))
    tl.store(row + 10, tl.max(tl.where(on, ratio, float("-inf"))))
    tl.store(row + 11, tl.min(tl.where(on, ratio, float("inf"))))


def grpo_token_loss(
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
    """The gradient of sum(weights * l) and the sums behind every metric.

    Args:
        logprobs, advantages, weights: [N] fp32.
        mask: [N] bool. Where False, the inputs are not read: zero gradient, no part in any statistic.
        old_logprobs: [N] fp32, or None for the current ones detached (ratio 1, which still carries the gradient).
        ref_logprobs, sampling_logprobs, entropy: [N] fp32, or None to leave their terms out.
        epsilon_low, epsilon_high: the ratio is clipped to [1 - epsilon_low, 1 + epsilon_high].
        beta: weight of the KL term.
        bias_correction_kl: multiply the KL term by the (differentiable) ratio.

    Returns:
        (dL/dlogprobs [N] fp32, statistics). The statistics are 0-d fp32: "loss" and "policy_loss" weighted sums,
        "sampling_difference_max", "ratio_min" and "ratio_max" extremes over the mask (the ratio's are inf and -inf
        where nothing is unmasked), the others sums over the mask.

    Memory: 12 fp32 numbers per 1024 tokens.
    """
    N, device = logprobs.shape[0], logprobs.device
    grad_logprobs = torch.empty(N, dtype=torch.float32, device=device)
    # One program even for no tokens: it writes the sums of nothing.
    programs = max(triton.cdiv(N, TOKENS_PER_PROGRAM), 1)
    partials = torch.empty(programs, STATISTICS, dtype=torch.float32, device=device)
    inputs = (logprobs, advantages, weights, mask, old_logprobs, ref_logprobs, sampling_logprobs, entropy)
    with launching_on(device):
        _grpo_loss_kernel[(programs,)](
            *(None if vector is None else vector.contiguous() for vector in inputs),
            grad_logprobs,
            partials,
            N,
            1.0 - epsilon_low,
            1.0 + epsilon_high,
            beta,
            BIAS_CORRECTION_KL=bias_correction_kl,
            STATISTICS=STATISTICS,
            BLOCK=TOKENS_PER_PROGRAM,
            **FUSED_MULTIPLY_ADD,
        )
    return grad_logprobs, _statistics(partials)


def _statistics(partials: Tensor) -> dict[str, Tensor]:
    """The columns of partials [programs, STATISTICS] over all programs."""
    sums, largest, smallest = partials.split((len(SUMS), len(LARGEST), len(SMALLEST)), dim=1)
    reduced = torch.cat([sums.sum(0, dtype=torch.float64).float(), largest.amax(0), smallest.amin(0)])
    return dict(zip(SUMS + LARGEST + SMALLEST, reduced.unbind(), strict=True))
