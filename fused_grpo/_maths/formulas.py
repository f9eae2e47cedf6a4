"""The loss of a token, once, in plain torch, with its derivation, and the inputs that it has.

What depends on more than one token is in `factors.py`, log-probs and divergences are in `distributions.py`.

Any floating dtype works; autograd computes the derivatives. Three parts of the project use it:

- `impl="reference"` computes the loss with these functions (`factors.grpo_loss`).
- The tests compare every fast path with that, in fp64.
- Production code: the torch path of the loss is `token_loss` (`torch_passes`), all paths take `finish_metrics` from
  here and the factors of `factors.py`, and the drop-in for Liger uses `kl_term`, `policy_term` and `vespo_phi`. So the
  tests compare `token_loss` also with TRL's own loss.

With N tokens and d = log p - log p_old, the ratio r = exp(d) of a token (or exp of the mean d of its sequence), its
advantage A, and an upper bound delta (infinite unless given), the policy term of one token is

    clipped losses   l = -min(min(r, delta) * A, clip(r, 1 - epsilon, 1 + epsilon_high) * A)
    cispo            l = -stop(min(r, epsilon_high)) * A * log p
    sapo             l = -sigmoid(tau * (r - 1)) * 4 / tau * A            tau by the sign of A
    vespo            l = -stop(phi) * A * log p                           phi of the sequence, in `vespo_weights`
    gmpo             l = -r * A                                           r of the sequence, in `sequence_log_ratio`
    dppo, ipo        l = -min(r, delta) * A, 0 for tokens that D masks    its gradient: -stop(min(r, delta)) * A
    gpg, dro         l = -A * log p

where D is the binary divergence of the old probability mu and p: |p - mu|, or mu log(mu / p) + (1 - mu) log((1 - mu) /
(1 - p)). It masks tokens that are farther from mu than epsilon (A < 0) or epsilon_high (A > 0), where A would move them
on; "ipo" masks by |p - mu| whatever A is: below mu by more than epsilon, above by more than epsilon_high. The policy
term is multiplied by the sampling correction, the off-policy mask, the rejection of sequences, the entropy mask and
Clip-Cov's mask (`token_factors`). Added to it are KL-Cov's term, its weight times |d|, log_ratio_penalty d^2 / 2, and

    beta * kl        kl = -q (k1), q^2 / 2 (k2), exp(q) - q - 1 (k3)      q = log p_ref - log p

with kl times r if `use_bias_correction_kl`. The kernel implements the gradient in log p as the sum of two terms: that
of log p itself, and that of log r (at token level log r is d, at sequence level the mean of d over the sequence):

    dl/d log r = -r A where the branch taken is not a constant, 0 where it is (clipped losses)
               = -4 sigmoid * (1 - sigmoid) * r A (sapo),   0 (cispo, vespo)          + beta * r * kl, bias-corrected
    dl/d log p = -stop(..) * A (those that stop, gpg, dro), 0 (the others)            + beta * kl' (* r)
    kl' = 1 (k1), -q (k2), 1 - exp(q) (k3)

For k3, bias-corrected at token level, the two add up to -beta r q.

The loss is sum(weights * l) - sum(entropy_weights * H). On policy, `old_logprobs=None` stands for `logprobs.detach()`:
r is 1, and its gradient is that of log p.

Packed `[N]` with `cu_seqlens` [B+1] and padded `[B, T]` with `mask` become N flat tokens. The average of each loss type
becomes one weight per token, so that loss = sum(weights * l) for all types:

    grpo, sapo, gmpo   w = mask / (tokens of the sequence * num_sequences)
    luspo              w = mask / num_sequences
    dr_grpo            w = mask / (num_sequences * max_completion_length)
    the others         w = mask / num_tokens

The normalisers are counts over the whole optimizer step. Because they are arguments, the losses of the micro-batches
add up to the loss of the step, for any split into micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_grpo._maths.statistics import picked
from fused_grpo.config import DPPO, REINFORCE, GRPOLossConfig, TokenTerms

LARGE_Q = 2.0  # from here on fewer digits cancel in the other form of `corrected_kl`


@dataclass(frozen=True)
class Sequences:
    """Which of the flat tokens belong to which sequence. All sums are in fp64, so that counts are exact."""

    count: int  # B
    lengths: Tensor | tuple[int, int]  # [B] of packed sequences, or (B, T) of padded ones

    def sum(self, values: Tensor) -> Tensor:
        """[B] fp64 from [N], in a fixed order."""
        wide = values.double()
        if isinstance(self.lengths, tuple):
            return wide.view(self.lengths).sum(1)
        if not self.count:
            return wide.sum(0, keepdim=True)[:0]
        # The lengths were checked already, where that needs no synchronization.
        return torch.segment_reduce(wide, "sum", lengths=self.lengths.long(), initial=0, unsafe=True)

    def spread(self, values: Tensor, count: int) -> Tensor:
        """[N] from [B]: the value of a sequence at each of its tokens, N = `count`."""
        if isinstance(self.lengths, tuple):
            return values.repeat_interleave(self.lengths[1])
        return values.repeat_interleave(self.lengths, output_size=count)

    def mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """[B] fp64: the mean over a sequence's unmasked tokens, 0 where there are none."""
        return self.sum(torch.where(mask, values, 0.0)) / self.sum(mask).clamp_min(1.0)


@dataclass(frozen=True)
class TokenInputs:
    """What the loss of a token depends on besides its log-prob. Every field is [N]."""

    advantages: Tensor
    weights: Tensor
    mask: Tensor  # bool
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    sampling_logprobs: Tensor | None

    def rows(self, rows: slice | Tensor) -> TokenInputs:
        """The inputs of some tokens."""
        fields: Any = {name: None if value is None else picked(value, rows) for name, value in vars(self).items()}
        return TokenInputs(**fields)


@dataclass(frozen=True)
class LossInputs:
    """All tokens of a call, their sequences, and what is of the whole step: threshold and normaliser of entropies (None
    where nothing needs them), and the tokens that Clip-Cov or KL-Cov selected, [N] bool."""

    tokens: TokenInputs
    sequences: Sequences
    entropy_threshold: float | Tensor | None
    num_entropy_tokens: float | Tensor | None
    covariance_selected: Tensor | None = None


def token_weights(
    mask: Tensor,
    sequences: Sequences,
    num_tokens: float | Tensor | None,
    num_sequences: float | Tensor | None,
    config: GRPOLossConfig,
) -> Tensor:
    """w [N] of the module's table, fp64 so that counts stay exact. Normalisers default to those of this call.

    Sequences of 1 and 3 tokens: "dapo" weights tokens equally, "grpo" sequences.

    >>> sequences, mask = Sequences(2, torch.tensor([1, 3])), torch.ones(4, dtype=torch.bool)
    >>> for loss_type in ("dapo", "grpo"):
    ...     config = GRPOLossConfig(loss_type=loss_type)
    ...     [round(x, 4) for x in token_weights(mask, sequences, None, None, config).tolist()]
    [0.25, 0.25, 0.25, 0.25]
    [0.5, 0.1667, 0.1667, 0.1667]
    """
    if config.loss_type in ("bnpo", "dapo", "cispo", *DPPO, *REINFORCE):
        # The quotient is fp64 in both, but a number of Python's alone would not make it so.
        return mask / mask.sum(dtype=torch.float64).clamp_min(1.0) if num_tokens is None else mask.double() / num_tokens
    on = mask.double()
    num_sequences = max(1, sequences.count) if num_sequences is None else num_sequences
    if config.loss_type == "luspo":
        return on / num_sequences
    if config.loss_type == "dr_grpo":
        assert config.max_completion_length is not None
        return on / (num_sequences * config.max_completion_length)
    return on / (sequences.spread(sequences.sum(mask).clamp_min(1.0), mask.shape[0]) * num_sequences)


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
    entropy_weights: Tensor | None = None,
    policy_weights: Tensor | None = None,
    kl_cov_weights: Tensor | None = None,
    log_ratio: Tensor | None = None,
    terms: TokenTerms,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss (0-d, differentiable) and its statistics: detached 0-d sums over the mask, for `token_statistics`.

    All inputs are [N]. `log_ratio` is given where the ratio is not that of the token. Masked tokens are replaced before
    any arithmetic, so NaN or inf there affects neither the loss nor a gradient.

    "dro" of a token whose probability rose from 0.25 to 0.5: log 2 + 0.05 / 2 * (log 2)^2.

    >>> p, old, one = torch.tensor([0.5]).log(), torch.tensor([0.25]).log(), torch.ones(1)
    >>> terms = TokenTerms.of(GRPOLossConfig(loss_type="dro", log_ratio_penalty=0.05))
    >>> loss, _ = token_loss(p, advantages=one, weights=one, mask=one.bool(), old_logprobs=old, terms=terms)
    >>> round(loss.item(), 4)
    0.7052
    """
    logprobs, advantages, weights = (torch.where(mask, x, 0.0) for x in (logprobs, advantages, weights))
    current = logprobs.detach()
    old = current if old_logprobs is None else torch.where(mask, old_logprobs, 0.0)
    if sampling_logprobs is not None and terms.correction == "sampler":
        old = denominator(old, sampling_logprobs, mask)
    is_of_token = log_ratio is None
    log_ratio = logprobs - old if log_ratio is None else torch.where(mask, log_ratio, 0.0)
    effective_weight = torch.ones_like(old)
    if sampling_logprobs is not None and terms.correction in ("truncate", "mask"):
        bounds = terms.correction, terms.clip_min, terms.clip_max
        effective_weight = bounded_ratio(log_rho(old, sampling_logprobs, mask), *bounds)
    if policy_weights is not None:
        effective_weight = torch.where(mask & (policy_weights != 0), effective_weight * policy_weights, 0.0)
    # A weight or an advantage of 0 selects 0: where the old log-prob is -inf, r A would be inf * 0, which is NaN. Such
    # tokens are detached as well, for a selection passes 0 back, which would meet r again. A ratio of NaN stays.
    left_out = (effective_weight == 0) | ((advantages == 0) & ~log_ratio.detach().isnan())
    moving, moving_ratio = (torch.where(left_out, x.detach(), x) for x in (logprobs, log_ratio))
    policy, below, above = policy_term(moving, moving_ratio, advantages, terms, old=old)
    policy = torch.where(left_out, 0.0, policy * effective_weight)
    kl, regulariser = torch.zeros_like(logprobs), torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
    if ref_logprobs is not None:
        q = torch.where(mask, ref_logprobs - logprobs, 0.0)
        kl = kl_term(q, terms.kl_estimator)
        # With beta = 0 the KL is only a metric: an infinite KL must not become 0 * inf in the loss.
        if terms.beta and terms.bias_correction_kl:
            q_plus_log_ratio = torch.where(mask, ref_logprobs, 0.0) - old if is_of_token else log_ratio + q
            regulariser = terms.beta * corrected_kl(q, log_ratio, q_plus_log_ratio, terms.kl_estimator)
        elif terms.beta:
            regulariser = terms.beta * kl
    if kl_cov_weights is not None:
        regulariser = regulariser + torch.where(mask, kl_cov_weights, 0.0) * (logprobs - old).abs()
    if terms.log_ratio_penalty:
        regulariser = regulariser + terms.log_ratio_penalty / 2 * (logprobs - old).square()
    loss = (weights * (policy + regulariser)).sum()
    entropies = torch.zeros_like(current) if entropy is None else torch.where(mask, entropy, 0.0)
    if entropy_weights is not None:
        loss = loss - (torch.where(mask, entropy_weights, 0.0) * entropies).sum()

    ratio, on = log_ratio.detach().exp(), mask.to(logprobs.dtype)
    difference = torch.zeros_like(current)
    if sampling_logprobs is not None:
        difference = log_rho(current, sampling_logprobs, mask).abs()
    extremes = torch.stack([torch.where(mask, -ratio, -torch.inf), torch.where(mask, ratio, -torch.inf), difference])
    least, most, farthest = extremes.amax(1) if len(mask) else extremes.new_full((3,), -torch.inf)
    statistics = {
        "loss": loss.detach(),
        "policy_term": (weights * policy).sum().detach(),
        "loss_tokens": on.sum(),
        "kl": kl.sum().detach(),
        "entropy": entropies.sum().detach(),
        "ratio": (ratio * on).sum(),
        "clip_low": (on * below).sum(),
        "clip_high": (on * above).sum(),
        "effective_weight": (on * effective_weight).sum(),
        "sampling_difference": difference.sum(),
        "sampling_difference_max": farthest.clamp_min(0.0),
        "ratio_min": -least,
        "ratio_max": most,
    }
    return loss, statistics


def policy_term(
    logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, terms: TokenTerms, *, old: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(the policy term, without weights; which tokens are clipped from below, from above), [N], from log p and log r.

    Where the term is a constant its gradient is 0, even if the ratio is infinite: the old log-prob may be -inf. `old`
    is the log-prob in the denominator of the token's own ratio, which "gmpo", "dppo_*" and "ipo" need.

    A ratio of 1.5 is beyond 1 + epsilon_high = 1.28: with A = 1 it is clipped, with A = -1 it is not.

    >>> terms = TokenTerms.of(GRPOLossConfig(epsilon=0.2, epsilon_high=0.28))
    >>> ratio, A = torch.tensor([1.5, 1.5]), torch.tensor([1.0, -1.0])
    >>> policy, below, above = policy_term(ratio.log(), ratio.log(), A, terms)
    >>> [round(l, 4) for l in policy.tolist()], below.tolist(), above.tolist()
    ([-1.28, 1.5], [False, False], [True, False])
    """
    if terms.form == "clipped":
        lowest, highest, delta = 1 - terms.epsilon_low, 1 + terms.epsilon_high, terms.delta
        falls, change = advantages < 0, log_ratio.detach()
        ratio = change.exp()
        # Above these the term is a constant, where A > 0 and where A < 0.
        rising, falling = (highest, torch.inf) if delta is None else (min(highest, delta), max(highest, delta))
        constant = torch.where(falls, (ratio < lowest) | (ratio > falling), ratio > rising)
        # No gradient goes into the exp of a constant: where that is infinite, it would be 0 * inf.
        ratio = torch.where(constant, change, log_ratio).exp()
        bounded = ratio if delta is None else ratio.clamp(max=delta)
        inside = ratio.clamp(lowest, highest)
        used = torch.where(falls, torch.maximum(bounded, inside), torch.minimum(bounded, inside))
        return -used * advantages, falls & (bounded < lowest), (advantages > 0) & (bounded > highest)
    # The gate of "sapo" is 1 long before this bound, beyond which its slope would be 0 * inf.
    ratio = (torch.where(log_ratio > 80.0, 80.0, log_ratio) if terms.form == "sapo" else log_ratio).exp()
    never = torch.zeros_like(advantages, dtype=torch.bool)
    if terms.form == "cispo":
        capped = ratio.clamp(max=terms.epsilon_high).detach()
        return -capped * advantages * logprobs, never, (ratio > terms.epsilon_high) & (advantages > 0)
    if terms.form == "gmpo":
        assert old is not None
        return -ratio * advantages, *clipped_change(logprobs.detach() - old, advantages, terms)[1:]
    if terms.form in DPPO:
        assert old is not None
        masked, below, above = masked_by_divergence(logprobs.detach(), old, advantages, terms)
        bounded = ratio.detach() if terms.delta is None else ratio.detach().clamp(max=terms.delta)
        unit_ratio = torch.exp(torch.nan_to_num(logprobs - logprobs.detach()))  # 1, with the gradient of log p
        return torch.where(masked, 0.0, -bounded * advantages) * unit_ratio, below, above
    if terms.form == "sapo":
        # Not torch.where of two numbers, which rounds them to the default dtype.
        tau_high, tau_low = terms.sapo_temperatures
        tau = torch.full_like(advantages, tau_low).masked_fill_(advantages > 0, tau_high)
        return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages, never, never
    return -advantages * logprobs, never, never


def clipped_change(change: Tensor, advantages: Tensor, terms: TokenTerms) -> tuple[Tensor, Tensor, Tensor]:
    """(log-ratios clipped as in "gmpo": from above where A > 0, from below where A < 0; which are so, by side), [N]."""
    high, low = change.clamp(max=terms.epsilon_high), change.clamp(min=-terms.epsilon_low)
    below, above = (advantages < 0) & (change < -terms.epsilon_low), (advantages > 0) & (change > terms.epsilon_high)
    return torch.where(advantages > 0, high, torch.where(advantages < 0, low, 0.0)), below, above


def masked_by_divergence(
    logprobs: Tensor, old: Tensor, advantages: Tensor, terms: TokenTerms
) -> tuple[Tensor, Tensor, Tensor]:
    """Which tokens [N] "dppo_*" mask: too far from the old probability, and A would move them farther; "ipo": too far.

    Then which of them are clipped from below, and from above: have fallen, or risen. Where A is 0, nothing is lost.

    Probabilities of 0.5 became 0.8 and 0.2. An advantage of 1 leads only the first farther.

    >>> old, p, A = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.8, 0.2]).log(), torch.ones(2)
    >>> terms = [TokenTerms.of(GRPOLossConfig(loss_type=name, epsilon=0.1)) for name in ("dppo_tv", "ipo")]
    >>> [masked_by_divergence(p, old, A, one)[0].tolist() for one in terms]
    [[True, False], [True, True]]
    """
    p_change = logprobs.exp() - old.exp()
    if terms.form != "dppo_kl":
        divergence = p_change.abs()
    else:
        # 1 - mu and 1 - p, where their logarithms are finite.
        old_rest, new_rest = ((-torch.expm1(values)).clamp_min(1e-37) for values in (old, logprobs))
        divergence = old.exp() * (old - logprobs) + old_rest * (old_rest.log() - new_rest.log())
    falls, rises = (p_change < 0) & (divergence > terms.epsilon_low), (p_change > 0) & (divergence > terms.epsilon_high)
    if terms.form == "ipo":
        return falls | rises, falls & (advantages != 0), rises & (advantages != 0)
    falls, rises = falls & (advantages < 0), rises & (advantages > 0)
    return falls | rises, falls, rises


def denominator(old: Tensor, sampling_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The log-probs [N] in the denominator of a ratio to the sampler: the old ones where it has none."""
    return torch.where(mask & ~sampling_logprobs.isnan(), sampling_logprobs, old)


def kl_term(q: Tensor, estimator: str) -> Tensor:
    """The estimate of KL(policy || reference) from q = log p_ref - log p (http://joschu.net/blog/kl-approx.html).

    >>> q = torch.tensor([0.5]).log()  # the policy has twice the reference's probability
    >>> [round(kl_term(q, estimator).item(), 4) for estimator in ("k1", "k2", "k3")]
    [0.6931, 0.2402, 0.1931]
    """
    return {"k1": lambda: -q, "k2": lambda: q.square() / 2, "k3": lambda: torch.expm1(q) - q}[estimator]()


def corrected_kl(q: Tensor, log_ratio: Tensor, q_plus_log_ratio: Tensor, estimator: str) -> Tensor:
    """The estimate times r = exp(log_ratio), [N], from q + log r, too: where r is the token's own, log p is not in it.

    Of "k3" at a large q it is exp(q + log r) - r (1 + q), whose gradient in log p is r - r (1 + q). The product has two
    terms of r exp(q) there: they cancel, and leave no digit in fp32 from q = 16 on, and NaN from 89 on.

    >>> log_p = torch.tensor([-30.0], requires_grad=True)  # p_ref is 1, p_old is e^-29
    >>> value = corrected_kl(-log_p, log_p + 29, torch.tensor([29.0]), "k3")
    >>> round(torch.autograd.grad(value, log_p)[0].item(), 4)  # -30 / e
    -11.0364
    """
    if estimator != "k3":
        return kl_term(q, estimator) * log_ratio.exp()
    is_large = q > LARGE_Q
    small = kl_term(torch.where(is_large, 0.0, q), estimator) * torch.where(is_large, 0.0, log_ratio).exp()
    q, log_ratio, q_plus_log_ratio = (torch.where(is_large, values, 0.0) for values in (q, log_ratio, q_plus_log_ratio))
    return torch.where(is_large, q_plus_log_ratio.exp() - log_ratio.exp() * (1 + q), small)


def log_rho(old: Tensor, sampling_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log p_old - log p of the sampler, [N]; 0 where masked, where both are -inf, and where the sampler's is NaN."""
    has_ratio = mask & ~sampling_logprobs.isnan() & (old != sampling_logprobs)
    return torch.where(has_ratio, old - sampling_logprobs, 0.0)


def bounded_ratio(log_ratio: Tensor, bound: str, clip_min: float | None, clip_max: float | None) -> Tensor:
    """exp(log_ratio), clipped to the bounds ("truncate") or 0 outside of them ("mask").

    >>> log_ratio = torch.tensor([0.25, 1.0, 4.0]).log()
    >>> [[round(x, 4) for x in bounded_ratio(log_ratio, bound, 0.5, 2.0).tolist()] for bound in ("truncate", "mask")]
    [[0.5, 1.0, 2.0], [0.0, 1.0, 0.0]]
    """
    ratio = log_ratio.exp()
    if bound == "truncate":
        return ratio if clip_min is None and clip_max is None else ratio.clamp(clip_min, clip_max)
    low, high = 0.0 if clip_min is None else clip_min, torch.inf if clip_max is None else clip_max
    return torch.where((ratio < low) | (ratio > high), 0.0, ratio)


# Metrics that are statistics as they are, and those that are a sum over the number of tokens.
TOTALS = ("policy_term", "loss_tokens", "ratio_min", "ratio_max", "sampling_difference_max")
MEANS = {
    "ratio_mean": "ratio",
    "clip_ratio_low": "clip_low",
    "clip_ratio_high": "clip_high",
    "effective_weight": "effective_weight",
    "zero_gradient_fraction": "zero_gradient",
    "entropy": "entropy",
    "kl": "kl",
    "sampling_difference_mean": "sampling_difference",
}


def token_statistics(partials: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The loss and all metrics of the tokens of several chunks: means over them. Extremes of no tokens are infinite.

    Of each chunk, the statistics are those of `token_loss`, and "zero_gradient", the number of unmasked tokens without
    a gradient; all are 0-d, and so are the metrics.
    """
    statistics = partials[0]
    if len(partials) > 1:  # sums of sums, and extremes of extremes
        reduce = {"_max": torch.amax, "_min": torch.amin}
        stacked = {name: torch.stack([part[name] for part in partials]) for name in statistics}
        statistics = {name: reduce.get(name[-4:], torch.sum)(values, 0) for name, values in stacked.items()}
    means = torch.stack([statistics[key] for key in MEANS.values()])
    metrics = {name: statistics[name] for name in ("loss", *TOTALS)}
    metrics |= dict(zip(MEANS, over_tokens(means, statistics).unbind(), strict=True))
    return metrics | {"clip_ratio_region": metrics["clip_ratio_low"] + metrics["clip_ratio_high"]}


def over_tokens(sums: Tensor, statistics: Mapping[str, Tensor]) -> Tensor:
    """Sums over the number of unmasked tokens, 0 where there are none."""
    return sums / statistics["loss_tokens"].clamp_min(1.0)


def finish_metrics(metrics: dict[str, Tensor], inputs: LossInputs, *, has_entropy: bool) -> dict[str, Tensor]:
    """The metrics of a call, without the loss and those whose inputs were not given."""
    sampled = inputs.tokens.sampling_logprobs is not None
    given = {"loss": False, "entropy": has_entropy, "kl": inputs.tokens.ref_logprobs is not None}
    given |= {"sampling_difference_mean": sampled, "sampling_difference_max": sampled}
    return {name: value for name, value in metrics.items() if given.get(name, True)}


def needs_other_tokens(inputs: LossInputs, config: GRPOLossConfig) -> bool:
    """Whether the loss of a token depends on the log-probs or entropies of other tokens."""
    corrects_sequences = config.corrects_sequences or config.sequence_rejection is not None
    return bool(
        config.ratio_of_sequence
        or config.loss_type == "vespo"
        or config.off_policy_mask_threshold is not None
        or config.top_entropy_quantile < 1.0
        or config.selects_by_covariance
        or (corrects_sequences and inputs.tokens.sampling_logprobs is not None)
    )
