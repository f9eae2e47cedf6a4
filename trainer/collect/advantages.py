"""From rewards to advantages, on whole groups, before anything is cut into micro-batches.

Of a group, the G completions of one prompt, the mean is the baseline and the standard deviation (with Bessel's
correction, plus 1e-4) the scale. A function that returned None for a completion is left out of its sum; a completion
that no function scored gets advantage 0 and takes no part in its group's statistics.

docs/rewards.md has the two orders in which several functions are combined, and docs/loss.md the other baselines and
scales of `advantage_estimator`, with their formulas and papers.

**The optimal token baseline** (arXiv:2602.07078) is another one for each place in the completions of a group, by
squared norms s_j of the gradients of log-probs in the logits (`_maths/moments.py`) and weights rho_j of the sampling
correction: W_it is the sum of rho_j^2 s_j over the tokens of completion i up to place t.

`tir_optimal_token_baseline` is verl's variant for tool-integrated reasoning: places count the model's own tokens alone,
so that turns of different tools' outputs are compared, and where a completion is alone its baseline is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, isnan
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_grpo.errors import InputError
from fused_grpo.trainer.config.grpo_config import GRPOConfig

EPSILON = 1e-4
LARGE = 1e15  # rewards whose squares, sums and products with numbers of tokens come near the end of fp32
EPSILON_OF_BATCH = 1e-8  # only against a division by 0


def total_rewards(per_function: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum [B] of rewards [B, F] (NaN: not scored by that function); NaN where no function scored."""
    unscored = per_function.isnan().all(1)
    return torch.where(unscored, torch.nan, (per_function.nan_to_num(0.0) * weights).sum(1))


def multi_objective_advantages(
    per_function: Tensor,
    weights: Tensor,
    args: GRPOConfig,
    *,
    size: int,
    lengths: Tensor | None = None,
    baselines: Tensor | None = None,
) -> Tensor:
    """Advantages [B] from rewards [B, F] (NaN: not scored by that function), of groups of `size`, and weights [F].

    "opo" needs `lengths` [B], the tokens of each completion, and "remax" `baselines` [B], of which the first one of a
    group counts: the reward of the greedy completion, NaN where it has none. InputError for negative rewards with
    "maxrl".

    Equals, for "normalize_then_sum", which knows no estimator:
        total = sum over f of w_f * (r_f - mean_group(r_f)) / (std_group(r_f) + 1e-4)
        (total - mean_batch(total)) / (std_batch(total) + 1e-4)

    With "gpg", a group that is not all equal has twice its advantages, r - 0.5, where one of two groups is:

    >>> rewards, weights = torch.tensor([[1.0], [0.0], [0.0], [0.0]]), torch.ones(1)
    >>> multi_objective_advantages(rewards, weights, GRPOConfig(advantage_estimator="gpg"), size=2).tolist()
    [1.0, -1.0, 0.0, 0.0]

    With "remax", the greedy completion of the first prompt has 0.5, that of the second one 0:

    >>> remax, greedy = GRPOConfig(advantage_estimator="remax"), torch.tensor([0.5, 0.5, 0.0, 0.0])
    >>> multi_objective_advantages(rewards, weights, remax, size=2, baselines=greedy).tolist()
    [0.5, -0.5, 0.0, 0.0]
    """
    if not len(per_function):  # dynamic sampling has kept no group
        return torch.zeros(0)
    if per_function.dtype == torch.float32 and (per_function * weights).nan_to_num(0.0).abs().max() > LARGE:
        batch_arguments: dict[str, Any] = {"size": size, "lengths": lengths, "baselines": baselines}
        return multi_objective_advantages(per_function.double(), weights.double(), args, **batch_arguments).float()
    in_batch = scaled_in_batch(per_function, weights, args, size=size)
    if in_batch is not None and args.multi_objective_aggregation == "normalize_then_sum":
        advantages = ((in_batch - in_batch.nanmean()) / (nanstd(in_batch) + EPSILON)).nan_to_num(0.0).flatten()
        # The mean of the batch is 0 but for rounding, which is no advantage of a group whose rewards are all equal.
        columns = per_function.T
        equal = _are_equal(columns.reshape(-1, size)).view(len(columns), -1).all(0).repeat_interleave(size)
        return advantages.masked_fill(equal, 0.0)
    estimator, groups = args.advantage_estimator, total_rewards(per_function, weights).view(-1, size)
    advantages = centred = _centred(groups)
    if estimator == "grpo" and args.scale_rewards != "none":
        advantages = centred / (nanstd(groups if in_batch is None else in_batch) + EPSILON)
    elif estimator == "rloo":
        count = (~groups.isnan()).sum(1, keepdim=True)
        advantages = centred * count / (count - 1).clamp_min(1)
    elif estimator == "maxrl":
        if (groups < 0).any():
            raise InputError(
                f"got a reward of {groups.nan_to_num(0.0).min().item():g} with advantage_estimator='maxrl', want "
                "rewards >= 0, whose mean is a rate of success; fix: shift them, or another estimator"
            )
        mean = groups.nanmean(1, keepdim=True)
        advantages = torch.where(mean > 0, centred / mean, 0.0)
    elif in_batch is not None:  # of "reinforce_plus_plus"
        advantages = in_batch / (nanstd(in_batch) + EPSILON_OF_BATCH)
    elif estimator == "opo":
        assert lengths is not None
        advantages = _centred(groups, weights=lengths.view(groups.shape))
    elif estimator == "gpg":
        scored, unequal = (~groups.isnan()).any(1).sum(), (~_are_equal(groups)).sum()
        advantages = centred * scored / unequal.clamp_min(1)
    elif estimator == "pkpo":
        advantages = best_of_k_advantages(groups, args.pkpo_k)
    elif estimator == "remax":
        assert baselines is not None
        advantages = groups - baselines.view(groups.shape)[:, :1]
    return advantages.nan_to_num(0.0).flatten()


def scaled_in_batch(per_function: Tensor, weights: Tensor, args: GRPOConfig, *, size: int) -> Tensor | None:
    """What advantages are divided by the standard deviation of, [1, B], where it is that of the whole batch."""
    if args.multi_objective_aggregation == "normalize_then_sum":
        columns = per_function.T
        groups = columns.reshape(-1, size)
        normalised = _centred(groups) / (nanstd(groups) + EPSILON)
        return total_rewards(normalised.view(columns.shape).T, weights)[None]
    totals = total_rewards(per_function, weights)
    if args.advantage_estimator == "reinforce_plus_plus":
        return _centred(totals[None])
    if args.advantage_estimator == "reinforce_plus_plus_baseline":
        # A group with equal rewards keeps an advantage of exactly 0: the mean of what is centred is 0 but for rounding.
        return _centred(totals.view(-1, size)).view(1, -1)
    return totals[None] if args.advantage_estimator == "grpo" and args.scale_rewards == "batch" else None


def best_of_k_advantages(groups: Tensor, k: int) -> Tensor:
    """Advantages [P, G] for the best of k completions, from rewards [P, G] (NaN: not scored, and NaN in the result).

    Of n rewards, A_i is k times the mean, over sets of k - 1 others, of what r_i adds to the best of them. The mean of
    A_i grad log p_i is an unbiased gradient of the expected best reward of k completions (pass@k for rewards of 0 and
    1), with the baseline "leave one out minus one" of the paper. In ascending order (j from 1), r_j < r_i is the best
    of C(j - 1, k - 2) of the C(n - 1, k - 1) sets. Of fewer than k rewards, all are compared.

    One success of three stands out among 2 completions, whichever is the other. One of two does in half of the pairs.

    >>> best_of_k_advantages(torch.tensor([[0.0, 1.0, 0.0], [1.0, 1.0, 0.0]]), 2).tolist()
    [[0.0, 2.0, 0.0], [1.0, 1.0, 0.0]]
    """
    ascending = groups.sort(1).values  # NaN last
    counts = (~groups.isnan()).sum(1).tolist()
    shares = torch.tensor([_shares_of_best(n, min(k, n), groups.shape[1]) for n in counts], dtype=groups.dtype)
    gains = (groups[:, :, None] - ascending[:, None, :]).clamp_min(0.0)
    # Of what comes after the scored ones the share is 0, and the gain NaN.
    return (gains.nan_to_num(0.0) * shares[:, None, :].to(groups.device)).sum(2).where(~groups.isnan(), torch.nan)


def _shares_of_best(n: int, k: int, size: int) -> list[float]:
    """k times the share of sets of k - 1 others of which the j-th of n in ascending order is the best, for each j."""
    sets = comb(max(0, n - 1), max(0, k - 1))
    return [k * comb(j, k - 2) / sets if k >= 2 and j < n else 0.0 for j in range(size)]


def _centred(groups: Tensor, weights: Tensor | None = None) -> Tensor:
    """[P, G] without the mean of each row, exactly 0 where a row is equal: its mean is rounded, and divided by 1e-4.

    The mean is weighted by `weights` [P, G]. A completion of 1 token and one of 3, of which the longer one is right:

    >>> _centred(torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 3.0]])).tolist()
    [[-0.75, 0.25]]
    """
    mean = groups.nanmean(1, keepdim=True)
    if weights is not None:
        weights = weights.masked_fill(groups.isnan(), 0.0)
        mean = (weights * groups).nansum(1, keepdim=True) / weights.sum(1, keepdim=True)
    return (groups - mean).masked_fill(_are_equal(groups) & ~groups.isnan(), 0.0)


def _are_equal(groups: Tensor) -> Tensor:
    """Whether the values of each row of [P, G] that are not NaN are all the same, [P, 1] bool."""
    lowest, highest = (groups.masked_fill(groups.isnan(), fill) for fill in (torch.inf, -torch.inf))
    return lowest.amin(1, keepdim=True) >= highest.amax(1, keepdim=True)


def spread(groups: Tensor, baselines: Tensor | None) -> Tensor:
    """How far the rewards of each row of [P, G] are apart, [P]: 0 gives no advantage.

    That is their standard deviation, or with ReMax their largest difference from `baselines` [P, 1]; NaN has none.
    """
    if baselines is None:
        return nanstd(groups)[:, 0]
    return (groups - baselines).abs().nan_to_num(0.0).amax(1)


def nanstd(values: Tensor) -> Tensor:
    """Standard deviation [P, 1] of each row of [P, G] without its NaNs; 0 where they are equal, or one alone."""
    count = (~values.isnan()).sum(1, keepdim=True)
    squares = _centred(values).square().nansum(1, keepdim=True)
    return (squares / (count - 1).clamp_min(1)).sqrt()


class Scores(NamedTuple):
    """A completion of n own tokens, as its group's baseline sees it."""

    reward: float  # NaN: it has no reward, advantages of 0, and no part in the baseline
    norms: Tensor  # rho^2 s, [n]; [0] of one that goes through no model, which takes no part either
    places: Tensor  # [n] int64, where these tokens are in the completion

    @property
    def takes_part(self) -> bool:
        return len(self.norms) > 0 and not isnan(self.reward)


def token_advantages(group: Sequence[Scores], *, zero_tail: bool) -> list[Tensor]:
    """Advantages [n] fp32 of the tokens of each completion of a group, 0 where fewer than two rewards differ.

    With `zero_tail`, the baseline is 0 where one completion alone is left, and not its own reward.

    A right completion of one token and a wrong one of two; first tokens with norms of 1 and 3 have b_1 = 1/4:

    >>> completions = [(1.0, [1.0], [0]), (0.0, [3.0, 1.0], [0, 1])]
    >>> group = [Scores(r, torch.tensor(norms), torch.tensor(places)) for r, norms, places in completions]
    >>> [advantages.tolist() for advantages in token_advantages(group, zero_tail=False)]
    [[0.75], [-0.25, 0.0]]
    """
    taking = [one for one in group if one.takes_part]
    if len({one.reward for one in taking}) < 2:  # so that the collector need not know the norms of such a group
        return [torch.zeros(len(one.places)) for one in group]
    length = max(int(one.places[-1]) + 1 for one in taking)
    paths = torch.zeros(len(taking), length, dtype=torch.float64)
    reached = torch.zeros(len(taking), length, dtype=torch.bool)
    for row, one in enumerate(taking):
        paths[row, one.places], reached[row, one.places] = one.norms.double().cumsum(0), True
    # Relative to one of the rewards, which rounds less.
    rewards = torch.tensor([one.reward for one in taking], dtype=torch.float64)[:, None]
    relative, totals = rewards - rewards[0], paths.sum(0)
    advantages = torch.where(totals > 0, relative - (paths * relative).sum(0) / totals, 0.0)
    if zero_tail:
        advantages = torch.where(reached.sum(0) == 1, rewards, advantages)
    rows = iter(advantages)
    return [next(rows)[one.places].float() if one.takes_part else torch.zeros(len(one.places)) for one in group]
