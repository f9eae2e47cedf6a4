"""From rewards to advantages, on whole groups, before anything is cut into micro-batches.

A group is the G completions of one prompt. Its mean is the baseline; its standard deviation (with Bessel's correction,
plus 1e-4) the scale. Functions that returned None for a completion are left out of that completion's sum; a completion
that no function scored gets advantage 0 and takes no part in its group's statistics.

With several functions there are two orders. "sum_then_normalize" (GRPO) compares weighted sums, so a function whose
values spread widely dominates the sum. "normalize_then_sum" (GDPO, arXiv 2601.05242) compares each function's values
by themselves, so that each contributes in proportion to its weight, and brings the weighted sum to the scale of the
batch.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

EPSILON = 1e-4


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
) -> Tensor:
    """Advantages [B] from rewards [B, F] (NaN: not scored by that function) and weights [F].

    Equals, for "normalize_then_sum", which knows no `scale`:
        total = sum over f of w_f * (r_f - mean_group(r_f)) / (std_group(r_f) + 1e-4)
        (total - mean_batch(total)) / (std_batch(total) + 1e-4)
    """
    if aggregation == "sum_then_normalize":
        return group_advantages(total_rewards(per_function, weights), num_generations, scale=scale)
    columns = per_function.T
    groups = columns.reshape(-1, num_generations)
    normalised = _centred(groups) / (nanstd(groups) + EPSILON)
    total = total_rewards(normalised.view(columns.shape).T, weights)[None]
    advantages = ((total - total.nanmean()) / (nanstd(total) + EPSILON)).nan_to_num(0.0).flatten()
    # The mean of the batch is 0 but for rounding, which is no advantage of a group whose rewards are all equal.
    equal = _are_equal(groups).view(len(columns), -1).all(0).repeat_interleave(num_generations)
    return advantages.masked_fill(equal, 0.0)


def group_advantages(rewards: Tensor, num_generations: int, *, scale: Literal["group", "batch", "none"]) -> Tensor:
    """Advantages [B] from rewards [B], prompt-major groups of `num_generations`. NaN rewards give 0."""
    groups = rewards.view(-1, num_generations)
    centred = _centred(groups)
    if scale == "group":
        centred = centred / (nanstd(groups) + EPSILON)
    elif scale == "batch":
        centred = centred / (nanstd(rewards[None]) + EPSILON)
    return centred.nan_to_num(0.0).flatten()


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
