"""The arguments of a reward function, and the values that it may return."""

import array
import asyncio
import functools
import itertools
import math
import threading
import time
from collections import deque
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given
from hypothesis.strategies import booleans, floats, integers, lists, none, one_of

from fused_grpo.errors import InputError, RewardError, RewardValueError
from fused_grpo.trainer.rewards.reward_call import RewardCaller, RewardInputs


def test_a_function_gets_what_it_names_and_one_with_keywords_gets_all(reward):
    seen = {}

    def few(completions, answer, trainer_state, absent="default"):
        seen["few"] = (completions, answer, trainer_state, absent)
        return [0.0] * 4

    def everything(**columns):
        seen["everything"] = columns
        return [0.0] * 4

    reward([few, everything], trainer_state="state")
    assert seen["few"] == (list("abcd"), list("PPQQ"), "state", "default")
    names = {"prompts", "completions", "completion_ids", "answer", "trainer_state", "log_extra", "log_metric"}
    assert seen["everything"].keys() == names
    assert seen["everything"]["prompts"] == list("ppqq")
    assert seen["everything"]["completion_ids"] == [[0], [1, 1], [2, 2, 2], [3, 3, 3, 3]]


def test_an_argument_that_no_column_fills_is_named_before_the_call(reward):
    def by_solution(completions, solution):
        raise AssertionError

    with pytest.raises(InputError, match="'by_solution', which wants 'solution', and data with 'answer'"):
        reward(by_solution, failure="drop")


@pytest.mark.parametrize(
    "values",
    [
        (1, 0.5, None, True),
        torch.tensor([1, 0.5, math.nan, 1])[[0, 1, 0, 3]],
        np.array([1, 0.5, 2, 1]),
        (1, 0.5, np.ma.masked, True),
        np.ma.array([1, 0.5, 2, 1], mask=[0, 0, 1, 0]),
    ],
)
def test_numbers_of_any_kind_are_rewards(reward, values):
    given = reward(lambda **_: values).per_function[:, 0]
    torch.testing.assert_close(given[[0, 1, 3]], torch.tensor([1.0, 0.5, 1.0]))
    assert given.dtype == torch.float32
    assert given[2].isnan() == (values[2] is None or values[2] is np.ma.masked)


@given(
    lists(
        one_of(none(), booleans(), integers(-(2**50), 2**50), floats(width=32, allow_nan=False)),
        min_size=4,
        max_size=4,
    )
)
def test_scores_are_the_same_in_all_that_may_hold_them(values):
    values = [value if value is None or math.isfinite(value) else 0.5 for value in values]
    wanted = [math.nan if value is None else float(value) for value in values]
    scalars = [value if value is None else np.asarray(value, dtype=np.float64)[()] for value in values]
    tensors = [value if value is None else torch.tensor([float(value)], dtype=torch.float64) for value in values]
    kinds = [values, tuple(values), np.array(values, dtype=object), scalars, tensors, [Fraction(0), *values[1:]]]
    kinds += [np.array(wanted), torch.tensor(wanted, dtype=torch.float64)] if None not in values else []
    for kind in kinds:
        scores = RewardCaller(lambda prompts, kind=kind: kind, "f")(RewardInputs(columns={"prompts": list("ppqq")}))
        assert [None if score != score else score for score in scores.values][1:] == values[1:]


class Odd(list):
    """Has a value for everything."""

    def __float__(self) -> str:
        return "1.0"


FOUR = [0.0] * 4
NO_LISTS = {
    "dict": dict.fromkeys("abcd", 1.0),
    "keys": dict.fromkeys(range(4)).keys(),
    "set": {0.0, 1.0, 2.0, 3.0},
    "frozenset": frozenset(range(4)),
    "string": "0101",
    "bytes": b"abcd",
    "bytearray": bytearray(4),
    "memoryview": memoryview(b"abcd"),
    "array": array.array("b", b"abcd"),
    "range": range(4),
    "deque": deque(FOUR),
    "generator": (0.0 for _ in range(4)),
    "endless": itertools.count(),
    "endless map": map(float, itertools.repeat(1)),
    "iterator": iter(FOUR),
    "matrix": np.zeros((4, 1)),
    "row": torch.zeros(1, 4),
    "scalar": np.float32(1.0),
    "0-d": torch.tensor(1.0),
    "dates": np.zeros(4, dtype="M8[ns]"),
    "texts": np.array(["1.0"] * 4),
    "without data": torch.zeros(4, device="meta"),
    "sparse": torch.ones(4).to_sparse(),
    "series": pandas.Series(FOUR),
    "class": list,
    "huge": ["x" * 10_000_000],
    "deep": functools.reduce(lambda inner, _: {"a": inner}, range(50_000), {}),
    "awaited dict": None,
}


@pytest.mark.parametrize("kind", NO_LISTS)
def test_what_is_no_list_of_scores_is_an_error_that_names_the_function(reward, kind):
    async def later():
        return {"a": 1.0}

    def judges(completions):
        return later() if kind == "awaited dict" else NO_LISTS[kind]

    with pytest.raises(RewardValueError, match=r"(?s)'judges' returned .*want a list, tuple") as caught:
        reward(judges, timeout=5.0)
    assert len(str(caught.value)) < 2000


class Refuses:
    """A number that cannot be read."""

    def __float__(self) -> float:
        raise KeyError("\x1b[31m")


@pytest.mark.parametrize(
    "value",
    [
        *(math.nan, math.inf, -1e39, 10**400, 1j, "1.0", "good", b"1", bytearray(b"1"), array.array("b", b"1")),
        *([1.0], {}, Odd(), Refuses(), type, Decimal("nan"), np.str_("1"), np.complex64(1), np.zeros(2)),
        *(np.datetime64(1, "ns"), np.timedelta64(1, "ns"), torch.zeros(2), torch.tensor(1 + 1j)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_finite_number_is_refused(reward, value):
    with pytest.raises(RewardError, match=r"'<lambda>' returned .* at prompt 'q'; want a finite float, or None"):
        reward(lambda **_: [0.0, 0.0, value, 0.0])


@pytest.mark.parametrize(
    ("returned", "message"), [([1.0], "1 rewards"), (None, "None"), (3.0, "3.0"), ([0] * 5, "5 r")]
)
def test_another_number_of_values_is_refused(reward, returned, message):
    with pytest.raises(
        RewardValueError, match=rf"'<lambda>' returned {message}.* for 4 completions \(first prompt 'p'\)"
    ):
        reward(lambda **_: returned)


def test_what_a_function_raises_names_the_prompt_that_it_raises_for(reward):
    def strict(completions):
        return [1 / (text != "c") for text in completions]

    with pytest.raises(RewardError, match="'strict' raised ZeroDivisionError: division by zero; at prompt 'q'"):
        reward(strict)


@pytest.mark.parametrize("kind", [SystemExit, asyncio.CancelledError, MemoryError])
def test_what_is_no_exception_is_an_error_of_the_function_too(reward, kind):
    def raises(**columns):
        raise kind("gone")

    async def raises_later(**columns):
        raises()

    for function in (raises, raises_later):
        with pytest.raises(
            RewardError, match=f"'{function.__name__}' raised (CancelledError|{kind.__name__}): .*prompt"
        ):
            reward(function)


@pytest.mark.parametrize("with_async", [False, True])
def test_a_call_that_hangs_is_given_up_and_named(reward, with_async):
    async def sleeps(completions):
        await asyncio.sleep(30)

    def hangs(completions):
        time.sleep(30)

    start = time.perf_counter()
    function = sleeps if with_async else hangs
    with pytest.raises(
        RewardError, match=rf"'{function.__name__}' took longer than 0.2 s .*first prompt 'p'.*isolated"
    ):
        reward(function, timeout=0.2)
    assert time.perf_counter() - start < 15


def test_a_coroutine_that_is_given_up_is_cancelled(reward):
    cancelled = threading.Event()

    async def sleeps(completions):
        try:
            await asyncio.sleep(30)
        finally:
            cancelled.set()

    with pytest.raises(RewardError, match="'sleeps' took longer"):
        reward(sleeps, timeout=0.1)
    assert cancelled.wait(10)


@pytest.mark.parametrize("options", [{}, {"failure": "retry"}, {"failure": "drop"}], ids=str)
@pytest.mark.parametrize("error", [KeyboardInterrupt, InputError])
def test_no_coroutine_goes_on_behind_what_ends_the_others(reward, error, options):
    begun, ended = threading.Semaphore(0), threading.Semaphore(0)

    async def judge(completions):
        begun.release()
        try:
            await asyncio.sleep(30)
        finally:
            ended.release()

    def stops(completions):
        assert begun.acquire(timeout=10)
        raise error

    with pytest.raises(error):
        reward([judge, stops], **options)
    assert ended.acquire(timeout=10)
    assert not begun.acquire(timeout=0.05)  # and none begins


def test_a_coroutine_that_never_awaits_stops_no_later_call(reward):
    async def blocks(completions):
        time.sleep(30)

    async def judge(completions):
        await asyncio.sleep(0.01)
        return [1.0] * len(completions)

    with pytest.raises(RewardError, match="'blocks' took longer"):
        reward(blocks, timeout=0.1)
    assert reward(judge, timeout=10.0)


def test_a_call_that_was_given_up_ends_without_a_sound(reward, monkeypatch):
    errors, ended = [], threading.Event()
    monkeypatch.setattr(threading, "excepthook", errors.append)

    def slow(completions):
        time.sleep(0.3)
        ended.set()
        return [0.0] * 4

    with pytest.raises(RewardError, match=r"'slow' took longer than 0.1 s"):
        reward(slow, timeout=0.1)
    assert ended.wait(10)
    for thread in threading.enumerate():
        if thread.name == "reward" and thread.daemon:
            thread.join(0.1)
    assert not errors


def test_a_timeout_of_the_function_itself_is_its_own_error(reward):
    def asks(completions):
        raise TimeoutError("no answer from the judge")

    with pytest.raises(RewardError, match="'asks' raised TimeoutError: no answer from the judge"):
        reward(asks, timeout=5.0)


def test_async_functions_run_at_once_whatever_form_they_have(reward):
    meeting = asyncio.Barrier(3)

    async def first(completions, offset=0.0):
        await meeting.wait()
        return [offset] * 4

    class Second:
        async def __call__(self, completions):
            await meeting.wait()
            return [1.0] * 4

    output = reward([first, Second(), functools.partial(first, offset=2.0), lambda **_: [3.0] * 4], timeout=20)
    assert output.per_function.tolist() == [[0.0, 1.0, 2.0, 3.0]] * 4
    assert list(output.seconds) == ["first", "Second", "first_2", "<lambda>"]


def test_a_client_opened_in_one_call_still_works_in_the_next(reward):
    loops = []

    async def judge(completions):
        loops.append(asyncio.get_running_loop())
        return [0.0] * 4

    reward(judge)
    reward(judge)
    assert loops[0] is loops[1]
    assert loops[0].is_running()
