"""One reward function, called and checked.

A reward function has TRL's signature: keyword arguments `prompts`, `completions`, `completion_ids`, the dataset's other
columns, `trainer_state`, `log_extra` and `log_metric`, each column a list of B; it returns B floats, or None for what
it does not score. One without `**columns` is given the arguments it names and no others. It may be `async`.

What it returns is checked before an advantage is computed from it, and an error names the function and the prompt.
What it logs counts once its call has succeeded, so a call that is repeated leaves nothing twice.

A call that takes longer than its timeout is given up on. Nothing can end Python code from outside: a coroutine is
cancelled where it awaits, a plain function goes on in a thread that nobody waits for. `isolated` makes one killable.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fused_grpo.errors import FusedGRPOError, InputError, RewardError

RewardFunction = Callable[..., Any]
T = TypeVar("T")
FLOAT32_MAX = float.fromhex("0x1.fffffep127")


@dataclass(frozen=True, kw_only=True)
class RewardInputs:
    """What B completions are judged by."""

    columns: Mapping[str, Sequence[Any]]  # B each: prompts, completions, completion_ids, and those of the dataset
    trainer_state: Any = None

    def __len__(self) -> int:
        return len(self.columns["prompts"])

    def part(self, start: int, length: int = 1) -> RewardInputs:
        cut = {name: values[start : start + length] for name, values in self.columns.items()}
        return RewardInputs(columns=cut, trainer_state=self.trainer_state)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What a call gave for B completions."""

    values: list[float]  # B; NaN: not scored
    extra: dict[str, list[Any]] = field(default_factory=dict)  # B each, from log_extra
    metrics: dict[str, list[float]] = field(default_factory=dict)  # as many as there were, from log_metric


class TookTooLongError(Exception):
    """The time of a call was up. Never leaves this module."""


class RewardCaller:
    """Calls one function and checks what comes back. May be used from several threads at once."""

    def __init__(self, function: RewardFunction, name: str, *, timeout: float | None = None) -> None:
        self.function, self.name, self.timeout = function, name, timeout
        self.is_async = is_async(function)
        self.required, self.accepted = _parameters(function)

    def __call__(self, inputs: RewardInputs, *, pinpoint: bool = True) -> Scores:
        """Scores of the completions.

        Args:
            inputs: B completions.
            pinpoint: after an exception, call again one by one, to name the prompt in the error.

        Raises:
            RewardError: the function raised, took too long, or returned the wrong number of values, a NaN or
                something that is no number.
            InputError: it asks for an argument that there is none of.
        """
        self.check_columns(inputs.columns)
        prompts, extra, metrics = inputs.columns["prompts"], dict[str, list[Any]](), dict[str, list[float]]()
        try:
            returned = self._run(inputs, extra, metrics)
        except FusedGRPOError:
            raise
        except TookTooLongError:
            raise RewardError(
                f"reward function {self.name!r} took longer than {self.timeout} s for {len(prompts)} completions "
                f"(first prompt {prompts[0]!r}); fix: a longer reward_timeout, or fused_grpo.trainer.rewards.isolated"
            ) from None
        except (Exception, SystemExit) as error:  # a parser of arguments exits where it fails
            culprit = self._first_to_raise(inputs, type(error)) if pinpoint else prompts[0]
            raise RewardError(
                f"reward function {self.name!r} raised {type(error).__name__}: {error}; at prompt {culprit!r}; "
                "fix the function, or return None for what it cannot score"
            ) from error
        values = self._checked(returned, prompts)
        for column, logged in extra.items():
            if len(logged) != len(prompts):
                raise RewardError(
                    f"reward function {self.name!r} logged {len(logged)} values as {column!r} for {len(prompts)} "
                    f"completions (first prompt {prompts[0]!r}); want one value per completion"
                )
        return Scores(values=values, extra=extra, metrics=metrics)

    def check_columns(self, names: Iterable[str]) -> None:
        """Whether data with these columns is all that the function needs.

        Raises:
            InputError: it asks for an argument that there is none of.
        """
        if missing := sorted(self.required - {*names, "trainer_state", "log_extra", "log_metric"}):
            raise InputError(
                f"got reward function {self.name!r}, which wants {', '.join(map(repr, missing))}, and data with "
                f"{', '.join(map(repr, sorted(names)))}; fix: a column of that name, or a default in the function"
            )

    def _run(self, inputs: RewardInputs, extra: dict[str, list[Any]], metrics: dict[str, list[float]]) -> Any:
        """What the function returns, as a list where it can be one."""
        arguments = {
            **inputs.columns,
            "trainer_state": inputs.trainer_state,
            "log_extra": lambda column, values: extra.setdefault(column, []).extend(values),
            "log_metric": lambda name, value: metrics.setdefault(name, []).append(float(value)),
        }
        if self.accepted is not None:
            arguments = {name: value for name, value in arguments.items() if name in self.accepted}

        def call() -> Any:
            returned = self.function(**arguments)
            # Here, and not later: a generator does its work while it is listed.
            return list(returned) if isinstance(returned, Iterable) and not inspect.isawaitable(returned) else returned

        # A coroutine function returns at once; what it returns is waited for below.
        here = self.timeout is None or self.is_async
        returned = call() if here else wait(in_thread(call), self.timeout)
        if inspect.isawaitable(returned):
            returned = wait(asyncio.run_coroutine_threadsafe(_awaited(returned), event_loop()), self.timeout)
        return list(returned) if isinstance(returned, Iterable) else returned

    def _checked(self, returned: Any, prompts: Sequence[Any]) -> list[float]:
        if not isinstance(returned, list) or len(returned) != len(prompts):
            what = f"{len(returned)} values" if isinstance(returned, list) else repr(returned)
            raise RewardError(
                f"reward function {self.name!r} returned {what} for {len(prompts)} completions "
                f"(first prompt {prompts[0]!r}); want one float or None per completion"
            )
        return [self._number(value, prompt) for value, prompt in zip(returned, prompts, strict=True)]

    def _number(self, value: Any, prompt: Any) -> float:
        if value is None:
            return math.nan
        try:
            number = math.nan if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not abs(number) <= FLOAT32_MAX:
            raise RewardError(
                f"reward function {self.name!r} returned {value!r} at prompt {prompt!r}; "
                "want a finite float, or None for what it cannot score"
            )
        return number

    def _first_to_raise(self, inputs: RewardInputs, error: type[BaseException]) -> Any:
        """The prompt of the first completion that fails by itself in that way; the first one where only the batch does.

        The run is over by now: calling the function again is the price of naming the prompt.
        """
        prompts = inputs.columns["prompts"]
        for index, prompt in enumerate(prompts) if len(prompts) > 1 else ():
            try:
                self._run(inputs.part(index), {}, {})
            except error:
                return prompt
            except (Exception, SystemExit):
                continue
        return prompts[0]


def reward_name(function: RewardFunction) -> str:
    """The name a function is logged under: its own, or that of its class."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def is_async(function: RewardFunction) -> bool:
    """True for `async def` functions, partials of them, and objects whose `__call__` is one."""
    while isinstance(function, functools.partial):
        function = function.func
    call = getattr(function, "__call__", None)  # noqa: B004 - the method itself is looked at, not whether there is one
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def in_thread(work: Callable[[], T], name: str = "reward") -> Future[T]:
    """Start the work in a thread that does not keep the process alive."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # from now on it cannot be cancelled, only be left alone

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome


def wait(outcome: Future[T], timeout: float | None) -> T:
    """The result, or `TookTooLongError`: unlike TimeoutError, something that no reward function raises by itself."""
    try:
        return outcome.result(timeout)
    except TimeoutError:
        if outcome.done():
            raise
        outcome.cancel()
        raise TookTooLongError from None


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """The loop of all async rewards: one for good, because clients that stay open belong to the loop they began in."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="async rewards", daemon=True).start()
    return loop


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable


def _parameters(function: RewardFunction) -> tuple[frozenset[str], frozenset[str] | None]:
    """The arguments a function cannot do without, and those it takes; None: any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # builtins without a signature
        return frozenset(), None
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = frozenset(p.name for p in named if p.default is p.empty)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return required, None if takes_any else frozenset(p.name for p in named)
