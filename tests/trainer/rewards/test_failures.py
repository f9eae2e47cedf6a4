"""Each failure policy. Whatever fails, and however: a partial group never reaches the loss."""

import asyncio

import pytest
import torch

from fused_grpo.errors import RewardError
from fused_grpo.trainer.rewards import Rewards, reward_functions


def one(completions):
    return [1.0] * len(completions)


class Flaky:
    """Fails in its first `failures` calls."""

    def __init__(self, failures: int) -> None:
        self.failures, self.calls = failures, 0

    def __call__(self, completions, log_extra, log_metric):
        self.calls += 1
        log_extra("call", [self.calls] * len(completions))
        log_metric("calls", self.calls)
        if self.calls <= self.failures:
            raise ConnectionError("busy")
        return [float(self.calls)] * len(completions)


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("failures", [0, 1, 2])
def test_retry_calls_again_until_it_works(reward, failures):
    flaky = Flaky(failures)
    output = reward(flaky, failure="retry", retries=2)
    assert flaky.calls == failures + 1
    assert output.per_function.tolist() == [[failures + 1.0]] * 4
    assert (output.extra, output.metrics) == ({"call": [failures + 1] * 4}, {"calls": failures + 1.0})


def test_pauses_between_retries_grow_up_to_a_minute(reward, monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr(reward_functions, "FIRST_PAUSE", 0.5)
    monkeypatch.setattr(reward_functions.time, "sleep", pauses.append)
    reward(Flaky(20), failure="retry", retries=20)
    assert (pauses[:3], pauses[-1], max(pauses)) == ([0.5, 1.0, 2.0], 64.0, 64.0)


@pytest.mark.usefixtures("no_pauses")
def test_retry_gives_up_after_its_calls_and_fail_never_calls_twice(reward):
    with pytest.raises(RewardError, match=r"'Flaky' raised ConnectionError: busy.* \(call 3 of 3\)"):
        reward(Flaky(100), failure="retry", retries=2)
    with pytest.raises(RewardError, match="'Flaky' raised ConnectionError: busy; at prompt 'p'"):
        reward(Flaky(1))


def raises(completions):
    return [float(text) if text == "c" else 0.0 for text in completions]


async def never_answers(completions):
    await asyncio.sleep(30 * ("d" in completions))
    return [0.0] * len(completions)


@pytest.mark.parametrize("bad", [raises, never_answers])
def test_drop_takes_the_whole_group_of_what_failed_and_nothing_else(reward, bad):
    output = reward([one, bad], failure="drop", timeout=0.3)
    assert output.dropped.tolist() == [False, False, True, True]
    assert output.per_function[:2].tolist() == [[1.0, 0.0]] * 2
    assert output.per_function[2:].isnan().all()
    for policy in ("fail", "retry"):
        with pytest.raises(RewardError, match=bad.__name__):
            reward([one, bad], failure=policy, timeout=0.3, retries=0)


def test_groups_that_different_functions_fail_on_are_all_dropped(reward, caplog):
    def fails_on_a(completions):
        return [1 / (text != "a") for text in completions]

    rows = [{"prompt": prompt} for prompt in "ppqqrr"]
    output = reward([fails_on_a, raises, one], rows=rows, failure="drop")
    assert output.dropped.tolist() == [True] * 4 + [False] * 2
    assert output.per_function.isnan().all(1).tolist() == [True] * 4 + [False] * 2
    dropped = [record.message for record in caplog.records]
    assert ["'fails_on_a' raised ZeroDivisionError" in dropped[0], "at prompt 'q'" in dropped[1]] == [True, True]


def test_a_failure_of_the_batch_alone_drops_nothing_and_logs_once(reward):
    def small_batches_only(completions, log_extra, log_metric):
        log_extra("text", completions)
        log_metric("size", len(completions))
        if len(completions) > 2:
            raise MemoryError
        return [2.0] * len(completions)

    output = reward(small_batches_only, failure="drop")
    assert not output.dropped.any()
    assert output.per_function.tolist() == [[2.0]] * 4
    assert (output.extra, output.metrics) == ({"text": list("abcd")}, {"size": 2.0})


def test_what_a_call_for_a_dropped_group_alone_logs_is_dropped(reward):
    """Whichever function it is dropped for."""

    def fails_on_the_batch(completions, log_metric):
        log_metric("place", {"a": 1.0, "c": 2.0, "e": 4.0}[completions[0]])
        return [1.0 if len(completions) == 2 else None] * (2 if len(completions) == 2 else 1)

    def logs_once(completions, log_metric):
        log_metric("whole", float(len(completions)))
        return [1.0] * len(completions)

    def fails_on_c(completions):
        return [1 / (text != "c") for text in completions]

    rows, functions = [{"prompt": prompt} for prompt in "ppqqrr"], [fails_on_the_batch, logs_once, fails_on_c]
    output = reward(functions, rows=rows, failure="drop")
    assert output.metrics == {"place": 2.5, "whole": 6.0}
    alone = [([2 * group, 2 * group + 1], {"place": [value]}) for group, value in enumerate([1.0, 2.0, 4.0])]
    assert output.calls == [*alone, ([*range(6)], {"whole": [6.0]})]


def test_a_dropped_group_has_none_in_the_columns_that_were_logged(reward):
    def logs(completions, log_extra):
        log_extra("text", completions)
        return raises(completions)

    assert reward(logs, failure="drop").extra == {"text": ["a", "b", None, None]}


@pytest.mark.parametrize("values", [1.0, "ab", {"a": 1}, None, torch.tensor(1.0)])
def test_what_is_logged_of_each_completion_is_a_list(reward, values):
    def logs(completions, log_extra):
        log_extra("mine", values)
        return one(completions)

    with pytest.raises(RewardError, match=r"'logs' raised TypeError: log_extra got .* as 'mine', want a list"):
        reward(logs)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_batch_of_which_nothing_is_left_says_why(reward, groups):
    def always(completions):
        raise ConnectionError("gone")

    output = reward(always, rows=[{"prompt": "p"}] * 2 * groups, failure="drop")
    assert output.dropped.all()
    assert "'always' raised ConnectionError" in str(output.failure)


def test_async_groups_are_tried_at_once(reward):
    meeting = asyncio.Barrier(3)

    async def judge(completions):
        if len(completions) > 2:
            raise ConnectionError("too many")
        await meeting.wait()
        return [1.0] * 2

    rows = [{"prompt": prompt} for prompt in "ppqqrr"]
    assert reward(judge, rows=rows, failure="drop", timeout=20).per_function.tolist() == [[1.0]] * 6


def test_a_dropped_group_does_not_move_the_advantages_of_others():
    from fused_grpo.trainer import GRPOConfig
    from fused_grpo.trainer.collect.advantages import multi_objective_advantages

    rewards = Rewards([len_of_ids, raises], failure="drop")
    rows = [{"prompt": prompt} for prompt in "ppqqrr"]
    output = rewards(rows, list("abcdef"), [[0] * n for n in (1, 2, 9, 90, 5, 1)], num_generations=2)
    kept = ~output.dropped
    for options in ({"scale_rewards": "batch"}, {"multi_objective_aggregation": "normalize_then_sum"}):
        args = GRPOConfig(**options)
        whole = multi_objective_advantages(output.per_function, rewards.weights, args, size=2)
        alone = multi_objective_advantages(output.per_function[kept], rewards.weights, args, size=2)
        torch.testing.assert_close(whole[kept], alone)
        assert whole[~kept].tolist() == [0.0, 0.0]


def len_of_ids(completion_ids):
    return [float(len(ids)) for ids in completion_ids]
