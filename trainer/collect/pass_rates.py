"""pass@k: the probability that at least one of k completions of a prompt is right, from n completions of each.

    pass@k = mean over prompts of 1 - C(n - c, k) / C(n, k)

c of a prompt's n completions are right: those to which the first reward function gives its full reward, `FULL_REWARD`
or more. It is the unbiased estimate of Chen et al. 2021 (arXiv 2107.03374), equation 1. pass@1 is the share of right
completions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from torch import Tensor

FULL_REWARD = 1.0


def pass_names(num_generations: int) -> dict[str, int]:
    """The metrics of so many completions per prompt, with their k: powers of 2, and all of them.

    >>> pass_names(6)
    {'pass@1': 1, 'pass@2': 2, 'pass@4': 4, 'pass@6': 6}
    """
    powers = (2**exponent for exponent in range(num_generations.bit_length()))
    return {f"pass@{k}": k for k in (*powers, num_generations)}


def pass_at(k: int, n: int, right: int) -> float:
    """The probability that a sample of k of n completions, of which so many are right, has a right one.

    >>> pass_at(2, 4, 1)  # 3 of the 6 pairs
    0.5
    """
    return 1 - math.comb(n - right, k) / math.comb(n, k)


def pass_rates(per_function: Sequence[Tensor], num_generations: int) -> dict[str, float]:
    """pass@k for every k of `pass_names`; NaN where no prompt was scored.

    Args:
        per_function: rewards [B, F] of each process, whole groups of `num_generations`, one after the other; NaN: not
            scored. A prompt none of whose completions was scored does not count, any other such completion is wrong.
    """
    groups = [group for part in per_function for group in part[:, 0].view(-1, num_generations)]
    scored = [group for group in groups if not group.isnan().all()]
    right = [int((group >= FULL_REWARD).sum()) for group in scored]
    return {
        name: fmean(pass_at(k, num_generations, count) for count in right) if right else math.nan
        for name, k in pass_names(num_generations).items()
    }
