"""The GRPO loss of log-probs, its gradient and all its statistics, in one read of each input.

With d = log p - log p_old (or a given log-ratio), r = exp(d) and the advantage A, the policy term of a token is

    clipped   -min(min(r, delta) A, clip(r, low, high) A)     d/d log r = -r A, or 0 where the branch taken is constant
    cispo     -stop(min(r, epsilon_high)) A log p             d/d log p = -min(r, epsilon_high) A
    sapo      -4 / tau sigmoid(tau (r - 1)) A                 d/d log r = -4 sigmoid (1 - sigmoid) r A
    reinforce -A log p                                        d/d log p = -A
    gmpo      -r A, with the ratio of the sequence given      d/d log r = -r A
    dppo, ipo -min(r, delta) A, 0 where D masks the token     d/d log p = the same

times the sampling correction rho = exp(log p_old - log p_sampling), clipped to its bounds, and times `policy_weights`.
The binary divergence D of p and p_old is |p_old - p| ("dppo_tv", "ipo"), or that of Kullback and Leibler ("dppo_kl").
"ipo" masks whatever the sign of A is. Added to the policy term are `kl_cov_weights` |d|, log_ratio_penalty d^2 / 2 with
the token's own d, and beta kl, or beta r kl with `bias_correction_kl`, where q = log p_ref - log p,

    k1  kl = -q, kl' = 1        k2  kl = q^2 / 2, kl' = -q        k3  kl = exp(q) - 1 - q, kl' = 1 - exp(q)

(with the token's own r, d (r kl) / d log p of k3 is -r q: the terms with r exp(q) cancel), and the loss is
sum(weights * l) - sum(entropy_weights * entropy). The derivatives have a closed form, so no backward pass is needed:
the caller multiplies the gradient by the upstream one. Each program writes its partial sums; another kernel adds them,
in fp64 and in a fixed order.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device import launching_on
from ._tiles import expm1, expm1_minus_x
from .tuning import FUSED_MULTIPLY_ADD, LOSS_WARPS, TOKENS_PER_PROGRAM

SUMS = (
    "loss",
    "policy_term",
    "loss_tokens",
    "kl",
    "entropy",
    "ratio",
    "clip_low",
    "clip_high",
    "effective_weight",
    "sampling_difference",
    "zero_gradient",
)
LARGEST = ("sampling_difference_max", "ratio_max")
SMALLEST = ("ratio_min",)
STATISTICS = len(SUMS + LARGEST + SMALLEST)
PARTIALS, NUM_SUMS = tl.constexpr(STATISTICS), tl.constexpr(len(SUMS))  # of a program
LOSS_TOKENS, RATIO, CLIP_LOW, CLIP_HIGH, DIFFERENCE = (
    tl.constexpr(SUMS.index(name)) for name in ("loss_tokens", "ratio", "clip_low", "clip_high", "sampling_difference")
)
# The results of `token_statistics` by its names, in the order of those columns: sums as they are or over the number of
# tokens, extremes, and the sum of two.
RESULTS = (
    "loss",
    "policy_term",
    "loss_tokens",
    "kl",
    "entropy",
    "ratio_mean",
    "clip_ratio_low",
    "clip_ratio_high",
    "effective_weight",
    "sampling_difference_mean",
    "zero_gradient_fraction",
    "sampling_difference_max",
    "ratio_max",
    "ratio_min",
    "clip_ratio_region",
)
LARGE_Q = tl.constexpr(2.0)  # as in formulas.py
# Partials of programs that are added at a time.
PROGRAMS = 32
INPUTS = (
    "advantages",
    "weights",
    "mask",
    "old_logprobs",
    "ref_logprobs",
    "sampling_logprobs",
    "entropy",
    "entropy_weights",
    "policy_weights",
    "kl_cov_weights",
)

TOKEN_VECTORS = ["logprobs", "log_ratio", *INPUTS, "grad_logprobs", "grad_log_ratio"]


@triton.jit
def _load_masked(values, tokens, mask):
    """The values, 0 where masked: NaN or inf there is not read. None is all zeros."""
    if values is None:
        return tl.zeros(tokens.shape, tl.float32)
    else:
        return tl.load(values + tokens, mask=mask, other=0.0)


@triton.jit
def _at_most(values, bound):
    """`min(values, bound)` that keeps NaN: `tl.minimum` returns the bound, and min.NaN needs sm_80."""
    return tl.where(values > bound, bound, values)


@triton.jit
def _masked_by_divergence(current, old, advantage, lowest, highest, FORM: tl.constexpr):
    """(masked, clipped from below, from above): tokens beyond the bounds that A would move on, or with "ipo" all beyond
    them, of which those where A is 0 lose nothing."""
    p_change = tl.exp(current) - tl.exp(old)
    divergence = tl.abs(p_change)
    if FORM == "dppo_kl":
        # 1 - mu and 1 - p, where their logarithms are finite.
        old_rest, new_rest = tl.maximum(-expm1(old), 1e-37), tl.maximum(-expm1(current), 1e-37)
        divergence = tl.exp(old) * (old - current) + old_rest * (tl.log(old_rest) - tl.log(new_rest))
    falls, rises = (p_change < 0.0) & (divergence > lowest), (p_change > 0.0) & (divergence > highest)
    if FORM == "ipo":
        return falls | rises, falls & (advantage != 0.0), rises & (advantage != 0.0)
    else:
        falls, rises = falls & (advantage < 0.0), rises & (advantage > 0.0)
        return falls | rises, falls, rises


@triton.jit
def _policy(ratio, advantage, current, old, bounds, FORM: tl.constexpr):
    """(policy term, its derivative in log r, its derivative in log p, clipped below, clipped above)."""
    lowest, highest, delta, tau_pos, tau_neg = bounds
    # Floats of a tuple cannot be annotated, and without annotation they may be fp64.
    lowest, highest, delta = tl.cast(lowest, tl.float32), tl.cast(highest, tl.float32), tl.cast(delta, tl.float32)
    tau_pos, tau_neg = tl.cast(tau_pos, tl.float32), tl.cast(tau_neg, tl.float32)
    nothing = tl.zeros(ratio.shape, tl.float32)
    never = nothing > 0.0
    if FORM == "clipped":
        falls, bounded = advantage < 0.0, _at_most(ratio, delta)
        below, limit = falls & (ratio < lowest), tl.where(falls, tl.maximum(highest, delta), tl.minimum(highest, delta))
        constant = below | (ratio > limit)
        used = tl.where(constant, tl.where(below, lowest, limit), ratio)
        slope = tl.where(constant, 0.0, -ratio * advantage)
        return -used * advantage, slope, nothing, falls & (bounded < lowest), (advantage > 0.0) & (bounded > highest)
    elif FORM == "cispo":
        slope = -_at_most(ratio, highest) * advantage
        return slope * current, nothing, slope, never, (advantage > 0.0) & (ratio > highest)
    elif FORM == "sapo":
        # The gate is 1 long before this bound, beyond which its slope would be 0 * inf.
        tau, ratio = tl.where(advantage > 0.0, tau_pos, tau_neg), _at_most(ratio, 5.5e34)
        gate = tl.sigmoid(tau * (ratio - 1.0))
        slope = -4.0 * gate * (1.0 - gate) * ratio * advantage
        return -gate * (4.0 / tau) * advantage, slope, nothing, never, never
    elif FORM == "gmpo":
        change, slope = current - old, -ratio * advantage
        return slope, slope, nothing, (advantage < 0.0) & (change < lowest), (advantage > 0.0) & (change > highest)
    elif FORM == "dppo_tv" or FORM == "dppo_kl" or FORM == "ipo":
        masked, falls, rises = _masked_by_divergence(current, old, advantage, lowest, highest, FORM)
        slope = tl.where(masked, 0.0, -_at_most(ratio, delta) * advantage)
        return slope, nothing, slope, falls, rises
    else:
        return -advantage * current, nothing, -advantage, never, never


@triton.jit
def _kl(q, KL: tl.constexpr):
    """(the KL estimate, its derivative in log p) from q = log p_ref - log p."""
    if KL == "k1":
        return -q, tl.full(q.shape, 1.0, tl.float32)
    elif KL == "k2":
        return 0.5 * q * q, -q
    else:
        return expm1_minus_x(q), -expm1(q)


@triton.jit
def _kl_terms(kl, slope, beta, q, ratio, log_r, CORRECTED: tl.constexpr, OF_TOKEN: tl.constexpr, KL: tl.constexpr):
    """beta times (the estimate, its derivative in log p, that in log r), from `_kl`; times r where it is CORRECTED.

    OF_TOKEN: r is the token's own, and the derivative in log p has that in log r. With "k3", r exp(q) cancels in their
    sum; elsewhere exp(q + log r) stands for it at a large q, where exp(q) alone may be infinite.
    """
    beta, d_log_r = tl.cast(beta, tl.float32), tl.zeros(q.shape, tl.float32)
    kl, slope = beta * kl, beta * slope
    if CORRECTED:
        far = q > LARGE_Q
        kl, slope = kl * ratio, slope * ratio
        if KL == "k3":
            r_exp_q = tl.exp(q + log_r)
            kl = tl.where(far, beta * (r_exp_q - ratio * (1.0 + q)), kl)
            slope = -beta * q * ratio if OF_TOKEN else tl.where(far, beta * (ratio - r_exp_q), slope)
        if not (OF_TOKEN and KL == "k3"):
            d_log_r = kl
    return kl, slope, d_log_r


@triton.jit
def _sampling_correction(current, old, sampled, correction_bounds, CORRECTION: tl.constexpr):
    """(rho within its bounds, |log p - log p_sampling|). A sampler's NaN is a missing log-prob, which changes neither,
    and equal log-probs have a ratio of 1, even -inf."""
    clip_min, clip_max = correction_bounds
    clip_min, clip_max = tl.cast(clip_min, tl.float32), tl.cast(clip_max, tl.float32)
    has_logprob, rho = sampled == sampled, tl.full(current.shape, 1.0, tl.float32)
    if CORRECTION == "truncate" or CORRECTION == "mask":
        rho = tl.exp(tl.where(has_logprob & (old != sampled), old - sampled, 0.0))
    if CORRECTION == "truncate":
        rho = _at_most(tl.where(rho < clip_min, clip_min, rho), clip_max)
    if CORRECTION == "mask":
        rho = tl.where((rho < clip_min) | (rho > clip_max), 0.0, rho)
    return rho, tl.where(has_logprob & (current != sampled), tl.abs(current - sampled), 0.0)


@triton.jit
def _store_partials(row, on, total, policy, kl, entropies, ratio, low, high, rho, difference, gradient):
    """The numbers of a program in the order of SUMS, LARGEST and SMALLEST; after those of the only one, the results."""
    tl.store(row + 0, tl.sum(total))
    tl.store(row + 1, tl.sum(policy))
    tl.store(row + 2, tl.sum(on.to(tl.float32)))
    tl.store(row + 3, tl.sum(kl))
    tl.store(row + 4, tl.sum(entropies))
    tl.store(row + 5, tl.sum(tl.where(on, ratio, 0.0)))
    tl.store(row + 6, tl.sum((on & low).to(tl.float32)))
    tl.store(row + 7, tl.sum((on & high).to(tl.float32)))
    tl.store(row + 8, tl.sum(tl.where(on, rho, 0.0)))
    tl.store(row + 9, tl.sum(difference))
    tl.store(row + 10, tl.sum((on & (gradient == 0.0)).to(tl.float32)))
    tl.store(row + 11, tl.max(difference))
    tl.store(row + 12, tl.max(tl.where(on, ratio, float("-inf"))))
    tl.store(row + 13, tl.min(tl.where(on, ratio, float("inf"))))
    if tl.num_programs(0) == 1:
        tl.debug_barrier()
        column = tl.arange(0, 16)
        _store_results(row + PARTIALS, tl.load(row + column, mask=column < PARTIALS, other=0.0))


@triton.jit
def _store_results(results, total):
    """The results [15] from the numbers [16] of all tokens, in the order of partials."""
    column = tl.arange(0, 16)
    exists, is_sum = column < PARTIALS, column < NUM_SUMS
    tokens = tl.maximum(tl.sum(tl.where(column == LOSS_TOKENS, total, 0.0)), 1.0)
    mean = tl.math.div_rn(tl.where(is_sum, total, 0.0), tl.full([16], 1.0, tl.float32) * tokens)
    result = tl.where((column > LOSS_TOKENS) & is_sum, mean, total)
    clipped = tl.sum(tl.where((column == CLIP_LOW) | (column == CLIP_HIGH), mean, 0.0))
    # An extreme of a GPU is one of numbers: NaN is in the sum alone.
    ratios = tl.sum(tl.where(column == RATIO, total, 0.0))
    differences = tl.sum(tl.where(column == DIFFERENCE, total, 0.0))
    spread = tl.where(column == NUM_SUMS, differences, ratios)
    result = tl.where((column >= NUM_SUMS) & (spread != spread), spread, result)
    tl.store(results + column, tl.where(exists, result, clipped), mask=column <= PARTIALS)


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=TOKEN_VECTORS)
def _grpo_loss_kernel(
    logprobs,
    log_ratio,
    advantages,
    weights,
    mask,
    old_logprobs,
    ref_logprobs,
    sampling_logprobs,
    entropy,
    entropy_weights,
    policy_weights,
    kl_cov_weights,
    grad_logprobs,
    grad_log_ratio,
    partials,
    N,
    bounds,
    strengths,
    correction_bounds,
    FORM: tl.constexpr,
    KL: tl.constexpr,
    BIAS_CORRECTION_KL: tl.constexpr,
    CORRECTION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: tiles of BLOCK tokens. A program alone writes the gradients of its tokens and one row of partials.

    `bounds` are (lowest, highest, delta, tau for A > 0, tau elsewhere), `correction_bounds` those of rho. `strengths`
    are beta and log_ratio_penalty, each None for 0. Without beta the KL is only a metric.
    """
    tokens = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = tokens < N
    on = tl.load(mask + tokens, mask=exists, other=0) != 0
    current = _load_masked(logprobs, tokens, on)
    weight = _load_masked(weights, tokens, on)
    old = current
    if old_logprobs is not None:
        old = _load_masked(old_logprobs, tokens, on)
    sampled = _load_masked(sampling_logprobs, tokens, on)
    if CORRECTION == "sampler":
        old = tl.where(sampled == sampled, sampled, old)
    change = current - old
    log_r = change if log_ratio is None else _load_masked(log_ratio, tokens, on)
    ratio = tl.exp(log_r)
    advantage = _load_masked(advantages, tokens, on)
    policy, d_log_r, d_log_p, low, high = _policy(ratio, advantage, current, old, bounds, FORM)

    rho, difference = tl.full([BLOCK], 1.0, tl.float32), tl.zeros([BLOCK], tl.float32)
    if sampling_logprobs is not None:
        rho, difference = _sampling_correction(current, old, sampled, correction_bounds, CORRECTION)
    if policy_weights is not None:
        factor = _load_masked(policy_weights, tokens, on)
        rho = tl.where(factor == 0.0, 0.0, rho * factor)
    # A weight or an advantage of 0 selects 0, since r A would be inf * 0 where the old log-prob is -inf. NaN stays.
    left_out = (rho == 0.0) | ((advantage == 0.0) & (ratio == ratio))
    policy = tl.where(left_out, 0.0, policy * rho)
    d_log_r = tl.where(left_out, 0.0, d_log_r * rho)
    d_log_p = tl.where(left_out, 0.0, d_log_p * rho)

    kl = tl.zeros([BLOCK], tl.float32)
    cost = policy
    beta, log_ratio_penalty = strengths
    if log_ratio_penalty is not None:
        slope = tl.cast(log_ratio_penalty, tl.float32) * change
        cost += 0.5 * slope * change
        d_log_p += slope
    if kl_cov_weights is not None:
        penalty = _load_masked(kl_cov_weights, tokens, on)
        cost += penalty * tl.abs(change)
        d_log_p += tl.where(change < 0.0, -penalty, tl.where(change > 0.0, penalty, 0.0))
    if ref_logprobs is not None:
        q = _load_masked(ref_logprobs, tokens, on) - current
        kl, d_kl = _kl(q, KL)
        if beta is not None:
            term, d_kl_p, d_kl_r = _kl_terms(kl, d_kl, beta, q, ratio, log_r, BIAS_CORRECTION_KL, log_ratio is None, KL)
            cost += term
            d_log_p += d_kl_p
            d_log_r += d_kl_r
    if log_ratio is None:
        d_log_p += d_log_r
    else:
        tl.store(grad_log_ratio + tokens, tl.where(on, weight * d_log_r, 0.0), mask=exists)
    gradient = tl.where(on, weight * d_log_p, 0.0)
    tl.store(grad_logprobs + tokens, gradient, mask=exists)

    entropies = _load_masked(entropy, tokens, on)
    total = weight * cost - _load_masked(entropy_weights, tokens, on) * entropies
    row = partials + tl.program_id(0).to(tl.int64) * PARTIALS
    _store_partials(row, on, total, weight * policy, kl, entropies, ratio, low, high, rho, difference, gradient)


@triton.jit(do_not_specialize=["programs"], do_not_specialize_on_alignment=["results"])
def _token_statistics_kernel(partials, results, programs, BLOCK: tl.constexpr):
    """Grid: one program, for partials [programs, 14] and results [15]. It adds in fp64 and in a fixed order, so a count
    of tokens is exact."""
    column = tl.arange(0, 16)
    exists, is_sum, is_smallest = column < PARTIALS, column < NUM_SUMS, column == PARTIALS - 1
    sums, largest = tl.zeros([16], tl.float64), tl.full([16], float("-inf"), tl.float32)
    for first in range(0, programs, BLOCK):
        row = first + tl.arange(0, BLOCK)[:, None]
        inside = (row < programs) & exists[None, :]
        part = tl.load(partials + row * PARTIALS + column[None, :], mask=inside, other=0.0)
        sums += tl.sum(part.to(tl.float64), 0)
        signed = tl.where(is_smallest[None, :], -part, part)
        largest = tl.maximum(largest, tl.max(tl.where(inside, signed, float("-inf")), 0))
    total = tl.where(is_sum, sums.to(tl.float32), tl.where(is_smallest, -largest, largest))
    _store_results(results, total)


def grpo_token_loss(
    logprobs: Tensor,
    *,
    log_ratio: Tensor | None = None,
    inputs: Mapping[str, Tensor | None],
    terms: tuple[Any, ...],
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The gradient of the loss, and the partial sums of all metrics.

    Args:
        logprobs: [N] fp32.
        log_ratio: [N] fp32, the log of the ratio where it is not that of the token; its gradient is then separate.
        inputs: by name, each [N]: `advantages` and `weights`, fp32; `mask`, bool: where False, the others are not read,
            the gradient is zero, and no statistic counts the token. None, or missing: `old_logprobs` (the current ones,
            detached: ratio 1, which still carries the gradient), `ref_logprobs`, `sampling_logprobs`, `entropy`,
            `entropy_weights`, `policy_weights`, `kl_cov_weights`, fp32.
        terms: (form, epsilon_low, epsilon_high, delta or None, (tau for A > 0, tau elsewhere), beta, "k1" | "k2" |
            "k3", bias_correction_kl, "truncate" | "mask" | "sampler" | None, lower bound or None, upper bound or None
            of rho, log_ratio_penalty), with form "clipped" | "cispo" | "sapo" | "reinforce" | "gmpo" | "dppo_tv" |
            "dppo_kl" | "ipo".

    Returns:
        (dL/dlogprobs [N] fp32, dL/dlog_ratio [N] fp32 or None, sums for `token_statistics`: 14 for each of P programs,
        and 15 for its results, which are there already if P is 1).

    Memory: 14 fp32 numbers per 512 tokens, and 15.
    """
    N, device = logprobs.shape[0], logprobs.device
    form, epsilon_low, epsilon_high, delta, taus, beta, estimator, corrected, *correcting, log_ratio_penalty = terms
    correction, clip_min, clip_max = correcting
    bounds = {"clipped": (1.0 - epsilon_low, 1.0 + epsilon_high), "gmpo": (-epsilon_low, epsilon_high)}
    grad_logprobs = torch.empty(N, dtype=torch.float32, device=device)
    grad_log_ratio = None if log_ratio is None else torch.empty_like(grad_logprobs)
    # One program even for no tokens: it writes zero sums.
    programs = max(1, -(-N // TOKENS_PER_PROGRAM))
    partials = torch.empty(programs * STATISTICS + len(RESULTS), dtype=torch.float32, device=device)
    vectors = (logprobs, log_ratio, *(inputs.get(name) for name in INPUTS))
    with launching_on(device):
        _grpo_loss_kernel[(programs,)](
            *(None if vector is None else vector.contiguous() for vector in vectors),
            grad_logprobs,
            grad_log_ratio,
            partials,
            N,
            (*bounds.get(form, (epsilon_low, epsilon_high)), float("inf") if delta is None else delta, *taus),
            (beta or None, log_ratio_penalty or None),  # 0 times an infinite KL must not be in the loss
            (0.0 if clip_min is None else clip_min, float("inf") if clip_max is None else clip_max),
            FORM=form,
            KL=estimator,
            BIAS_CORRECTION_KL=corrected,
            CORRECTION=correction if inputs.get("sampling_logprobs") is not None else None,
            BLOCK=TOKENS_PER_PROGRAM,
            num_warps=LOSS_WARPS,
            **FUSED_MULTIPLY_ADD,
        )
    return grad_logprobs, grad_log_ratio, partials


def token_statistics(partials: Sequence[Tensor]) -> dict[str, Tensor]:
    """The statistics of the tokens of several calls, by name, each 0-d fp32, from the sums of each call.

    "loss" and "policy_term" are weighted sums, "loss_tokens" is the number of unmasked tokens, and
    "sampling_difference_max", "ratio_min" and "ratio_max" are extremes over them (the ratio's are inf and -inf where
    there are none). The others are means over them, 0 where there are none: "ratio_mean", "clip_ratio_low",
    "clip_ratio_high" and their sum "clip_ratio_region", "effective_weight", "zero_gradient_fraction" (of the gradient
    in `logprobs`), "entropy", "kl" and "sampling_difference_mean".

    Memory: with several calls, a copy of their sums.
    """
    results, parts = partials[0][-len(RESULTS) :], partials[0]
    if len(partials) > 1:
        parts = torch.cat([*(part[: -len(RESULTS)] for part in partials), results])
    if (programs := parts.shape[0] // STATISTICS - 1) > 1:
        with launching_on(parts.device):
            _token_statistics_kernel[(1,)](parts, results, programs, BLOCK=PROGRAMS, num_warps=4, **FUSED_MULTIPLY_ADD)
    return dict(zip(RESULTS, results.unbind(), strict=True))
