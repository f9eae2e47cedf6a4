"""Advantages of several rewards, against TRL's own lines and against the formula by hand."""

import ast
import importlib.util
import math
import statistics
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fused_grpo.trainer import GRPOConfig
from fused_grpo.trainer.collect.advantages import multi_objective_advantages, spread, total_rewards

NAN = float("nan")


def ours(rewards, weights, size, *, scale, aggregation="sum_then_normalize"):
    args = GRPOConfig(scale_rewards=scale, multi_objective_aggregation=aggregation)
    return multi_objective_advantages(rewards, weights, args, size=size)


ORDERS = ["sum_then_normalize", "normalize_then_sum"]


@pytest.fixture(scope="module")
def trl_advantages():
    """The part of TRL's trainer between its rewards and its slicing, as a function."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("TRL is not installed")
    folder = Path(spec.origin).parent / "trainer"
    body = (folder / "grpo_trainer.py").read_text().partition("        unscorable_mask = ")
    lines = textwrap.dedent(body[1] + body[2].partition("        # Slice to keep only")[0])
    (nanstd,) = (
        node
        for node in ast.parse((folder / "utils.py").read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "nanstd"
    )

    def advantages(per_function, weights, num_generations, *, scale, aggregation):
        options = {"reward_weights": weights, "scale_rewards": scale, "multi_objective_aggregation": aggregation}
        names = {"torch": torch, "rewards_per_func": per_function, "num_generations": num_generations}
        functions = list(range(per_function.shape[1]))
        names |= {"device": "cpu", "self": SimpleNamespace(**options, reward_funcs=functions)}
        exec(f"from __future__ import annotations\n{ast.unparse(nanstd)}\n{lines}", names)
        return names["advantages"]

    return advantages


@pytest.mark.parametrize("aggregation", ORDERS)
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("missing", [0.0, 0.3, 0.8])
def test_advantages_are_those_of_trl(trl_advantages, aggregation, scale, missing):
    generator = torch.Generator().manual_seed(7)
    rewards = torch.randn(24, 3, generator=generator) * torch.tensor([1.0, 100.0, 0.01])
    rewards[torch.rand(24, 3, generator=generator) < missing] = math.nan
    rewards[4:8, 1] = 2.5  # a function that sees no difference in one group,
    rewards[8:12, 0] = math.nan  # one that scores nothing in another,
    rewards[12:16] = math.nan  # and a group that was dropped
    weights, options = torch.tensor([1.0, -0.5, 3.0]), {"scale": scale, "aggregation": aggregation}
    given = ours(rewards, weights, 4, **options)
    torch.testing.assert_close(given, trl_advantages(rewards, weights, 4, **options), rtol=1e-5, atol=1e-5)
    assert given[12:16].tolist() == [0.0] * 4
    assert given.abs().max() > 0.5


def test_each_function_is_normalised_in_its_group_and_the_sum_in_the_batch():
    first, second, weights = [[1, 2, 6], [0, 0, 3]], [[100, 500, 300], [7, 8, 9]], (2.0, 0.5)

    def normalised(values):
        return [(value - statistics.mean(values)) / (statistics.stdev(values) + 1e-4) for value in values]

    total = [
        weights[0] * a + weights[1] * b
        for one, other in zip(first, second, strict=True)
        for a, b in zip(normalised(one), normalised(other), strict=True)
    ]
    rewards = torch.tensor([first, second], dtype=torch.float32).view(2, 6).T
    options = {"scale": "group", "aggregation": "normalize_then_sum"}
    given = ours(rewards, torch.tensor(weights), 3, **options)
    torch.testing.assert_close(given, torch.tensor(normalised(total)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("aggregation", "heard"), [*zip(ORDERS, [False, True], strict=True)])
def test_a_small_reward_counts_beside_a_large_one_where_each_is_normalised(aggregation, heard):
    large, small = torch.tensor([0.0, 1000.0, 0.0, 1000.0]), torch.tensor([0.0, 0.0, 0.01, 0.01])
    rewards, weights = torch.stack([large, small], dim=1), torch.ones(2)
    given = ours(rewards, weights, 4, scale="group", aggregation=aggregation)
    assert ((given[2] - given[0]).item() > 0.5) is heard


def of_one_function(rewards, size, **options):
    return ours(rewards[:, None], torch.ones(1), size, **options)


def test_advantages_are_those_of_the_group():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 5.0, 5.0, 5.0, 5.0])
    scale = torch.tensor([1.0, 0.0, 0.0, 1.0]).std() + 1e-4
    expected = torch.tensor([0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0]) / scale
    torch.testing.assert_close(of_one_function(rewards, 4, scale="group"), expected)
    torch.testing.assert_close(of_one_function(rewards, 4, scale="none"), expected * scale)
    torch.testing.assert_close(of_one_function(rewards, 4, scale="batch"), expected * scale / (rewards.std() + 1e-4))


@pytest.mark.parametrize("aggregation", ORDERS)
def test_equal_rewards_give_no_advantage_for_any_rounding_of_their_mean(aggregation):
    rewards = torch.tensor([[0.1, 0.7]] * 6 + [[0.1 * index, 0.3] for index in range(6)])
    given = ours(rewards, torch.tensor([1.0, 0.3]), 6, scale="group", aggregation=aggregation)
    assert given[:6].tolist() == [0.0] * 6
    assert given[6:].abs().min() > 0.1


@pytest.mark.parametrize("size", [2, 3, 7, 8, 16])
def test_equal_rewards_have_a_spread_of_exactly_0(size):
    rewards = torch.tensor([[0.1] * size, [10.1] * size, [-1e6 - 0.3] * size, [10.1] * (size - 1) + [NAN]])
    assert spread(rewards, None).tolist() == [0.0] * 4
    assert spread(torch.tensor([[10.1] * (size - 1) + [10.2]]), None).item() > 1e-3


def test_unscored_completions_take_no_part_in_their_group():
    advantages = of_one_function(torch.tensor([NAN, 1.0, 3.0, NAN, NAN, NAN]), 3, scale="none")
    torch.testing.assert_close(advantages, torch.tensor([0.0, -1.0, 1.0, 0.0, 0.0, 0.0]))


def test_total_rewards_weigh_what_was_scored():
    per_function = torch.tensor([[1.0, 2.0], [NAN, 2.0], [NAN, NAN]])
    torch.testing.assert_close(
        total_rewards(per_function, torch.tensor([1.0, 10.0])), torch.tensor([21.0, 20.0, NAN]), equal_nan=True
    )
