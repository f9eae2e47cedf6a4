"""Which tokens Clip-Cov and KL-Cov select (arXiv:2505.22617), out of all tokens of an optimizer step.

The entropy of a policy falls by the covariance of log-probs and advantages. Few tokens have most of it:

    cov = (log p - mean log p) * (A - mean A)         with means over all tokens of the step

KL-Cov adds a penalty to the tokens of largest covariance. Clip-Cov takes the policy term from some unclipped tokens
within its bounds; the paper draws them at random. Here the draw is a systematic one, evenly over these tokens in the
order of their covariances. So it depends on nothing but the tokens: not on a seed, the order of sequences,
micro-batches or processes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fused_grpo.config import GRPOLossConfig


def select_by_covariance(logprobs: Tensor, advantages: Tensor, clipped: Tensor, config: GRPOLossConfig) -> Tensor:
    """Which tokens are selected, [N] bool, from log-probs, advantages and `clipped` (bool) of all tokens, each [N].

    Of four tokens, the one whose log-prob and advantage are both high has the largest covariance:

    >>> from fused_grpo.config import GRPOLossConfig
    >>> logprobs, advantages = torch.tensor([-0.1, -2.0, -2.0, -0.5]), torch.tensor([2.0, -1.0, 1.0, 0.0])
    >>> unclipped = torch.zeros(4, dtype=torch.bool)
    >>> select_by_covariance(logprobs, advantages, unclipped, GRPOLossConfig(kl_cov_ratio=0.25)).tolist()
    [True, False, False, False]
    """
    some = (logprobs.double(), advantages.double())
    covariances = torch.stack([values - values.mean() for values in some]).prod(0)
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
