"""Calls of tools and their answers: concurrent, in order, limited in time and size, and never the end of a run."""

import asyncio
import functools
import sqlite3
import threading
import time

import pytest

from fused_grpo.errors import InputError
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.episodes.tools import Answers, check_tools
from fused_grpo.trainer.rewards.worker import as_text


def multiply(a: int, b: int) -> int:
    """Multiply.

    Args:
        a: One.
        b: Another.
    """
    return a * b


SPANS = list[tuple[float, float]]()


async def later(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    start = time.perf_counter()
    await asyncio.sleep(seconds)
    SPANS.append((start, time.perf_counter()))
    return f"after {seconds}"


def slow(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return f"after {seconds}"


class Mute(Exception):
    def __str__(self) -> str:
        raise self


class Unprintable:
    def __str__(self) -> str:
        raise OSError("no text")


RESULTS = {
    "text": "12",
    "parts": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}],
    "list": [1, 2],
    "dict": {"a": 1},
    "none": None,
    "surrogate": "a\ud800",
    "large": "x" * 50_000_000,
    "image": [{"type": "image", "image": object()}],
    "unprintable": Unprintable(),
}
ERRORS = {
    "value": ValueError("bad\x1b[31m"),
    "exit": SystemExit(3),
    "empty": KeyError(),
    "long": OSError("y" * 10**7),
    "interrupt": KeyboardInterrupt(),
    "cancelled": asyncio.CancelledError(),
    "unprintable": Mute(),
    "surrogate": ValueError("\ud800"),
}


def returns(kind: str) -> object:
    """Return.

    Args:
        kind: What.
    """
    return RESULTS[kind]


def fails(error: str) -> str:
    """Fail.

    Args:
        error: With what.
    """
    raise ERRORS[error]


def answered(*calls, timeout=60.0, tools=(multiply, later, slow, returns, fails)):
    asked = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return Answers(tools, timeout=timeout).start(asked, most=10_000).result()


def test_answers_come_in_order_and_coroutines_run_at_the_same_time():
    SPANS.clear()
    answers = answered(("later", {"seconds": 0.4}), ("multiply", {"a": 3, "b": 4}), ("later", {"seconds": 0.3}))
    assert [text for _, text in answers] == ["after 0.4", "12", "after 0.3"]
    (one, end), (other, other_end) = SPANS
    assert max(one, other) < min(end, other_end)
    assert [(call.name, call.failed) for call, _ in answers] == [
        ("later", False),
        ("multiply", False),
        ("later", False),
    ]
    assert answers[0][0].seconds >= 0.4


def test_what_a_plain_function_returns_is_awaited():
    @functools.wraps(later)
    def decorated(*arguments, **named):
        return later(*arguments, **named)

    answers = answered(("later", {"seconds": 0.1}), ("later", {"seconds": 60.0}), tools=[decorated], timeout=2.0)
    assert answers[0][1] == "after 0.1"
    assert [call.failed for call, _ in answers] == [False, True]


@pytest.mark.parametrize("tool", [slow, later])
def test_calls_of_all_episodes_share_the_slots(tool):
    """Six calls of 0.3 s, two at a time, within a limit of 0.8 s each: the wait for a slot is not a part of it."""
    slots, asked = threading.Semaphore(2), [{"function": {"name": tool.__name__, "arguments": {"seconds": 0.3}}}]
    start = time.perf_counter()
    pending = [Answers([tool], timeout=0.8, slots=slots).start(asked, most=10_000) for _ in range(6)]
    assert [call.failed for one in pending for call, _ in one.result()] == [False] * 6
    assert time.perf_counter() - start >= 0.9


def test_coroutines_that_hang_are_waited_for_at_the_same_time():
    start = time.perf_counter()
    answers = answered(*[("later", {"seconds": 600.0})] * 20, timeout=0.5)
    assert all(call.failed for call, _ in answers)
    assert time.perf_counter() - start < 9  # not 20 times the limit


def test_after_a_call_that_took_too_long_no_further_one_is_made():
    answers = answered(("slow", {"seconds": 5.0}), ("multiply", {"a": 3, "b": 4}), timeout=0.1)
    assert [call.failed for call, _ in answers] == [True, True]
    assert "multiply was not called" in answers[1][1]


def test_a_turn_after_one_that_took_too_long_calls_again():
    answers = Answers([slow, multiply], timeout=0.5)
    asked = {"slow": {"seconds": 30.0}, "multiply": {"a": 3, "b": 4}}
    results = [
        answers.start([{"function": {"name": n, "arguments": a}}], most=10_000).result() for n, a in asked.items()
    ]
    assert [call.failed for ((call, _),) in results] == [True, False]
    assert answers.has_timed_out


def test_what_a_tool_edits_is_its_own():
    def sort(values: list[int]) -> list[int]:
        """Sort.

        Args:
            values: What.
        """
        values.sort()
        return values

    arguments = {"values": [3, 1, 2]}
    ((made, answer),) = answered(("sort", arguments), tools=[sort])
    assert answer == "[1, 2, 3]"
    assert arguments == made.arguments == {"values": [3, 1, 2]}


def test_plain_functions_of_a_turn_are_called_one_after_the_other():
    order = []

    def first(x: int) -> int:
        """One.

        Args:
            x: A number.
        """
        time.sleep(0.1)
        order.append(x)
        return x

    answered(("first", {"x": 1}), ("first", {"x": 2}), tools=[first])
    assert order == [1, 2]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (("divide", {"a": 1}), "Tool divide not found."),
        (("multiply", {"a": 1, "c": 2}), "unexpected keyword argument 'c'"),
        (("multiply", {}), "missing 2 required positional arguments"),
        (("later", {"second": 1}), "unexpected keyword argument 'second'"),
        *(((name, odd), "must be a mapping, not") for name in ("multiply", "later") for odd in ([1], "x", 3, True)),
        (("fails", {"error": "value"}), r"bad\\x1b[31m"),
        (("fails", {"error": "exit"}), "3"),
        (("fails", {"error": "empty"}), "KeyError"),
        (("fails", {"error": "interrupt"}), "KeyboardInterrupt"),
        (("fails", {"error": "cancelled"}), "CancelledError"),
        (("fails", {"error": "unprintable"}), "Mute"),
        (("fails", {"error": "surrogate"}), r"\\ud800"),
        (("fails", {"error": "long"}), "yyyy"),
        (("returns", {"kind": "image"}), "the model reads text alone"),
        (("returns", {"kind": "unprintable"}), "no text"),
    ],
)
def test_what_goes_wrong_is_what_the_model_reads(call, text):
    ((made, answer),) = answered(call)
    assert made.failed
    assert answer.startswith("{'error': ")
    assert text in answer
    assert len(answer) < 2200


def test_an_object_of_another_thread_is_an_error_and_a_warning(caplog):
    database = sqlite3.connect(":memory:")

    def query(text: str) -> str:
        """Query.

        Args:
            text: SQL.
        """
        return str(database.execute(text).fetchall())

    warn_once.cache_clear()
    ((made, _),) = answered(("query", {"text": "select 1"}), tools=[query])
    database.close()
    assert made.failed
    assert "from the tool 'query', and plain functions run in threads" in caplog.text
    assert "check_same_thread=False" in caplog.text


@pytest.mark.parametrize("name", ["slow", "later"])
def test_a_call_takes_no_longer_than_its_limit(name):
    ((made, answer),) = answered((name, {"seconds": 30.0}), timeout=0.2)
    assert made.failed
    assert f"{name} took longer than 0.2 s" in answer


@pytest.mark.parametrize(
    ("kind", "text"),
    [("text", "12"), ("parts", "12"), ("list", "[1, 2]"), ("dict", "{'a': 1}"), ("none", "None"), ("surrogate", "a?")],
)
def test_results_are_text(kind, text):
    ((made, answer),) = answered(("returns", {"kind": kind}))
    assert (answer, made.result, made.failed) == (text, text, False)


def spread(*numbers: int) -> str:
    """Add.

    Args:
        numbers: Some.
    """
    return str(sum(numbers))


def anything(**options: str) -> str:
    """Say it.

    Args:
        options: What.
    """
    return str(options)


def by_place(a: int, /) -> str:
    """Say a number.

    Args:
        a: It.
    """
    return str(a)


def counts(a: int):
    """Count.

    Args:
        a: To where.
    """
    yield from range(a)


async def counts_later(a: int):
    """Count.

    Args:
        a: To where.
    """
    yield a


def half(a: int) -> str:
    """Say half.

    Args:
        a: A number.
    """
    return str(a)


half.__doc__ = half.__doc__.replace("half", "\ud800")  # which Python 3.13 compiles in no docstring


class Counter:
    def add(self, a: int) -> str:
        """Count.

        Args:
            a: How many.
        """
        return str(a)


class Silent:
    pass


@pytest.mark.parametrize("kept_in", [lambda value: value, lambda value: [value], lambda value: (1, value)])
@pytest.mark.parametrize("value", [Silent(), (n for n in "ab"), map(str, [1]), multiply, Counter().add, counts(3)])
def test_an_object_whose_text_is_an_address_is_no_answer(value, kept_in):
    with pytest.raises(ValueError, match=f"the tool returned a {type(value).__name__}, and the model reads text"):
        as_text(kept_in(value))


@pytest.mark.parametrize("value", ["<Silent object at 0x7f00>", ["<a at 0x1>"], {"out": "<f at 0x1>"}, 3, b"x", int])
def test_text_about_an_address_is_an_answer(value):
    assert as_text(value) == str(value)


def test_of_a_large_result_the_record_keeps_the_ends_and_no_more_is_read():
    ((made, answer),) = answered(("returns", {"kind": "large"}))
    assert answer == "x" * 10_001
    assert "…49990000 characters…" in made.result


async def blocks(seconds: float) -> str:
    """Keep the event loop.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "over"


def test_a_coroutine_that_never_awaits_stops_no_later_call():
    tools = (blocks, later)
    ((made, answer),) = answered(("blocks", {"seconds": 30.0}), tools=tools, timeout=0.2)
    assert made.failed
    assert "blocks took longer than 0.2 s" in answer
    for _ in range(2):
        assert answered(("later", {"seconds": 0.01}), tools=tools, timeout=5.0)[0][1] == "after 0.01"


def no_hints(a):
    """Add.

    Args:
        a: A number.
    """


def no_docstring(a: int) -> int:
    return a


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ([no_hints], "'no_hints', of which no schema can be made .*; fix: type hints of all arguments"),
        ([no_docstring], "'no_docstring', of which no schema can be made"),
        ([multiply, multiply], "two tools called 'multiply'"),
        (["multiply"], "'multiply' among the tools, want functions"),
        ([lambda: 1], "no schema"),
        ([half], "'half', of which no schema can be made .*surrogates"),
        ([spread], "'spread' with the argument .*numbers: int, want arguments that a call gives by their names"),
        ([by_place], "'by_place' with the argument a: int"),
        ([Counter.add], "'add' with the argument self"),
        ([counts], "'counts' with yield, want .* an answer that is returned"),
        ([counts_later], "'counts_later' with yield"),
    ],
)
def test_a_tool_that_cannot_be_described_is_refused(tools, text):
    with pytest.raises(InputError, match=text):
        check_tools(tools)
    assert len(check_tools([multiply, Counter().add, anything])) == 3
    assert check_tools(multiply) == [multiply]
