"""The ready-made rewards equal TRL's."""

import importlib.util
import runpy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis.strategies import integers, lists, sampled_from

from fused_grpo.errors import InputError, UnavailableError
from fused_grpo.trainer.rewards import (
    Rewards,
    accuracy,
    accuracy_reward,
    builtin_rewards,
    format_reward,
    length_reward,
    soft_overlong_punishment,
)

TAGS = ["<think>", "</think>", "a", "\n", " ", "<answer>"]


@pytest.fixture(scope="module")
def trl() -> dict:
    """Functions of TRL's rewards, from files that need nothing of the rest of it."""
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("TRL is not installed")
    folder = Path(found.origin).parent / "rewards"
    return runpy.run_path(str(folder / "format_rewards.py")) | runpy.run_path(str(folder / "other_rewards.py"))


@given(parts=lists(sampled_from(TAGS), max_size=7))
def test_the_format_is_that_of_trl(trl, parts):
    text = "".join(parts)
    (expected,) = trl["think_format_reward"]([[{"content": text}]])
    assert format_reward([text]) == format_reward([[{"role": "assistant", "content": text}]]) == [expected]


@given(length=integers(0, 40), longest=integers(0, 30), cache=integers(0, 30))
def test_the_overlong_punishment_is_that_of_trl(trl, length, longest, cache):
    if cache > longest:
        with pytest.raises(InputError, match=f"got soft_punish_cache={cache}"):
            soft_overlong_punishment(longest, cache)
        return
    ids = [[0] * length]
    expected = trl["get_soft_overlong_punishment"](longest, cache)(completion_ids=ids)
    assert soft_overlong_punishment(longest, cache)(completion_ids=ids) == pytest.approx(expected)


def test_lengths_are_rewarded_for_being_near_the_target():
    rewards = length_reward(4)(completion_ids=[[0] * 4, [0] * 2, [0] * 8, []], completions=["a"] * 4)
    assert rewards == [0.0, -0.5, -1.0, -1.0]
    with pytest.raises(InputError, match="got target_length=0"):
        length_reward(0)


def test_without_math_verify_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setattr(builtin_rewards.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match=r"pip install 'fused-grpo\[math\]'"):
        accuracy_reward(["2"], ["2"])


def test_answers_are_compared_as_mathematics():
    pytest.importorskip("math_verify")
    logged = {}
    solutions = [r"\frac{1}{3}"] * 3 + ["no mathematics"]
    completions = [
        r"My answer is \boxed{\frac{2}{6}}",
        [{"role": "assistant", "content": r"It is \boxed{\frac{1}{2}}"}],
        "I do not know",
        r"\boxed{1}",
    ]
    assert accuracy_reward(completions, solutions, log_extra=logged.__setitem__) == [1.0, 0.0, 0.0, None]
    assert logged["solution"] == solutions
    assert [len(values) for values in logged.values()] == [4, 4, 4]
    assert logged["answer_parsed"][2:] == ["[unparseable]", "[skipped]"]


def test_short_names_are_functions_and_others_are_refused_with_the_list(tmp_path, monkeypatch):
    rewards = Rewards(["accuracy", "accuracy_reward", "format", "length=4", "overlong=20,5"])
    assert rewards.functions[:3] == [accuracy, accuracy_reward, format_reward]
    assert rewards.functions[3](completion_ids=[[0] * 2]) == [-0.5]
    for name, message in {
        "acuracy": r"want one of accuracy, accuracy_reward, .*; fix: did you mean accuracy\?",
        "length": "want length=TOKENS with whole numbers",
        "length=long": "want length=TOKENS",
        "accuracy=1": "want accuracy with",
        "overlong=20": "want overlong=MAX,CACHE",
    }.items():
        with pytest.raises(InputError, match=message):
            Rewards(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "accuracy").mkdir()  # a path that exists is a model
    with pytest.raises(InputError, match="no model with one score"):
        Rewards("accuracy")
