"""The tasks of the command line by name, with options as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from fused_grpo.errors import InputError, UnavailableError
from fused_grpo.trainer.common.yaml_loader import YamlLoader
from fused_grpo.trainer.tasks.reasoning_gym import generators, option_fields, reasoning_gym_task
from fused_grpo.trainer.tasks.task import Task

ARITHMETIC, CALCULATOR, REASONING_GYM = "arithmetic", "calculator", "reasoning_gym:"
BUILT_IN = {ARITHMETIC: "addition: the demo", CALCULATOR: "products, with a calculator as a tool"}
# Arguments of `reasoning_gym_task` that are no options of a generator.
FIXES = {"size": "--limit", "heldout_size": "--eval-limit", "read_answer": "reasoning_gym_task(...) in a script"}
FORMS = f"{', '.join(BUILT_IN)}, or reasoning_gym:<generator> such as reasoning_gym:chain_sum"


def named_task(name: str, options: Sequence[str] = (), *, limit: int | None, eval_limit: int | None) -> Task:
    """The task of a name of the command line.

    Args:
        options: of the task, each as name=value.
        limit, eval_limit: rows to train on and held-out ones. None: the task's own numbers.

    InputError for an unknown name or option, UnavailableError where what the task needs is not installed.
    """
    if name in BUILT_IN:
        if options:
            raise InputError(f"got --task-options {' '.join(options)} for {name}, which has none; fix: leave it out")
        return _built_in(name, limit, eval_limit)
    if not name.startswith(REASONING_GYM):
        raise InputError(f"got --task {name}, want {FORMS}; fix: `fused-grpo tasks` lists them")
    sizes: dict[str, Any] = {key: n for key, n in (("size", limit), ("heldout_size", eval_limit)) if n is not None}
    pairs = [*map(_named_value, options)]
    values = dict(pairs)
    for key in values.keys() & FIXES.keys():
        raise InputError(f"got --task-options {key}=..., want options of the generator alone; fix: {FIXES[key]}")
    if len(values) < len(pairs):
        raise InputError(f"got --task-options {' '.join(options)}, want each name once; fix: leave the others out")
    return reasoning_gym_task(name.removeprefix(REASONING_GYM), **sizes, **values)


def task_lines(name: str | None = None) -> Iterator[str]:
    """A line for each task, or for each option of the task of that name: what `fused-grpo tasks` prints."""
    if name is not None:
        if not name.startswith(REASONING_GYM):
            raise InputError(f"got the task {name!r}, which has no options, want reasoning_gym:<generator>")
        for entry in option_fields(name.removeprefix(REASONING_GYM)):
            yield f"{entry.name}={_default(entry)}"
        return
    yield from (f"{task:16} {what}; has a model of its own" for task, what in BUILT_IN.items())
    try:
        yield from (f"{REASONING_GYM}{generator}" for generator in generators())
    except UnavailableError:
        yield f"{REASONING_GYM}...  generators of reasoning-gym: pip install 'fused-grpo[tasks]'"


def _built_in(name: str, limit: int | None, eval_limit: int | None) -> Task:
    from fused_grpo.trainer.recipes import arithmetic, calculator  # which import torch

    parts: dict[str, list[Any]] = {
        ARITHMETIC: [arithmetic, arithmetic.sum_reward],
        CALCULATOR: [calculator, calculator.product_reward, calculator.multiply],
    }
    recipe, reward, *tools = parts[name]
    train, heldout = recipe.build_splits()
    return Task(
        name=name,
        train=train[:limit],
        heldout=heldout[:eval_limit],
        reward=reward,
        tools=tuple(tools),
        measures="accuracy",
        load_model=recipe.load_base_model,
    )


def _named_value(option: str) -> tuple[str, Any]:
    name, equals, value = option.partition("=")
    if not name or not equals:
        raise InputError(f"got --task-options {option}, want name=value, such as min_terms=2")
    try:
        return name, YamlLoader(value).get_single_data()
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"got --task-options {option}, whose value is not YAML: {error}") from error


def _default(entry: dataclasses.Field[Any]) -> Any:
    if entry.default_factory is not dataclasses.MISSING:
        return entry.default_factory()
    return "" if entry.default is dataclasses.MISSING else entry.default
