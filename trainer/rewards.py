"""Calling reward functions, and not letting a bad one reach the loss.

A reward function has TRL's signature: `reward(prompts, completions, completion_ids, **columns) -> list[float | None]`,
with the dataset's columns repeated for every completion. What it returns is checked before an advantage is computed
from it; an error names the function and the prompt, and nothing has been updated by then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fused_grpo.errors import InputError, RewardError
from fused_grpo.trainer.data import Row

RewardFunction = Callable[..., Sequence[float | None]]


def reward_name(function: RewardFunction) -> str:
    return getattr(function, "__name__", type(function).__name__)


def check_reward_functions(functions: Any, weights: Sequence[float] | None) -> tuple[list[RewardFunction], Tensor]:
    """The functions as a list, and their weights [F].

    Raises:
        InputError: nothing callable, or another number of weights than of functions.
    """
    listed: list[RewardFunction] = list(functions) if isinstance(functions, (list, tuple)) else [functions]
    if not listed or not all(map(callable, listed)):
        raise InputError(f"got reward_funcs={functions!r}, want a function or a non-empty list of functions")
    if weights is not None and len(weights) != len(listed):
        raise InputError(f"got {len(weights)} reward_weights for {len(listed)} reward functions, want one each")
    if weights is not None and not all(map(math.isfinite, weights)):
        raise InputError(f"got reward_weights={list(weights)}, want finite numbers")
    return listed, torch.tensor([1.0] * len(listed) if weights is None else list(weights))


def call_reward_functions(
    functions: Sequence[RewardFunction], rows: Sequence[Row], completions: list[str], completion_ids: list[list[int]]
) -> Tensor:
    """Rewards [B, F] of B completions, `rows` [B] being their dataset rows. NaN stands for None: not scored.

    Raises:
        RewardError: a function raised, or returned the wrong number of values, a NaN or something that is no number.
    """
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
    inputs = {
        "prompts": [row["prompt"] for row in rows],
        "completions": completions,
        "completion_ids": completion_ids,
        **columns,
    }
    return torch.stack([torch.tensor(_call(function, inputs), dtype=torch.float32) for function in functions], dim=1)


def _call(function: RewardFunction, inputs: dict[str, list[Any]]) -> list[float]:
    name, prompts = reward_name(function), inputs["prompts"]
    try:
        returned = function(**inputs)
    except Exception as error:
        culprit = _first_to_raise(function, inputs, type(error))
        raise RewardError(
            f"reward function {name!r} raised {type(error).__name__}: {error}; at prompt {culprit!r}; "
            "fix the function, or return None for what it cannot score"
        ) from error
    if not isinstance(returned, Iterable):
        raise RewardError(
            f"reward function {name!r} returned {returned!r} for {len(prompts)} completions "
            f"(first prompt {prompts[0]!r}); want one float or None per completion"
        )
    values = list(returned)
    if len(values) != len(prompts):
        raise RewardError(
            f"reward function {name!r} returned {len(values)} values for {len(prompts)} completions "
            f"(first prompt {prompts[0]!r}); want one float or None per completion"
        )
    return [_checked(value, name, prompt) for value, prompt in zip(values, prompts, strict=True)]


def _checked(value: Any, name: str, prompt: str) -> float:
    if value is None:
        return math.nan
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not abs(number) <= torch.finfo(torch.float32).max:
        raise RewardError(
            f"reward function {name!r} returned {value!r} at prompt {prompt!r}; "
            "want a finite float, or None for what it cannot score"
        )
    return number


def _first_to_raise(function: RewardFunction, inputs: dict[str, list[Any]], error: type[Exception]) -> str:
    """The prompt of the first completion that fails by itself in that way; the first prompt where only the batch does.

    The run is over by now: calling the function again is the price of naming the prompt.
    """
    prompts = inputs["prompts"]
    for index, prompt in enumerate(prompts):
        try:
            function(**{name: [values[index]] for name, values in inputs.items()})
        except error:
            return str(prompt)
        except Exception:
            continue
    return str(prompts[0])
