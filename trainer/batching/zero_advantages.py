"""Completions without a gradient are left out of the forward pass: those whose advantage is 0.

The policy term of every loss is a multiple of the advantage, which is 0 where all rewards of a group are equal. Such a
completion has no gradient, unless something else gives it one or lets other tokens depend on it:

    beta > 0                      the KL term is of every token
    distillation_coef             the divergence from the teacher, too
    entropy_coef                  the bonus, too
    use_adaptive_entropy          the next coefficient follows from the entropy of every token
    top_entropy_quantile < 1      every token decides which entropies are high
    clip_cov_ratio, kl_cov_ratio  every token is in the means of covariances
    a router loss                 every token has its share in the load of the experts

Whatever else the loss does (clipping, the ratio and the weight of a sequence, sampling correction, off-policy mask)
stays within a sequence. Normalisers count what is left out, so loss and gradients are the same but for the order of
sums.

In a step without any advantage, each rank keeps one completion: its log-probs show whether the engine has the trainer's
weights. An engine without them may well be the reason that all rewards are equal.
"""

from __future__ import annotations

import dataclasses

from accelerate import Accelerator

from fused_grpo.config import GRPOLossConfig
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.distributed.failures import any_rank
from fused_grpo.trainer.types import EffectiveBatch

Metrics = dict[str, float]


def can_skip(args: GRPOConfig, *, router_coefficient: float) -> bool:
    """Whether a completion with advantage 0 has no gradient and no effect on others, and may be left out."""
    weights = (args.beta, args.distillation_coef, args.entropy_coef, args.clip_cov_ratio, args.kl_cov_ratio)
    of_every_token = args.use_adaptive_entropy or args.top_entropy_quantile < 1.0 or any((*weights, router_coefficient))
    return args.skip_zero_advantages and not of_every_token


def skip_zero_advantages(batch: EffectiveBatch, accelerator: Accelerator) -> EffectiveBatch:
    """The batch with its completions of advantage 0 `skipped`, all but one where no rank has another. A collective."""
    in_loss = batch.in_forward
    skipped = in_loss & (batch.advantages == 0)
    if not any_rank(accelerator, bool((in_loss & ~skipped).any())):
        skipped[in_loss.nonzero()[:1, 0]] = False
    return dataclasses.replace(batch, skipped=skipped)


def skipped_lengths(batch: EffectiveBatch) -> list[int]:
    """Numbers of completion tokens of the sequences that are left out."""
    skipped = [] if batch.skipped is None else batch.skipped.nonzero()[:, 0].tolist()
    return [len(batch.completion_ids[index]) for index in skipped]


def skipped_metrics(batch: EffectiveBatch, config: GRPOLossConfig) -> tuple[Metrics, Metrics]:
    """What is known of this rank's skipped completions without their log-probs: none of their tokens is clipped.

    Returns:
        The metrics and the sums of ratios (`ratio_sums`) of a micro-batch of them.
    """
    lengths = skipped_lengths(batch)
    if not lengths:
        return {}, {}
    tokens, of_sequence = float(sum(lengths)), config.ratio_of_sequence
    unclipped = dict.fromkeys(("low_sum", "low_min", "high_sum", "high_max"), 0.0)
    ratios = {**unclipped, "ratios_sum": float(len(lengths)) if of_sequence else tokens}
    return {"num_tokens": tokens, "zero_gradient_fraction": 1.0}, ratios
