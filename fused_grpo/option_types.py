"""Type checks for the options of a dataclass, when it is constructed."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from fused_grpo.errors import InputError

# The largest integer range that fp64 represents exactly, and the largest fp32 number. Larger values would be changed.
EXACT, LARGEST = 2**53, 3.4028234663852886e38


def check_option_types(options: Any, *, but: Collection[str] = ()) -> None:
    """Compare the fields of a dataclass, except those in `but`, with their annotations.

    Raises:
        InputError: the first field of another type. An int is accepted as a float.
    """
    if torch.compiler.is_compiling():
        return  # the compiler cannot trace annotations; ranges are still checked
    cls: Any = type(options)
    for name, kind in _kinds(cls).items():
        value = getattr(options, name)
        if name not in but and not is_of(value, kind):
            raise InputError(f"got {name}={repr(value)[:200]}, want {readable(kind)}")


def is_of(value: Any, kind: Any) -> bool:
    """Whether the value has the type of an annotation."""
    arguments = get_args(kind)
    match get_origin(kind):
        case None if kind is Any:
            return True
        case None if kind is float:
            return isinstance(value, int | float) and (
                value in (math.inf, -math.inf) or value != value or is_held(value)
            )
        case None if kind is int:
            return isinstance(value, int) and -(2**63) <= value < 2**63
        case None:
            return isinstance(value, kind)
        case origin if origin in (Union, UnionType):
            return any(is_of(value, one) for one in arguments)
        case origin if origin is Literal:
            return isinstance(value, str) and value in arguments
        case origin if origin is dict:
            return isinstance(value, dict) and all(isinstance(key, str) for key in value)
        case origin:
            return isinstance(value, origin) and all(is_of(item, arguments[0]) for item in value)


def is_held(value: float) -> bool:
    """Whether a tensor can represent the number."""
    return abs(value) <= (EXACT if isinstance(value, int) else LARGEST)


def readable(kind: Any) -> str:
    """The annotation in words."""
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(readable, get_args(kind)))
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, get_args(kind)))}"
    return "None" if kind is NoneType else kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)


@functools.cache
def _kinds(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}
