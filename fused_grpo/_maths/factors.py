"""What in the loss depends on more than one token: on its sequence, or on thresholds and selections over all tokens.

The loss of a token (`formulas.py`) takes these as factors of its own, so that it never looks at another token.

Clip-Cov and KL-Cov (arXiv:2505.22617) select tokens out of all tokens of an optimizer step. The entropy of a policy
falls by the covariance of log-probs and advantages, and few tokens have most of it:

    cov = (log p - mean log p) * (A - mean A)         with means over all tokens of the step

KL-Cov adds a penalty to the tokens of largest covariance. Clip-Cov takes the policy term from some unclipped tokens
within its bounds; the paper draws them at random. Here the draw is a systematic one, evenly over these tokens in the
order of their covariances. So it depends on nothing but the tokens: not on a seed, the order of sequences,
micro-batches or processes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fused_grpo._maths.formulas import (
    LossInputs,
    bounded_ratio,
    clipped_change,
    denominator,
    kl_term,
    log_rho,
    policy_term,
    token_loss,
)
from fused_grpo.config import GRPOLossConfig


def token_factors(
    logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs, config: GRPOLossConfig
) -> dict[str, Tensor | None]:
    """`policy_weights`, `entropy_weights` and `kl_cov_weights` of `token_loss`: [N], detached, None for 1, 0 and 0.

    They hold what depends on more than a token: on its sequence, or on thresholds and selections over all tokens.
    """
    tokens, sequences, mask = inputs.tokens, inputs.sequences, inputs.tokens.mask
    sampling, policy_factors = tokens.sampling_logprobs, list[Tensor]()
    factors: dict[str, Tensor | None] = dict.fromkeys(("policy_weights", "entropy_weights", "kl_cov_weights"))
    current = torch.where(mask, logprobs.detach(), 0.0)
    old = current if tokens.old_logprobs is None else torch.where(mask, tokens.old_logprobs, 0.0)
    if sampling is not None and config.corrects_sequences:
        rho = sampling_weights(sequences.sum(log_rho(old, sampling, mask)), config)
        policy_factors.append(sequences.spread(rho, len(mask)))
    if config.loss_type == "vespo":
        policy_factors.append(vespo_weights(current, old, inputs, config))
    if config.off_policy_mask_threshold is not None:
        drift = -log_rho(current, old if sampling is None else sampling, mask)
        # What is not a number is left out nowhere here: it has to reach the loss.
        far = sequences.mean(drift, mask) > config.off_policy_mask_threshold
        policy_factors.append((~((tokens.advantages < 0) & sequences.spread(far, len(mask)))).double())
    if config.sequence_rejection is not None and sampling is not None:
        kept = kept_sequences(log_rho(old, sampling, mask), inputs, config)
        policy_factors.append(sequences.spread(kept, len(mask)).double())
    if config.selects_by_covariance:
        selected = covariance_selection(current, inputs, config)
        if config.clip_cov_ratio:
            policy_factors.append((~selected).double())
        else:
            factors["kl_cov_weights"] = config.kl_cov_coef * selected.to(current.dtype)
    on = mask
    if config.top_entropy_quantile < 1.0:
        assert entropy is not None
        least = entropy_threshold(entropy.detach()[mask], inputs, config)
        on = mask & ~(entropy.detach() < least)
        # Nor here, where one entropy that is not a number makes the quantile of all none.
        policy_factors.append(torch.where(on > (entropy.detach() >= least), torch.nan, on.double()))
    if policy_factors:
        factors["policy_weights"] = torch.stack(policy_factors).prod(0).to(current.dtype)
    if config.entropy_coef:
        count = on.sum().clamp_min(1) if inputs.num_entropy_tokens is None else inputs.num_entropy_tokens
        factors["entropy_weights"] = (config.entropy_coef * on.double() / count).to(current.dtype)
    return factors


def sampling_weights(log_ratio: Tensor, config: GRPOLossConfig) -> Tensor:
    """rho within the bounds of the sampling correction, from log rho of tokens or of whole sequences."""
    bound = str(config.sampling_correction).partition("_")[2]  # "mask" of "token_mask" and of "sequence_mask"
    return bounded_ratio(log_ratio, bound, config.sampling_clip_min, config.sampling_clip_max)


def kept_sequences(log_ratio: Tensor, inputs: LossInputs, config: GRPOLossConfig) -> Tensor:
    """Which sequences [B] `sequence_rejection` keeps, from log rho [N]."""
    name, mask = config.sequence_rejection, inputs.tokens.mask
    if name == "geometric_ratio":
        statistic = inputs.sequences.mean(log_ratio, mask).exp()
    else:
        token_values = log_ratio.exp() if name == "ratio" else kl_term(log_ratio, str(name))
        statistic = inputs.sequences.mean(token_values, mask)
    low, high = config.sequence_rejection_min, config.sequence_rejection_max
    return ~((statistic < (-torch.inf if low is None else low)) | (statistic > (torch.inf if high is None else high)))


def select_by_covariance(logprobs: Tensor, advantages: Tensor, clipped: Tensor, config: GRPOLossConfig) -> Tensor:
    """Which tokens are selected, [N] bool, from log-probs, advantages and `clipped` (bool) of all tokens, each [N].

    Of four tokens, the one whose log-prob and advantage are both high has the largest covariance:

    >>> logprobs, advantages = torch.tensor([-0.1, -2.0, -2.0, -0.5]), torch.tensor([2.0, -1.0, 1.0, 0.0])
    >>> unclipped = torch.zeros(4, dtype=torch.bool)
    >>> select_by_covariance(logprobs, advantages, unclipped, GRPOLossConfig(kl_cov_ratio=0.25)).tolist()
    [True, False, False, False]
    """
    pair = (logprobs.double(), advantages.double())
    covariances = torch.stack([values - values.mean() for values in pair]).prod(0)
    order = covariances.argsort(stable=True)
    if config.kl_cov_ratio:
        order, count = order.flip(0), max(1, int(config.kl_cov_ratio * len(order)))
    else:
        inside = (covariances > config.clip_cov_lb) & (covariances < config.clip_cov_ub) & ~clipped
        order = order[inside[order]]
        count = min(max(1, int(config.clip_cov_ratio * len(logprobs))), len(order))
        places = (torch.arange(count, device=order.device, dtype=torch.float64) + 0.5) * (len(order) / max(1, count))
        order = order[places.long()]
    return torch.zeros_like(clipped).index_fill_(0, order[:count], True)


def covariance_selection(logprobs: Tensor, inputs: LossInputs, config: GRPOLossConfig) -> Tensor:
    """Which tokens [N] Clip-Cov or KL-Cov selects: those given for the whole step, or of these tokens."""
    if inputs.covariance_selected is not None:
        return inputs.covariance_selected & inputs.tokens.mask
    mask, selected = inputs.tokens.mask, torch.zeros_like(inputs.tokens.mask)
    _, below, above = ratio_and_clipped(logprobs, inputs, config)
    clipped = below | above
    selected[mask] = select_by_covariance(logprobs[mask], inputs.tokens.advantages[mask], clipped[mask], config)
    return selected


def ratio_and_clipped(logprobs: Tensor, inputs: LossInputs, config: GRPOLossConfig) -> tuple[Tensor, Tensor, Tensor]:
    """(the ratio of each token, or of its sequence; whether it is clipped from below, from above), [N] each."""
    tokens, terms = inputs.tokens, config.token_terms
    old = logprobs if tokens.old_logprobs is None else torch.where(tokens.mask, tokens.old_logprobs, 0.0)
    if tokens.sampling_logprobs is not None and terms.correction == "sampler":
        old = denominator(old, tokens.sampling_logprobs, tokens.mask)
    log_ratio = sequence_log_ratio(logprobs, inputs, config) if config.ratio_of_sequence else logprobs - old
    return log_ratio.exp(), *policy_term(logprobs, log_ratio, tokens.advantages, terms, old=old)[1:]


def vespo_weights(current: Tensor, old: Tensor, inputs: LossInputs, config: GRPOLossConfig) -> Tensor:
    """phi(w) = e^lambda w^k e^(-lambda w), [N] fp64, with w the ratio of the whole sequence of a token."""
    tokens, sequences, lowest = inputs.tokens, inputs.sequences, math.log(1e-8)
    log_w = sequences.sum((current - old).clamp(-20.0, 20.0))
    if tokens.sampling_logprobs is not None and config.sampling_correction is not None:
        rho = sampling_weights(log_rho(old, tokens.sampling_logprobs, tokens.mask), config)
        # Bounds of rho may leave out 1, which it is where the mask is 0.
        log_w = log_w + sequences.sum(torch.where(tokens.mask, rho.log().clamp(lowest, 20.0), 0.0))
    return vespo_phi(sequences.spread(log_w.clamp(lowest, 20.0), len(current)), tokens.advantages, config)


def vespo_phi(log_w: Tensor, advantages: Tensor, config: GRPOLossConfig) -> Tensor:
    """phi(w) of the same shape as `log_w` and the advantages.

    On policy, w = 1, phi is 1 whatever the constants are:

    >>> config, A = GRPOLossConfig(loss_type="vespo"), torch.tensor([1.0, -1.0])
    >>> [[round(x, 4) for x in vespo_phi(torch.tensor(w).log(), A, config).tolist()] for w in (1.0, 2.0)]
    [[1.0, 1.0], [0.1991, 1.0827]]
    """
    risen = advantages >= 0
    # Not torch.where of two numbers, which rounds them to the default dtype.
    k = torch.full_like(advantages, config.vespo_k_neg).masked_fill_(risen, config.vespo_k_pos)
    decay = torch.full_like(advantages, config.vespo_lambda_neg).masked_fill_(risen, config.vespo_lambda_pos)
    decay = decay.clamp_min(1e-4)
    return torch.exp(decay + k * log_w - decay * log_w.exp())


def entropy_threshold(entropies: Tensor, inputs: LossInputs, config: GRPOLossConfig) -> float | Tensor:
    """The least entropy of the tokens to keep: the given one of the whole step, or the quantile of these entropies."""
    if inputs.entropy_threshold is not None:
        return inputs.entropy_threshold
    if not len(entropies):
        return torch.inf
    return torch.quantile(entropies, 1 - config.top_entropy_quantile)


def sequence_log_ratio(logprobs: Tensor, inputs: LossInputs, config: GRPOLossConfig) -> Tensor:
    """The mean of log p - log p_old over the unmasked tokens of its sequence, at each token: [N], differentiable.

    For "gmpo" it is the mean of the clipped log-ratios: r is the geometric mean of the clipped ratios.
    """
    tokens, sequences = inputs.tokens, inputs.sequences
    change = logprobs - (logprobs.detach() if tokens.old_logprobs is None else tokens.old_logprobs)
    if config.loss_type == "gmpo":
        change, *_ = clipped_change(change, tokens.advantages, config.token_terms)
    return sequences.spread(sequences.mean(change, tokens.mask), len(logprobs)).to(logprobs.dtype)


def share_of_ratio(logprobs: Tensor, ratio_gradient: Tensor, inputs: LossInputs, config: GRPOLossConfig) -> Tensor:
    """The gradient in log p [N] that comes from one in the log-ratios of sequences, [N]: the backward of the above.

    Each token gets an equal share of its sequence's, but for those that "gmpo" clips.
    """
    tokens, sequences = inputs.tokens, inputs.sequences
    shares = sequences.sum(ratio_gradient) / sequences.sum(tokens.mask).clamp_min(1.0)
    moves = tokens.mask
    if config.loss_type == "gmpo":
        old = logprobs if tokens.old_logprobs is None else tokens.old_logprobs
        _, below, above = clipped_change(logprobs - old, tokens.advantages, config.token_terms)
        moves = moves & (tokens.advantages != 0) & ~(below | above)
    return torch.where(moves, sequences.spread(shares, len(logprobs)), 0.0).to(ratio_gradient.dtype)


def grpo_loss(
    logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs, config: GRPOLossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss (0-d) and its statistics from log p and entropy [N], for autograd."""
    factors: dict[str, Any] = {**token_factors(logprobs, entropy, inputs, config)}
    return token_loss(
        logprobs,
        **vars(inputs.tokens),
        **factors,
        entropy=entropy,
        log_ratio=sequence_log_ratio(logprobs, inputs, config) if config.ratio_of_sequence else None,
        terms=config.token_terms,
    )
