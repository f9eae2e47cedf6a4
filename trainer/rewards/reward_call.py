"""One reward function: find it by its name, call it, and check what it returns (docs/rewards.md has the signature).

Each completion gets copies of its own at each call (`own_copy`), because one row serves all completions of its prompt.
The result is checked before an advantage is computed from it, and an error names the function and the prompt. The
timeout ends the wait, not the call: Python code cannot be stopped from outside.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import importlib
import importlib.util
import inspect
import math
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

from fused_grpo.errors import FusedGRPOError, InputError, RewardError, RewardValueError, UnavailableError, quoted, shown
from fused_grpo.trainer.common.formatting import to_json
from fused_grpo.trainer.common.threads import event_loop, in_thread, leave_blocked_loop

RewardFunction = Callable[..., Any]
T = TypeVar("T")
# torch.finfo(torch.float32).max; the process of an isolated reward does not import torch.
FLOAT32_MAX = float.fromhex("0x1.fffffep127")
# By a user's code: argparse calls sys.exit, and asyncio.run raises what cancelled its task. Ctrl-C is the user's own.
RAISED = (Exception, SystemExit, asyncio.CancelledError)
ASYNC = "async rewards"  # the name of their event loop
NUMERIC = tuple("biufO")  # NumPy's kinds of numbers, and objects, which are looked at one by one
_SHARED = frozenset({str, int, float, bool, bytes, type(None)})
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, kw_only=True)
class RewardInputs:
    """B completions to score."""

    columns: Mapping[str, Sequence[Any]]  # B each: prompts, completions, completion_ids, and those of the dataset
    trainer_state: Any = None
    shared: frozenset[str] = frozenset()  # columns of objects that are passed themselves: environments
    over: futures.Future[Any] = field(default_factory=futures.Future)  # done: scores are not waited for any more

    def __len__(self) -> int:
        return len(self.columns["prompts"])

    def part(self, start: int, length: int = 1) -> RewardInputs:
        cut = {name: values[start : start + length] for name, values in self.columns.items()}
        return replace(self, columns=cut)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What one function returned and logged for B completions."""

    values: list[float] = field(default_factory=list)  # B; NaN: not scored
    extra: dict[str, list[Any]] = field(default_factory=dict)  # B each, from log_extra, for JSON
    metrics: dict[str, list[float]] = field(default_factory=dict)  # all values, from log_metric; NaN: not finite
    failures: dict[int, RewardError] = field(default_factory=dict)  # by group, where failed groups are dropped
    group_metrics: dict[range, dict[str, list[float]]] = field(default_factory=dict)  # metrics of a call for each group

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        if (listed := _listed(values)) is None:
            raise TypeError(f"log_extra got {quoted(values)} as {column!r}, want a list of values")
        self.extra.setdefault(column, []).extend(map(to_json, listed))

    def log_metric(self, name: str, value: float) -> None:
        number = float(value)
        self.metrics.setdefault(name, []).append(number if abs(number) <= FLOAT32_MAX else math.nan)


class RewardCaller:
    """Calls one function and checks its result. Thread-safe."""

    def __init__(self, function: RewardFunction, name: str, *, timeout: float | None = None) -> None:
        self.function, self.name, self.timeout = function, name, timeout
        self.is_async = is_async(function)
        self.required, self.accepted, self.nameless = _parameters(function)

    def __call__(self, inputs: RewardInputs, *, pinpoint: bool = True) -> Scores:
        """Scores of the completions. `pinpoint`: after an exception, call for one after the other, to name the prompt.

        RewardError where the function raised, exceeded its timeout, or returned the wrong number of values, a NaN or
        no number; InputError where it has a parameter without a default that no column fills.
        """
        self.check_columns(inputs.columns)
        prompts, logged = inputs.columns["prompts"], Scores()
        try:
            returned = self._run(inputs, logged)
        except FusedGRPOError:
            raise
        except RAISED as error:
            culprit = self._first_to_raise(inputs, type(error)) if pinpoint else prompts[0]
            raise RewardError(
                f"reward function {self.name!r} raised {type(error).__name__}: {shown(error, 2000)}; at prompt "
                f"{quoted(culprit)}; fix the function, or return None for what it cannot score"
            ) from error
        values = _listed(returned)
        if values is None or len(values) != len(prompts):
            what = quoted(returned) if values is None else f"{len(values)} rewards"
            raise RewardValueError(
                f"reward function {self.name!r} returned {what} for {len(prompts)} completions (first prompt "
                f"{quoted(prompts[0])}); want a list, tuple, flat array or tensor: one float or None per completion"
            )
        scores: Scores = own_copy(logged)  # a thread that the function has left behind may still log
        scores.values.extend(self._number(value, prompt) for value, prompt in zip(values, prompts, strict=True))
        for column, entries in scores.extra.items():
            if len(entries) != len(prompts):
                raise RewardError(
                    f"reward function {self.name!r} logged {len(entries)} values as {quoted(column)} for "
                    f"{len(prompts)} completions (first prompt {quoted(prompts[0])}); want one value per completion"
                )
        return scores

    def check_columns(self, names: Iterable[str]) -> None:
        """InputError where the function has a parameter without a default that none of these columns fills."""
        if inspect.isgeneratorfunction(self.function) or inspect.isasyncgenfunction(self.function):
            raise InputError(
                f"got reward function {self.name!r}, which is a generator, want a list for all completions; fix: "
                "return it, instead of a yield"
            )
        if self.nameless is not None:
            raise InputError(
                f"got reward function {self.name!r} with the parameters {self.nameless}, want some that are given by "
                "name; fix: def reward(completions, **columns), without a / behind them"
            )
        if missing := sorted(self.required - {*names, "trainer_state", "log_extra", "log_metric"}):
            raise InputError(
                f"got reward function {self.name!r}, which wants {', '.join(map(repr, missing))}, and data with "
                f"{', '.join(map(repr, sorted(names)))}; fix: a column of that name, or a default in the function"
            )

    def _run(self, inputs: RewardInputs, logged: Scores) -> Any:
        """What the function returns for copies of the inputs. What it logs goes into `logged`."""
        logs = {"log_extra": logged.log_extra, "log_metric": logged.log_metric}
        given = {**inputs.columns, "trainer_state": inputs.trainer_state, **logs}
        arguments = {
            # One by one: the members of a group have the same prompt and row.
            name: list(value if name in inputs.shared else [own_copy(one) for one in value])
            if name in inputs.columns
            else (copied_when_read if name == "trainer_state" else own_copy)(value)
            for name, value in given.items()
            if self.accepted is None or name in self.accepted
        }
        call = functools.partial(self.function, **arguments)
        # A call of a coroutine function returns at once.
        directly = self.timeout is None or self.is_async
        returned = call() if directly else self._wait(in_thread(call, name="reward"), inputs)
        if inspect.isawaitable(returned):
            awaited = asyncio.wait_for(returned, None)  # a coroutine, whatever is awaited
            returned = self._wait(asyncio.run_coroutine_threadsafe(awaited, event_loop(ASYNC)), inputs)
        return returned

    def _wait(self, outcome: futures.Future[T], inputs: RewardInputs) -> T:
        futures.wait([outcome, inputs.over], self.timeout, futures.FIRST_COMPLETED)
        if not outcome.done():
            outcome.cancel()
            if inputs.over.done():
                raise UnavailableError(f"got no score of reward function {self.name!r} before the others were given up")
            leave_blocked_loop(ASYNC, timeout=self.timeout or 0.0)
            raise RewardError(
                f"reward function {self.name!r} took longer than {self.timeout} s for {len(inputs)} completions (first "
                f"prompt {quoted(inputs.columns['prompts'][0])}); fix: a longer reward_timeout, or "
                "fused_grpo.trainer.rewards.isolated"
            )
        return outcome.result()

    def _number(self, value: Any, prompt: Any) -> float:
        number, plain = math.nan, value
        with suppress(Exception):  # of somebody's __float__, too
            kind = None if type(value) in (float, int) else _array_kind(value)
            if kind is not None:
                plain = value.item() if value.ndim else value.tolist()  # which is None of what NumPy masks
            if plain is None:
                return math.nan
            # float() alone reads text and bytes, and drops imaginary parts.
            if (kind or "f") in NUMERIC and hasattr(type(plain), "__float__"):
                number = float(plain)
        if not abs(number) <= FLOAT32_MAX:
            raise RewardValueError(
                f"reward function {self.name!r} returned {quoted(value)} at prompt {quoted(prompt)}; "
                "want a finite float, or None for what it cannot score"
            )
        return number

    def _first_to_raise(self, inputs: RewardInputs, error: type[BaseException]) -> Any:
        """The prompt of the first completion for which a call alone raises that error; else the first prompt."""
        prompts = inputs.columns["prompts"]
        for index, prompt in enumerate(prompts) if len(prompts) > 1 else ():
            try:
                self._run(inputs.part(index), Scores())
            except error:
                return prompt
            except RAISED:
                continue
        return prompts[0]


def _listed(returned: Any) -> list[Any] | None:
    """The values of a list, a tuple, or an array or tensor of one dimension; None for anything else."""
    # Not of all that can be iterated: a dict has keys, a set no order, bytes are numbers, a generator may not end.
    if isinstance(returned, list | tuple):
        return list(returned)
    with suppress(Exception):  # of a tensor that is sparse, or has no data
        return list(returned.tolist()) if _array_kind(returned) in NUMERIC and returned.ndim == 1 else None
    return None


def _array_kind(value: Any) -> str | None:
    """NumPy's letter for the type of an array's or scalar's numbers, "f" for a tensor; None for anything else."""
    modules = [sys.modules[name] for name in ("numpy", "torch") if name in sys.modules]  # not imported in a worker
    kinds = tuple(getattr(m, name) for m in modules for name in ("ndarray", "generic", "Tensor") if hasattr(m, name))
    return getattr(value.dtype, "kind", "f") if isinstance(value, kinds) else None


def reward_name(function: RewardFunction) -> str:
    """The name under which a function is logged: its own, or that of its class."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def is_async(function: RewardFunction) -> bool:
    """True for `async def` functions, partials of them, and objects whose `__call__` is one."""
    while isinstance(function, functools.partial):
        function = function.func
    call = getattr(function, "__call__", None)  # noqa: B004 - the method itself is inspected
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _parameters(function: RewardFunction) -> tuple[frozenset[str], frozenset[str] | None, str | None]:
    """The parameters without a default; all parameters, or None where the function takes any; the signature of one that
    gets nothing by name, or not all that it needs, or None of any other."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # builtins without a signature
        return frozenset(), None, None
    parameters = signature.parameters.values()
    kinds, named = {p.kind for p in parameters}, [p for p in parameters if p.kind in _BY_NAME]
    required = frozenset(p.name for p in named if p.default is p.empty)
    accepted = None if inspect.Parameter.VAR_KEYWORD in kinds else frozenset(p.name for p in named)
    unfilled = any(p.kind is p.POSITIONAL_ONLY and p.default is p.empty for p in parameters)
    is_nameless = unfilled or kinds == {inspect.Parameter.VAR_POSITIONAL}
    return required, accepted, str(signature) if is_nameless else None


def load_reward(name: str, *, what: str = "reward function") -> RewardFunction:
    """The function of that name, or anything callable: its module is imported, or its file is run. InputError: none."""
    source, _, attribute = name.rpartition(":" if ":" in name else ".")
    if not source:
        raise InputError(f"got {what} {name!r}, want module:name, module.name or path.py:name")
    _search_working_directory()
    try:
        if source.endswith(".py"):
            module = _run_file(Path(source), os.stat(source).st_mtime_ns)
        else:
            module = importlib.import_module(source)
        function: Any = getattr(module, attribute)
    except RAISED as error:  # when it is imported
        reason = f"it exits with {error}" if isinstance(error, SystemExit) else error
        raise InputError(f"got {what} {name!r}, which cannot be loaded: {reason}") from error
    if not callable(function):
        raise InputError(f"got {what} {name!r}, which is a {type(function).__name__}, want something callable")
    return cast(RewardFunction, function)


def names_a_function(name: str) -> bool:
    """True for a string with a colon and for `module.name` of a module that exists, unless it is a path that exists."""
    module, _, attribute = name.rpartition(".")
    if Path(name).exists() or ":" in name:
        return not Path(name).exists()
    if not (module and name.replace(".", "").isidentifier() and attribute):
        return False
    _search_working_directory()
    with suppress(ModuleNotFoundError):
        return importlib.util.find_spec(module) is not None
    return False


@functools.cache
def _run_file(path: Path, changed: int) -> ModuleType:
    """The module of a file, which is run once as long as it stays as it is: its functions share their state."""
    # A prefix keeps a user's json.py from replacing the module json.
    spec = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _search_working_directory() -> None:
    """Import modules from the working directory too, as `python -m` does."""
    if "" not in sys.path:
        sys.path.insert(0, "")


def own_copy(value: Any) -> Any:
    """A copy of data: of containers, arrays, tensors and dataclasses, with what is in them.

    Objects of other classes (images, clients, environments) and what cannot be copied are the same as before.
    Strings and numbers are shared: 512 completions of 1,000 tokens take 50 ms.
    """
    with suppress(RecursionError):  # of a list that is in itself
        return _copied(value)
    return value


def copied_when_read(value: Any) -> Any:
    """As `own_copy`; of a dataclass each field that is a container is copied when it is read, as it is then.

    Most functions never read the log of a run, which grows with its steps, and every call gets it.
    """
    if not (is_dataclass(value) and hasattr(value, "__dict__")):
        return own_copy(value)
    kind: Any = type(value)
    copied: Any = object.__new__(_lazy(kind, tuple(vars(value))))
    vars(copied).update({name: field for name, field in vars(value).items() if type(field) in _SHARED}, _original=value)
    return copied


@functools.cache
def _lazy(kind: type, names: tuple[str, ...]) -> type:
    """A subclass whose fields, where an object has none, are copies of those of its `_original`."""

    def field_of(name: str) -> functools.cached_property[Any]:
        return functools.cached_property(lambda lazy: own_copy(getattr(lazy._original, name)))

    def whole(lazy: Any) -> Any:  # what is pickled, or copied: of the class itself
        copied = own_copy(lazy._original)
        vars(copied).update({name: field for name, field in vars(lazy).items() if name != "_original"})
        return own_copy, (copied,)

    return type(kind.__name__, (kind,), {"__reduce__": whole} | {name: field_of(name) for name in names})


def _copied(value: Any) -> Any:
    kind, copied = type(value), value
    if kind is list or kind is dict:
        copied = value.copy()
        for place, entry in enumerate(value) if kind is list else value.items():
            if type(entry) not in _SHARED:
                copied[place] = _copied(entry)
    elif kind is tuple:  # deepcopy would copy an object in it, or where it cannot, nothing
        copied = tuple(map(_copied, value))
    elif is_dataclass(kind) and hasattr(value, "__dict__"):
        copied = copy.copy(value)
        vars(copied).update(_copied(vars(value)))
    elif isinstance(value, list | dict | tuple | set | deque | bytearray) or hasattr(kind, "__array__"):
        with suppress(Exception):  # of something in it
            copied = copy.deepcopy(value)
    return copied
