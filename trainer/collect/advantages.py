"""From rewards to advantages, on whole groups, before anything is cut into micro-batches.

Of a group, the G completions of one prompt, the mean is the baseline and the standard deviation (with Bessel's
correction, plus 1e-4) the scale. A function that returned None for a completion is left out of its sum; a completion
that no function scored gets advantage 0 and takes no part in its group's statistics.

With several functions there are two orders. "sum_then_normalize" (GRPO) compares weighted sums, so a function whose
values spread widely dominates. "normalize_then_sum" (GDPO, arXiv 2601.05242) compares each function's values by
themselves, so that each contributes by its weight, and brings the weighted sum to the scale of the batch.

`advantage_estimator` has other baselines and scales for the weighted sum, with the mean of the group m and n of its
completions scored:

    dr_grpo                        r - m                                                 arXiv:2503.20783
    rloo                           r - mean of the other n - 1 = (r - m) * n / (n - 1)   arXiv:2402.14740
    maxrl                          (r - m) / m, 0 where m is 0; no reward is negative    arXiv:2602.02710
    reinforce_plus_plus            (r - mean of the batch) / std of the batch            arXiv:2501.03262
    reinforce_plus_plus_baseline   (r - m) / std of r - m over the batch                 arXiv:2501.03262
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fused_grpo.errors import InputError

EPSILON = 1e-4
EPSILON_OF_BATCH = 1e-8  # only against a division by 0


def total_rewards(per_function: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum [B] of rewards [B, F] (NaN: not scored by that function); NaN where no function scored."""
    unscored = per_function.isnan().all(1)
    return torch.where(unscored, torch.nan, (per_function.nan_to_num(0.0) * weights).sum(1))


def multi_objective_advantages(
    per_function: Tensor,
    weights: Tensor,
    num_generations: int,
    *,
    scale: Literal["group", "batch", "none"],
    aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize",
    estimator: str = "grpo",
) -> Tensor:
    """Advantages [B] from rewards [B, F] (NaN: not scored by that function) and weights [F].

    Equals, for "normalize_then_sum", which knows no `scale`:
        total = sum over f of w_f * (r_f - mean_group(r_f)) / (std_group(r_f) + 1e-4)
        (total - mean_batch(total)) / (std_batch(total) + 1e-4)
    """
    if aggregation == "sum_then_normalize":
        totals = total_rewards(per_function, weights)
        return group_advantages(totals, num_generations, scale=scale, estimator=estimator)
    columns = per_function.T
    groups = columns.reshape(-1, num_generations)
    normalised = _centred(groups) / (nanstd(groups) + EPSILON)
    total = total_rewards(normalised.view(columns.shape).T, weights)[None]
    advantages = ((total - total.nanmean()) / (nanstd(total) + EPSILON)).nan_to_num(0.0).flatten()
    # The mean of the batch is 0 but for rounding, which is no advantage of a group whose rewards are all equal.
    equal = _are_equal(groups).view(len(columns), -1).all(0).repeat_interleave(num_generations)
    return advantages.masked_fill(equal, 0.0)


def group_advantages(
    rewards: Tensor, num_generations: int, *, scale: Literal["group", "batch", "none"], estimator: str = "grpo"
) -> Tensor:
    """Advantages [B] from rewards [B], prompt-major groups of `num_generations`; `scale` is that of "grpo" alone.

    NaN rewards give 0; InputError for negative ones with "maxrl".
    """
    groups = rewards.view(-1, num_generations)
    advantages = centred = _centred(groups)
    if estimator == "grpo" and scale != "none":
        advantages = centred / (nanstd(groups if scale == "group" else rewards[None]) + EPSILON)
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
    elif estimator.startswith("reinforce_plus_plus"):
        # A group with equal rewards keeps an advantage of exactly 0: the mean of what is centred is 0 but for rounding.
        whitened = centred if estimator == "reinforce_plus_plus_baseline" else _centred(rewards[None])
        advantages = whitened / (nanstd(whitened.view(1, -1)) + EPSILON_OF_BATCH)
    return advantages.nan_to_num(0.0).flatten()


def _centred(groups: Tensor) -> Tensor:
    """[P, G] without the mean of each row, exactly 0 where a row is equal: its mean is rounded, and divided by 1e-4."""
    return (groups - groups.nanmean(1, keepdim=True)).masked_fill(_are_equal(groups) & ~groups.isnan(), 0.0)


def _are_equal(groups: Tensor) -> Tensor:
    """Whether the values of each row of [P, G] that are not NaN are all the same, [P, 1] bool."""
    lowest, highest = (groups.masked_fill(groups.isnan(), fill) for fill in (torch.inf, -torch.inf))
    return lowest.amin(1, keepdim=True) >= highest.amax(1, keepdim=True)


def nanstd(values: Tensor) -> Tensor:
    """Standard deviation [P, 1] of each row of [P, G] without its NaNs; 0 for fewer than two values."""
    count = (~values.isnan()).sum(1, keepdim=True)
    squares = (values - values.nanmean(1, keepdim=True)).square().nansum(1, keepdim=True)
    return (squares / (count - 1).clamp_min(1)).sqrt()
