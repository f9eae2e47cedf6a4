"""A reward function that fails ends the run or costs its groups, whole; never a part of one."""

import time
from pathlib import Path
from typing import Any

import pytest

from fused_grpo.errors import RewardError
from fused_grpo.trainer.rewards import Rewards, isolated


def raising(prompts: list[str], **_: Any) -> list[float]:
    if "bad" in prompts:
        raise KeyError("answer")
    return [1.0] * len(prompts)


def no_number(prompts: list[str], **_: Any) -> list[float]:
    return [float("nan") if prompt == "bad" else 1.0 for prompt in prompts]


def too_few(prompts: list[str], **_: Any) -> list[float]:
    return [1.0] * (len(prompts) - ("bad" in prompts))


def hanging(prompts: list[str], **_: Any) -> list[float]:
    if "bad" in prompts:
        time.sleep(60)
    return [1.0] * len(prompts)


FAULTS = {
    "raises": (raising, "raised KeyError: 'answer'; at prompt 'bad'"),
    "returns NaN": (no_number, "returned nan at prompt 'bad'"),
    "returns the wrong number of values": (too_few, "returned 3 rewards for 4 completions"),
    "hangs": (hanging, "took longer than 2.0 s"),
}


def score(function: Any, **options: Any) -> Any:
    """Two groups of two, of which the second is bad."""
    prompts = ["good", "good", "bad", "bad"]
    rows = [{"prompt": prompt} for prompt in prompts]
    return Rewards(function, **options)(rows, ["x"] * 4, [[1]] * 4, num_generations=2)


@pytest.mark.parametrize("name", FAULTS)
def test_a_failing_reward_ends_the_run_or_costs_its_group(time_limit, name):
    function, message = FAULTS[name]
    timeout = 2.0 if name == "hangs" else None
    with time_limit(5), pytest.raises(RewardError, match=message):
        score(function, timeout=timeout)
    dropped = score(function, timeout=timeout, failure="drop")
    assert dropped.dropped.tolist() == [False, False, True, True]
    assert dropped.per_function[:2, 0].tolist() == [1.0, 1.0]
    assert dropped.per_function[2:].isnan().all()


ISOLATED = {
    "hangs": ("while prompts[0] == 'bad': pass", 0.5, "took longer than 0.5 s and was killed"),
    "eats memory": ("[bytearray(1 << 26) for _ in range(64 * (prompts[0] == 'bad'))]", 30.0, "raised MemoryError"),
}


@pytest.mark.parametrize("name", ISOLATED)
def test_an_isolated_reward_is_killed_and_the_next_completion_is_scored(time_limit, tmp_path: Path, name):
    body, seconds, message = ISOLATED[name]
    (tmp_path / "mine.py").write_text(f"def reward(prompts):\n    {body}\n    return [1.0]\n")
    options = {"timeout": seconds, "memory": 1 << 30}
    function = isolated(f"{tmp_path}/mine.py:reward", **options)
    with time_limit(10), pytest.raises(RewardError, match=message):
        score(function)
    forgiving = isolated(f"{tmp_path}/mine.py:reward", **options, on_failure=0.0)
    assert score(forgiving).per_function[:, 0].tolist() == [1.0, 1.0, 0.0, 0.0]
