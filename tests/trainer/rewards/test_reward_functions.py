"""All functions of a run together: names, weights, times, logs, options."""

import math
import time

import pytest
import torch

from fused_grpo.errors import InputError, RewardError
from fused_grpo.trainer.data.datasets import check_columns
from fused_grpo.trainer.rewards import Rewards


def one(completions):
    return [1.0] * len(completions)


def test_columns_stand_in_the_order_of_the_functions_with_nan_for_none(reward):
    async def two(completions):
        return [None, 2.0, 2.0, None]

    output = reward([two, one])
    expected = torch.tensor([[math.nan, 1], [2, 1], [2, 1], [math.nan, 1]])
    torch.testing.assert_close(output.per_function, expected, equal_nan=True)
    assert not output.dropped.any()


def test_names_differ_and_weights_follow_them():
    rewards = Rewards([one, lambda completions: [], one, "builtins:len"], weights=[1, 2, 3, 4])
    assert rewards.names == ["one", "<lambda>", "one_2", "len"]
    assert rewards.weights.tolist() == [1.0, 2.0, 3.0, 4.0]
    numbered = type("Numbered", (), {"__call__": one, "__name__": 1})()
    assert Rewards([numbered, numbered]).names == ["1", "1_2"]
    assert Rewards(one).weights.tolist() == [1.0]


def test_each_function_has_its_own_time(reward):
    def slow(completions):
        time.sleep(0.2)
        return [0.0] * 4

    seconds = reward([slow, one]).seconds
    assert 0.2 <= seconds["slow"] < 5
    assert seconds["one"] < 0.2


def test_columns_of_a_prompt_completion_set_are_not_passed():
    seen = []

    def spies(completions, completion_ids, **columns):
        seen.append((completion_ids, sorted(columns)))
        return [0.0] * len(completions)

    given = [{"prompt": "p", "answer": "P", "completion": "said before", "completion_ids": [7]}] * 4
    rewards = Rewards(spies)
    check_columns(given[0], name="train_dataset")
    rewards.check_columns(given[0])
    rewards(given, ["a"] * 4, [[1]] * 4, num_generations=2)
    assert seen == [([[1]] * 4, ["answer", "log_extra", "log_metric", "prompts", "trainer_state"])]
    with pytest.raises(InputError, match="'<lambda>', which wants 'completion', and data with"):
        Rewards(lambda completion: []).check_columns(given[0])


def test_what_functions_log_comes_back(reward):
    def logs(completions, log_extra, log_metric):
        log_extra("upper", [text.upper() for text in completions])
        log_metric("length", 1)
        log_metric("length", torch.tensor(4.0))
        return [0.0] * 4

    def logs_too(completions, log_extra, log_metric):
        log_extra("upper", ["x"] * 4)
        log_metric("length", 4)
        return [0.0] * 4

    output = reward([logs, logs_too])
    assert output.extra == {"upper": list("ABCD"), "logs_too/upper": ["x"] * 4}
    assert output.metrics == {"length": 3.0}


def test_a_logged_column_of_another_length_is_refused(reward):
    def logs(completions, log_extra):
        log_extra("short", ["x"])
        return [0.0] * 4

    with pytest.raises(RewardError, match="'logs' logged 1 values as 'short' for 4 completions"):
        reward(logs)


def test_columns_can_be_checked_before_anything_is_generated():
    def asks(completions, solution, answer):
        return []

    rewards = Rewards([one, asks])
    rewards.check_columns(["prompt", "answer", "solution"])
    with pytest.raises(InputError, match="'asks', which wants 'solution'"):
        rewards.check_columns(["prompt", "answer"])


@pytest.mark.parametrize(
    ("functions", "options", "message"),
    [
        ([], {}, "got reward_funcs=\\[\\], want a function"),
        (3, {}, "got reward_funcs=3, want"),
        ([one, None], {}, "want a function or a non-empty list"),
        (one, {"weights": [1.0, 2.0]}, "got 2 reward_weights for 1 reward functions"),
        (one, {"weights": [math.nan]}, "want finite numbers"),
        (one, {"processing_classes": [None, None]}, "got 2 reward_processing_classes for 1"),
        (one, {"failure": "ignore"}, "got failure='ignore', want one of 'fail', 'retry', 'drop'"),
        (one, {"retries": -1}, "got retries=-1"),
        (one, {"timeout": 0}, "got timeout=0"),
        (one, {"timeout": 1e10}, "want seconds > 0, 100000000 at most"),
    ],
)
def test_options_that_cannot_be_are_refused(functions, options, message):
    with pytest.raises(InputError, match=message):
        Rewards(functions, **options)


def test_half_a_group_is_refused():
    rows = [{"prompt": "p"}] * 3
    with pytest.raises(InputError, match=r"got 3 rows, 3 completions .* num_generations=2"):
        Rewards(one)(rows, list("abc"), [[1]] * 3, num_generations=2)
