"""Each estimator of advantages against its paper's formula, one completion at a time."""

import math
import statistics

import pytest
import torch

from fused_grpo.errors import InputError
from fused_grpo.trainer.collect.advantages import multi_objective_advantages

G = 4
REWARDS = [[1.0, 0.0, 0.25, 0.75], [0.0, 0.0, 3.0, 0.0], [0.1, 0.1, 0.1, 0.1], [0.0, 0.0, 0.0, 0.0]]
EVERY = [reward for group in REWARDS for reward in group]
OF_BATCH = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")


def of_ours(estimator, rewards=REWARDS):
    flat = torch.tensor(rewards).view(-1, 1)
    return multi_objective_advantages(flat, torch.ones(1), len(rewards[0]), scale="group", estimator=estimator)


def rloo(group, reward):
    """RLOO eq. 8: against the mean of the other samples."""
    return reward - (sum(group) - reward) / (len(group) - 1)


def maxrl(group, reward):
    """MaxRL algorithm 1: the centred reward over the mean; a group without a success is dropped."""
    return (reward - statistics.mean(group)) / statistics.mean(group) if any(group) else 0.0


def reinforce_plus_plus(group, reward):
    """REINFORCE++ eq. 9: normalised by mean and standard deviation of the global batch."""
    return (reward - statistics.mean(EVERY)) / statistics.stdev(EVERY)


def reinforce_plus_plus_baseline(group, reward):
    """REINFORCE++ eq. 11: the group's mean subtracted, then normalised over the global batch."""
    centred = [other - statistics.mean(some) for some in REWARDS for other in some]
    return (reward - statistics.mean(group)) / statistics.stdev(centred)


def dr_grpo(group, reward):
    """Dr. GRPO: without the standard deviation."""
    return reward - statistics.mean(group)


PAPERS = [rloo, maxrl, reinforce_plus_plus, reinforce_plus_plus_baseline, dr_grpo]


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.__name__)
def test_advantages_are_those_of_the_paper(paper):
    expected = [paper(group, reward) for group in REWARDS for reward in group]
    torch.testing.assert_close(of_ours(paper.__name__), torch.tensor(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.__name__)
def test_unscored_completions_take_no_part(paper):
    with_more = [[*group, math.nan] for group in REWARDS]
    given = of_ours(paper.__name__, with_more).view(-1, G + 1)
    torch.testing.assert_close(given[:, :G].flatten(), of_ours(paper.__name__), rtol=1e-6, atol=1e-6)
    assert given[:, G].tolist() == [0.0] * 4


@pytest.mark.parametrize("estimator", ["rloo", "maxrl", "dr_grpo", "reinforce_plus_plus_baseline"])
def test_a_group_with_equal_rewards_has_advantages_of_exactly_0(estimator):
    assert of_ours(estimator)[8:].tolist() == [0.0] * 8
    assert of_ours(estimator)[:8].abs().max() > 0.5


@pytest.mark.parametrize("estimator", OF_BATCH)
def test_a_batch_with_equal_rewards_has_no_advantages_at_all(estimator):
    assert of_ours(estimator, [[0.1] * 6, [0.1] * 6]).tolist() == [0.0] * 12


def test_a_group_of_one_is_compared_with_the_batch():
    given = of_ours("reinforce_plus_plus", [[1.0], [0.0], [0.0], [1.0]])
    torch.testing.assert_close(given.abs(), torch.full((4,), 0.5 / math.sqrt(1 / 3)))
    assert given.sign().tolist() == [1.0, -1.0, -1.0, 1.0]


def test_a_rate_of_success_has_no_negative_rewards():
    with pytest.raises(InputError, match=r"got a reward of -1 with advantage_estimator='maxrl', want rewards >= 0"):
        of_ours("maxrl", [[1.0, -1.0]])
