"""The optimal token baseline (arXiv:2602.07078): a group has one baseline for each place in its completions.

With r_i the reward of completion i, s_j the squared norm of the gradient of its token j's log-prob in the logits
(`_maths/moments.py`), and rho_j the weight of that token's sampling correction, completion i has at place t

    W_it = sum over j <= t of rho_j^2 s_j        A_it = r_i - b_t        b_t = sum_i W_it r_i / sum_i W_it

where b_t is a mean over the completions that reach t. Of all baselines of that kind it leaves the gradient least
variance, with the norm of the gradient in the weights taken for that in the logits. Where a completion is longer than
all others it is alone, and its advantages are 0. A group with equal rewards has none, in the variant below either.

`tir_optimal_token_baseline` is verl's variant for tool-integrated reasoning: places count the model's own tokens alone,
so that turns of different tools' outputs are compared, and where a completion is alone its baseline is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Scores(NamedTuple):
    """A completion of n own tokens, as its group's baseline sees it."""

    reward: float  # NaN: it has no reward, advantages of 0, and no part in the baseline
    norms: Tensor  # rho^2 s, [n]; [0] of one that goes through no model, which takes no part either
    places: Tensor  # [n] int64, where these tokens are in the completion

    @property
    def takes_part(self) -> bool:
        return len(self.norms) > 0 and not math.isnan(self.reward)


def token_advantages(group: Sequence[Scores], *, zero_tail: bool) -> list[Tensor]:
    """Advantages [n] fp32 of the tokens of each completion of a group, 0 where fewer than two rewards differ.

    Args:
        zero_tail: the baseline is 0 where one completion alone is left, and not its own reward.

    A right completion of one token and a wrong one of two; first tokens with norms of 1 and 3 have b_1 = 1/4:

    >>> of_each = [(1.0, [1.0], [0]), (0.0, [3.0, 1.0], [0, 1])]
    >>> group = [Scores(r, torch.tensor(norms), torch.tensor(places)) for r, norms, places in of_each]
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
