"""Each estimator of advantages against its paper's formula, one completion at a time."""

import itertools
import math
import statistics
from typing import get_args, get_type_hints

import pytest
import torch

from fused_grpo.errors import InputError
from fused_grpo.trainer import GRPOConfig
from fused_grpo.trainer.collect.advantages import best_of_k_advantages, multi_objective_advantages

G = 4
REWARDS = [[1.0, 0.0, 0.25, 0.75], [0.0, 0.0, 3.0, 0.0], [0.1, 0.1, 0.1, 0.1], [0.0, 0.0, 0.0, 0.0]]
EVERY = [reward for group in REWARDS for reward in group]
GREEDY = [0.5, 3.0, 0.1, -1.0]  # the reward of each group's greedy completion
LENGTHS = [3.0, 1.0, 4.0, 2.0, 9.0]  # of the completions of every group
K = 3
OF_BATCH = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")


def of_ours(estimator, rewards=REWARDS):
    flat = torch.tensor(rewards).view(-1, 1)
    size, lengths = len(rewards[0]), torch.tensor([length for group in rewards for length in LENGTHS[: len(group)]])
    # Only a group's first completion has to know its baseline.
    baselines = torch.tensor([[greedy, *[math.nan] * (size - 1)] for greedy in GREEDY[: len(rewards)]]).flatten()
    args = GRPOConfig(advantage_estimator=estimator, pkpo_k=K)
    return multi_objective_advantages(flat, torch.ones(1), args, size=size, lengths=lengths, baselines=baselines)


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
    centred = [other - statistics.mean(rewards) for rewards in REWARDS for other in rewards]
    return (reward - statistics.mean(group)) / statistics.stdev(centred)


def dr_grpo(group, reward):
    """Dr. GRPO: without the standard deviation."""
    return reward - statistics.mean(group)


def opo(group, reward):
    """OPO eq. 6: the baseline is the sum of lengths times rewards over the sum of lengths."""
    return reward - sum(map(math.prod, zip(LENGTHS, group, strict=False))) / sum(LENGTHS[:G])


def gpg(group, reward):
    """GPG: the centred reward, times B / (B - M), with M of B groups without a gradient."""
    without = sum(len(set(rewards)) == 1 for rewards in REWARDS)
    return (reward - statistics.mean(group)) * len(REWARDS) / (len(REWARDS) - without)


def pkpo(group, reward):
    """PKPO eq. 33, over n: sums over the sets of k of n that contain i, of their best less the best without i."""
    i, n = group.index(reward), len(group)
    sets = [subset for subset in itertools.combinations(range(n), K) if i in subset]
    added = [max(group[j] for j in subset) - max(group[j] for j in subset if j != i) for subset in sets]
    return n * sum(added) / math.comb(n, K)


def remax(group, reward):
    """ReMax algorithm 1: less the reward of the greedy response."""
    return reward - GREEDY[REWARDS.index(group)]


PAPERS = [rloo, maxrl, reinforce_plus_plus, reinforce_plus_plus_baseline, dr_grpo, opo, gpg, pkpo, remax]


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


@pytest.mark.parametrize(
    "estimator", ["rloo", "maxrl", "dr_grpo", "reinforce_plus_plus_baseline", "opo", "gpg", "pkpo"]
)
def test_a_group_with_equal_rewards_has_advantages_of_exactly_0(estimator):
    assert of_ours(estimator)[8:].tolist() == [0.0] * 8
    assert of_ours(estimator)[:8].abs().max() > 0.5


@pytest.mark.parametrize("estimator", OF_BATCH)
def test_a_batch_with_equal_rewards_has_no_advantages_at_all(estimator):
    assert of_ours(estimator, [[0.1] * 6, [0.1] * 6]).tolist() == [0.0] * 12


@pytest.mark.parametrize("estimator", get_args(get_type_hints(GRPOConfig)["advantage_estimator"]))
def test_a_batch_without_groups_has_no_advantages(estimator):
    """Dynamic sampling may keep none."""
    args, none = GRPOConfig(advantage_estimator=estimator), torch.empty(0)
    options = {"size": G, "lengths": none, "baselines": none}
    assert multi_objective_advantages(none[:, None], torch.ones(1), args, **options).tolist() == []


@pytest.mark.parametrize("size", [1e10, 1e20, 1e37])
@pytest.mark.parametrize(
    "estimator", sorted({*get_args(get_type_hints(GRPOConfig)["advantage_estimator"])} - {"remax"})
)
def test_rewards_as_large_as_fp32_have_their_advantages(estimator, size):
    """Squares of 1e20 are infinite in fp32."""
    small = of_ours(estimator, [[1e3 * reward for reward in group] for group in REWARDS])
    large = of_ours(estimator, [[size * reward for reward in group] for group in REWARDS])
    scale = size / 1e3 if large.max() > 1e3 else 1.0  # 1 of those that divide by a deviation or a mean
    torch.testing.assert_close(large / scale, small, rtol=1e-3, atol=1e-6)
    assert small.any()


def test_a_group_of_one_is_compared_with_the_batch():
    given = of_ours("reinforce_plus_plus", [[1.0], [0.0], [0.0], [1.0]])
    torch.testing.assert_close(given.abs(), torch.full((4,), 0.5 / math.sqrt(1 / 3)))
    assert given.sign().tolist() == [1.0, -1.0, -1.0, 1.0]


def test_a_rate_of_success_has_no_negative_rewards():
    with pytest.raises(InputError, match=r"got a reward of -1 with advantage_estimator='maxrl', want rewards >= 0"):
        of_ours("maxrl", [[1.0, -1.0]])


def test_a_group_equal_to_its_greedy_completion_has_exactly_0():
    assert of_ours("remax")[8:12].tolist() == [0.0] * 4
    assert of_ours("remax")[12:].tolist() == [1.0] * 4


@pytest.mark.parametrize("k", [2, 3, 4])
def test_the_mean_gradient_of_pkpo_is_that_of_the_best_of_k(k):
    """Over all draws of 4 completions from a policy over 3, times their probabilities."""
    logits = torch.tensor([0.3, -0.8, 0.1], dtype=torch.float64, requires_grad=True)
    rewards, log_p = torch.tensor([0.2, 1.0, -0.5], dtype=torch.float64), logits.log_softmax(0)
    best = sum(rewards[list(s)].max() * log_p[list(s)].sum().exp() for s in itertools.product(range(3), repeat=k))
    draws = torch.tensor(list(itertools.product(range(3), repeat=G)))
    advantages = best_of_k_advantages(rewards[draws], k)
    surrogate = (log_p[draws].sum(1).exp().detach() * (advantages * log_p[draws]).mean(1)).sum()
    ours, exact = (torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (surrogate, best))
    torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)


def test_a_group_with_fewer_scores_than_k_compares_all_of_them():
    groups = torch.tensor([[0.0, 1.0, math.nan, math.nan], [1.0, math.nan, math.nan, math.nan]])
    given = best_of_k_advantages(groups, 4).nan_to_num(0.0)
    assert given.tolist() == [[0.0, 2.0, 0.0, 0.0], [0.0] * 4]
