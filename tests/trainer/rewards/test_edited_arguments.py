"""A reward function may edit all that it is given: nothing of the run, and no other call, is changed by it."""

import asyncio
import copy
import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis.strategies import integers
from transformers import TrainerState

from fused_grpo.errors import RewardError
from fused_grpo.trainer.rewards import Rewards

EDITS = {
    "list": [
        list.clear,
        list.reverse,
        lambda entry: entry.append("x"),
        lambda entry: entry.__setitem__(slice(None), [9]),
    ],
    "dict": [dict.clear, dict.popitem, lambda entry: entry.update(content="x")],
}


def rows() -> list[dict[str, Any]]:
    """Two groups of two: the members have one row, as the sampler repeats it."""
    one = [{"prompt": [{"role": "user", "content": p}], "tests": ["1", {"in": [2]}], "n": 1} for p in "pq"]
    return [one[0], one[0], one[1], one[1]]


def arguments() -> dict[str, Any]:
    completions = [[{"role": "assistant", "content": text}] for text in "abcd"]
    return {"rows": rows(), "completions": completions, "completion_ids": [[3, 1, 2], [4], [5, 5], [6, 7]]}


def edit(value: Any, choose: Any) -> None:
    """Edit some of the containers in a value, from the inside to the outside."""
    for entry in list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, list) else ():
        edit(entry, choose)
    if kind := EDITS.get(type(value).__name__):
        change = choose([*kind, None])
        if change is not None and value:
            change(value)


@given(seed=integers(0, 2**32))
@settings(max_examples=50)
def test_whatever_one_call_edits_every_other_call_is_given_the_same(seed):
    given, seen, calls, choose = arguments(), [], itertools.count(), random.Random(seed).choice
    state = TrainerState(max_steps=5, log_history=[{"loss": 1.0}])

    def edits(**columns):
        is_first = next(calls) == 0  # of two functions that run at the same time, too
        del columns["log_extra"], columns["log_metric"]
        seen.append(copy.deepcopy(columns))
        columns["trainer_state"].max_steps = 1
        columns["trainer_state"].log_history[0].clear()
        edit(columns, choose)
        if is_first:
            raise ConnectionError
        return [0.0] * 4

    async def edits_too(**columns):
        return edits(**columns)

    options = {"num_generations": 2, "trainer_state": state}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fused_grpo.trainer.rewards.reward_functions.FIRST_PAUSE", 0.0)
        Rewards([edits, edits_too], failure="retry")(*given.values(), **options)
    assert len(seen) == 3  # one of the three calls was a retry
    assert seen == [seen[0]] * 3
    assert given == arguments()
    assert (state.max_steps, state.log_history) == (5, [{"loss": 1.0}])
    assert seen[0]["prompts"] == [row["prompt"] for row in rows()]


def test_members_of_a_group_have_copies_of_their_own():
    def pops(prompts, tests):
        assert all(len(cases) == 2 for cases in tests)
        lengths = []
        for prompt, cases in zip(prompts, tests, strict=True):
            lengths.append(len(prompt) + len(cases))
            prompt.append({})
            cases.clear()
        return lengths

    given = arguments()
    assert Rewards(pops)(*given.values(), num_generations=2).per_function.flatten().tolist() == [3.0] * 4


def test_concurrent_functions_do_not_see_each_other_s_edits():
    meeting = asyncio.Barrier(2)

    async def first(completion_ids):
        completion_ids[0].sort()
        await meeting.wait()
        await meeting.wait()
        return [0.0] * 4

    async def second(completion_ids):
        await meeting.wait()
        ids = list(completion_ids[0])
        await meeting.wait()
        return [float(ids == [3, 1, 2])] * 4

    scores = Rewards([first, second], timeout=20)(*arguments().values(), num_generations=2)
    assert scores.per_function[:, 1].tolist() == [1.0] * 4


def test_an_error_names_the_prompt_as_it_was():
    def edits(prompts):
        for prompt in prompts:
            prompt[0]["content"] = "edited"
        raise ValueError("no")

    with pytest.raises(RewardError, match=r"at prompt \[{'role': 'user', 'content': 'p'}\]"):
        Rewards(edits)(*arguments().values(), num_generations=2)


def test_what_is_logged_may_be_edited_afterwards():
    logs = []

    def reuses(completions, log_extra):
        buffer, inner = ["a", "b", "c", "d"], [1]
        log_extra("text", buffer)
        log_extra("inner", [inner] * 4)
        buffer.clear()
        inner.append(2)
        logs.append(log_extra)
        return [0.0] * 4

    output = Rewards(reuses)(*arguments().values(), num_generations=2)
    logs[0]("text", ["too late"])
    assert output.extra == {"text": ["a", "b", "c", "d"], "inner": [[1]] * 4}
