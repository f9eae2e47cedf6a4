"""Environments: objects whose public methods are the tools of one episode; docs/agents.md says what they have."""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import torch

from fused_grpo.errors import DataError, InputError, UnavailableError, shown
from fused_grpo.trainer.common.contexts import contextmanager
from fused_grpo.trainer.common.threads import event_loop
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.data.datasets import Row, as_row, column_names, is_plain_arrow, is_stream, mapped, read_rows
from fused_grpo.trainer.episodes.tools import ASYNC, Tool, check_tools, clean
from fused_grpo.trainer.rewards.isolation import is_isolated
from fused_grpo.trainer.rewards.reward_call import RAISED, is_async, own_copy

Factory = Callable[[], Any]
T = TypeVar("T")
COLUMN = "environment"
NOT_TOOLS = ("reset", "get_reward")
NO_PROMPT = [{"role": "user", "content": ""}]  # `reset` writes it
_LONG = 60.0  # seconds

_log = logging.getLogger(__name__)


def rows_of_environments(dataset: Any, factory: Factory | Mapping[str, Factory], args: GRPOConfig) -> Any:
    """The training set of a run, with environments with prompts in every row, or without any where there was no set.

    DataError without a set that chooses among several environments; InputError without a set and without `max_steps`.
    """
    if dataset is not None or factory is None:
        return with_prompts(dataset, factory)
    if isinstance(factory, Mapping):
        raise DataError(
            "got a dict as environment_factory and no train_dataset, which chooses among them: it requires a "
            f"`train_dataset` with a column {COLUMN!r}; fix: pass it, or a single factory"
        )
    if args.max_steps <= 0:
        raise InputError(
            f"got max_steps={args.max_steps} and no train_dataset, want the number of steps where an environment has "
            "the data; fix: max_steps=..."
        )
    return [{"prompt": NO_PROMPT} for _ in range(args.prompts_per_generation(args.world_size))]


def with_prompts(dataset: Any, factory: Any) -> Any:
    """A dataset, or several by name: with a `factory` of environments with empty prompts where there are none.

    Of a list a copy, because its owner may change it after it has been checked.

    DataError for a column "environments", which reward functions get the objects as.
    """
    if isinstance(dataset, Mapping):
        return {name: with_prompts(rows, factory) for name, rows in dataset.items()}
    if type(dataset) is list:
        dataset = dataset[:]
    if factory is None or dataset is None or isinstance(dataset, str):
        return dataset
    columns = column_names(dataset)
    if "environments" in columns:
        raise DataError("got a column 'environments', as which reward functions get the environments; fix: rename it")
    if "prompt" in columns:
        return dataset
    return mapped(dataset, lambda row: {**row, "prompt": NO_PROMPT})


class Environments:
    """The environments of a run, which are kept and reset.

    Args:
        factory: makes an environment, or a dict of such by name, from which the column "environment" chooses.
        tools: functions that every episode may call beside its environment's methods.

    InputError for an object without `reset`, of a second class, or made before, or a method without a schema;
    UnavailableError where the factory raises.
    """

    def __init__(self, factory: Factory | Mapping[str, Factory], tools: Sequence[Tool]) -> None:
        self.is_named = isinstance(factory, Mapping)
        self.factories: dict[Any, Factory] = dict(factory) if isinstance(factory, Mapping) else {None: factory}
        self.pool, self.tools_of = dict[Any, list[Any]](), dict[Any, list[Tool]]()
        self._first, self._firsts = dict[Any, type[Any]](), dict[type[Any], type[Any]]()
        if not self.factories:
            raise InputError("got an empty dict as environment_factory, want a factory by name; fix: leave it out")
        for name, make in self.factories.items():
            if not callable(make):
                raise InputError(f"got {make!r} as environment_factory, want something callable without arguments")
            instance = self._made(name)
            reset = getattr(instance, "reset", None)
            if not callable(reset) or is_async(reset) or inspect.isgeneratorfunction(reset):
                raise InputError(
                    f"got a {type(instance).__name__} from environment_factory, want an object with reset(**row); each "
                    "environment must define a callable `reset`, which returns text: no coroutine and no generator"
                )
            if callable(getattr(type(instance), "get_reward", None)):
                _check_call(instance.get_reward, (), f"get_reward() of {type(instance).__name__}")
            self.pool[name], self.tools_of[name] = [instance], check_tools([*tools, *methods_of(instance)])
            self.pool[name].append(self._made(name))  # the members of a group need two, and it may be the same
        self.free_all()

    def rewards(self) -> list[Callable[..., Any]]:
        """A reward function for each class with `get_reward`, under its name; None for episodes of other classes."""
        classes = dict.fromkeys(type(pool[0]) for pool in self.pool.values())
        return [_own_reward(kind, self._firsts) for kind in classes if callable(getattr(kind, "get_reward", None))]

    def check_rows(self, rows: Any, *, name: str) -> None:
        """DataError for a row of an environment that there is not, InputError for columns that a `reset` does not take.

        Of a stream the first row is looked at, and the others when they come.
        """
        first, checked = as_row(next(iter(read_rows(rows, name=name)))), set[str | None]()
        column = rows.select_columns([COLUMN]) if is_plain_arrow(rows) and COLUMN in column_names(rows) else rows
        is_whole = self.is_named and not is_stream(rows)
        for number, row in enumerate(read_rows(column, name=name) if is_whole else [first]):
            if (kind := self.name_of(row, f"row {number} of {name}")) not in checked:
                environment = self.pool[kind][0]
                what = f"reset() of {type(environment).__name__} for {name}"
                _check_call(environment.reset, self._given(environment, first), what)
                checked.add(kind)

    def name_of(self, row: Mapping[str, Any], where: str = "a row") -> str | None:
        """The name of a row's environment."""
        name = row.get(COLUMN) if self.is_named else None
        if self.is_named and (not isinstance(name, str) or name not in self.factories):
            raise DataError(
                f"got {COLUMN}={name!r} in {where}, which is not among the environments {list(self.factories)}; fix: "
                "the column, or environment_factory"
            )
        return name

    def free_all(self) -> None:
        """Those of the batches before may be reset."""
        self._free = {name: list(pool) for name, pool in self.pool.items()}

    def take(self, row: Mapping[str, Any]) -> Any:
        """A free environment for an episode of this row."""
        name = self.name_of(row)
        if not self._free[name]:
            made = self._made(name)
            self.pool[name].append(made)
            return made
        return self._free[name].pop(0)

    def discard(self, environment: Any) -> None:
        """Do not reset this one again: a call whose answer is not awaited may still change it."""
        for pool in self.pool.values():
            pool[:] = [one for one in pool if one is not environment]

    def reset(self, environment: Any, row: Row, *, seed: int) -> str | None:
        """Begin an episode; the text that is added to the prompt. All members of a group have one seed: one task."""
        given = {name: own_copy(value) for name, value in self._given(environment, row).items()}
        kind = type(environment).__name__
        wanted = f"it to begin an episode of a row with {', '.join(given) or 'no columns'}"

        def begin() -> Any:
            with _seeded(seed):
                if _takes(environment.reset, "seed"):
                    given.setdefault("seed", seed)
                return environment.reset(**given)

        begun = _awaited(f"reset() of {kind}", wanted, begin)
        if isinstance(begun, list) and all(isinstance(part, dict) and "text" in part for part in begun):
            begun = "".join(str(part["text"]) for part in begun)
        if begun is not None and not isinstance(begun, str):
            raise UnavailableError(
                f"got a {type(begun).__name__} from reset() of {kind}, want text for the last message of the prompt, "
                "or None (no images); fix: the environment"
            )
        return None if begun is None else clean(begun)

    def _given(self, environment: Any, row: Mapping[str, Any]) -> dict[str, Any]:
        """What `reset` gets of a row: an empty prompt, which may be ours, only where it has a parameter for it."""
        left_out = {COLUMN} if self.is_named else set[str]()
        left_out |= {"prompt"} if row["prompt"] == NO_PROMPT and not _takes(environment.reset, "prompt") else set()
        return {name: value for name, value in row.items() if name not in left_out}

    def _made(self, name: str | None) -> Any:
        environment = _awaited("environment_factory", "an environment", self.factories[name])
        if any(environment is one for pool in self.pool.values() for one in pool):
            raise InputError(
                f"got one {type(environment).__name__} twice from environment_factory, want a new object at each call: "
                "episodes are played at the same time; fix: the class itself, or a function that makes one"
            )
        # Schemas, the call of `reset` and the reward are those of the first one's class.
        kind, first = type(environment), self._first.setdefault(name, type(environment))
        if _code(kind) != _code(first):
            raise InputError(
                f"got a {kind.__name__} from environment_factory, which made a {first.__name__} before, want objects "
                "of one class; fix: a dict of factories and a column 'environment' for several"
            )
        self._firsts[kind] = first
        return environment


def methods_of(environment: Any) -> list[Tool]:
    """Its public methods but `reset` and `get_reward`, in alphabetical order."""
    # Those of the class: looking at the object would compute its properties.
    members = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    return [
        # An isolated tool is a function of its arguments alone: no process could have the object.
        function if is_isolated(function) else getattr(environment, name)
        for name, function in members
        if name not in NOT_TOOLS and not name.startswith("_")
    ]


def is_done(environment: Any) -> bool:
    """Whether its `done` is true; a method of that name is a tool. UnavailableError for a property that raises."""
    what = f"`done` of {type(environment).__name__}"
    default = () if hasattr(type(environment), "done") else (False,)  # an AttributeError of a property is an error

    def truth() -> Any:
        value = getattr(environment, "done", *default)
        return value.item() if hasattr(value, "item") else value  # of NumPy, PyTorch, JAX

    value = _awaited(what, "True or False", truth)
    if not isinstance(value, int | float | None) and not callable(value):  # a TRL environment's own may be anything
        warn_once(f"got a {type(value).__name__} as {what}, which ends no episode, want True or False; fix: bool(...)")
    return isinstance(value, int | float) and bool(value)


def _code(kind: type[Any]) -> dict[str, Any]:
    """The code of its methods, by name: a class that a factory defines anew at each call has the same."""
    methods = inspect.getmembers(kind, predicate=inspect.isroutine)
    return {name: getattr(method, "__code__", method) for name, method in methods if not name.startswith("__")}


def _own_reward(kind: type[Any], firsts: Mapping[type[Any], type[Any]]) -> Callable[..., Any]:
    def is_of_kind(one: Any) -> bool:  # not a subclass: that is another environment, with its own column
        return firsts.get(type(one)) is kind

    def called(environments: list[Any], **_: Any) -> list[float | None]:
        return [one.get_reward() if is_of_kind(one) else None for one in environments]

    async def awaited(environments: list[Any], **_: Any) -> list[float | None]:
        return [await in_loop_of_tools(one.get_reward()) if is_of_kind(one) else None for one in environments]

    def in_loop_of_tools(reward: Any) -> Any:  # where clients belong that the object keeps open
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(reward, event_loop(ASYNC)))

    reward: Callable[..., Any] = awaited if inspect.iscoroutinefunction(kind.get_reward) else called
    reward.__name__ = kind.__name__
    return reward


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """None for something builtin, which has none."""
    with suppress(ValueError):
        return inspect.signature(function)
    return None


def _takes(function: Callable[..., Any], name: str) -> bool:
    return name in getattr(_signature(function), "parameters", ())


def _check_call(function: Callable[..., Any], names: Collection[str], what: str) -> None:
    """InputError where it cannot be called with arguments of these names, and with `seed` where it has that one."""
    if (signature := _signature(function)) is None:
        return
    given = [*names, *signature.parameters.keys() & {"seed"} - {*names}]
    try:
        signature.bind(**dict.fromkeys(given))
    except TypeError as error:
        raise InputError(
            f"got {what} with the signature {signature} ({error}), want one that takes "
            f"{', '.join(map(repr, given)) or 'no arguments'}; fix: the environment, such as reset(self, **row)"
        ) from error


def _awaited(source: str, wanted: str, call: Callable[[], T]) -> T:
    """What a call of an environment's returns; UnavailableError for whatever it raises, a warning where it takes long.

    No context manager: a StopIteration would pass it.
    """
    text = "%s has not returned for %g s, and the run waits for it; fix: a time limit there, if it should not"
    warning = threading.Timer(_LONG, _log.warning, [text, source, _LONG])
    warning.start()
    try:
        value = call()
        if inspect.iscoroutine(value):  # refused, without Python's warning that it was never awaited
            value.close()
        return value
    except RAISED as error:
        raise UnavailableError(
            f"got {type(error).__name__} from {source}: {shown(error, 2000)}; want {wanted}; fix: the environment"
        ) from error
    finally:
        warning.cancel()


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # of the CPU alone: a GPU's belongs to the sampling there
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
