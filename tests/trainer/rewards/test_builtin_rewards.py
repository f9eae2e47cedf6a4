"""The ready-made rewards equal TRL's."""

import importlib.util
import itertools
import pickle
import runpy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis.strategies import floats, integers, lists, sampled_from

from fused_grpo.errors import InputError, UnavailableError
from fused_grpo.trainer.rewards import (
    Rewards,
    accuracy,
    accuracy_reward,
    builtin_rewards,
    format_reward,
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    length_reward,
    reasoning_accuracy_reward,
    soft_overlong_punishment,
    think_format_reward,
)

TAGS = ["<think>", "</think>", "a", "\n", " ", "<answer>"]


@pytest.fixture(scope="module")
def trl() -> dict:
    """Functions of TRL's rewards, from files that need nothing of the rest of it."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("TRL is not installed")
    folder = Path(spec.origin).parent / "rewards"
    return runpy.run_path(str(folder / "format_rewards.py")) | runpy.run_path(str(folder / "other_rewards.py"))


@given(parts=lists(sampled_from(TAGS), max_size=7))
def test_the_format_is_that_of_trl(trl, parts):
    text = "".join(parts)
    (expected,) = trl["think_format_reward"]([[{"content": text}]])
    assert format_reward([text]) == format_reward([[{"role": "assistant", "content": text}]]) == [expected]
    assert think_format_reward([text]) == [expected]


@given(length=integers(0, 40), longest=integers(0, 30), cache=integers(0, 30))
def test_the_overlong_punishment_is_that_of_trl(trl, length, longest, cache):
    if cache > longest:
        with pytest.raises(InputError, match=f"got soft_punish_cache={cache}"):
            soft_overlong_punishment(longest, cache)
        return
    ids = [[0] * length]
    expected = trl["get_soft_overlong_punishment"](longest, cache)(completion_ids=ids)
    assert soft_overlong_punishment(longest, cache)(completion_ids=ids) == pytest.approx(expected)


@given(ids=lists(integers(0, 3), max_size=12), size=integers(1, 4), penalty=floats(-2, 0))
def test_the_repetition_penalty_is_that_of_trl(trl, ids, size, penalty):
    expected = trl["get_repetition_penalty_reward"](size, penalty)([ids])
    assert get_repetition_penalty_reward(size, penalty)(completion_ids=[ids]) == pytest.approx(expected)


MATH = ["", r"\boxed{2}", r"\boxed{3}", r"so <think>\boxed{2}", "</think>", "</end>"]
BOUNDS = {"min_value_wrong": -2.0, "max_value_wrong": -0.1, "min_value_correct": 0.2, "max_value_correct": 3.0}


def test_rewards_of_answers_are_those_of_trl():
    trl = pytest.importorskip("trl.rewards")
    pytest.importorskip("math_verify")
    texts = ["".join(parts) for parts in itertools.product(MATH, MATH, MATH)][::3]
    solutions = [["2", "3", "none"][n % 3] for n in range(len(texts))]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    for ends in (None, ["</end>", "</think>"]):
        logs = {}, {}
        actual, expected = (
            reward(completions, solutions, ends, log_extra=log.__setitem__)
            for reward, log in zip((reasoning_accuracy_reward, trl.reasoning_accuracy_reward), logs, strict=True)
        )
        assert actual == expected
        assert {0.0, 1.0, None} == set(actual)
        assert logs[0] == logs[1]
    ids = [[0] * (7 * n % 30) for n in range(len(texts))]
    for bounds in ({}, BOUNDS):
        rewards = get_cosine_scaled_reward(20, **bounds), trl.get_cosine_scaled_reward(20, **bounds)
        actual, expected = (reward(completions, solutions, ids) for reward in rewards)
        assert actual == pytest.approx(expected)


def test_answers_that_all_fail_to_be_graded_are_wrong_and_end_no_run(monkeypatch):
    monkeypatch.setattr(builtin_rewards, "GRADER", lambda *, completions, **_: [0.0] * len(completions))  # logs nothing
    logged = {}
    values = reasoning_accuracy_reward(["a</think>$1$", "b"], ["$1$", "$1$"], log_extra=logged.__setitem__)
    assert values == [0.0, 0.0]
    assert logged["answer_parsed"] == logged["gold_parsed"] == [None, "[incomplete reasoning]"]


@pytest.mark.parametrize(
    ("make", "name", "options"),
    [
        (
            lambda: get_soft_overlong_punishment(max_completion_len=4, soft_punish_cache=2),
            "soft_overlong_punishment",
            (4, 2),
        ),
        (get_repetition_penalty_reward, "repetition_penalty", (3, -1.0)),
        (lambda: get_cosine_scaled_reward(max_len=4), "cosine_scaled", (4, -1.0, -0.5, 0.5, 1.0)),
    ],
)
def test_rewards_with_options_can_be_pickled_and_have_trls_names(make, name, options):
    reward = make()
    copied = pickle.loads(pickle.dumps(reward))
    assert (copied.func, copied.args, vars(copied)) == (reward.func, options, vars(reward))
    assert (reward.func.__name__, reward.__name__) == (f"{name}_reward", f"{name}_reward")
    assert Rewards([reward, think_format_reward]).names == [f"{name}_reward", "think_format_reward"]


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (get_repetition_penalty_reward, {"max_penalty": 0.5}),
        (get_repetition_penalty_reward, {"ngram_size": 0}),
        (get_cosine_scaled_reward, {"max_len": 0}),
    ],
)
def test_options_without_a_meaning_are_refused(make, options):
    ((name, value),) = options.items()
    with pytest.raises(InputError, match=f"{name}={value}"):
        make(**options)


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
