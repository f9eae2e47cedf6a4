"""JSON from a checkpoint, looked at before any of it is used: it may have been edited, or written by somebody else.

The wanted shape is written as it looks: `{"step": int, "buffers": {str: Maybe(dict)}}`. A dict has exactly these keys,
or with `{str: ...}` any; `[float]` is a list of any length, `(float, float)` one of two. Whole numbers are those from 0
on that a float can hold, so that nothing counts to 10**1000; `dict`, `str` and `bool` are taken as they come.
"""

from __future__ import annotations

import json
import math
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_BYTES = 256 << 20
MAX_WHOLE = 2**53


@dataclass(frozen=True)
class Maybe:
    """Null, or this shape."""

    shape: Any


class AnyNumber:
    """A number that may be NaN or infinite, as a metric may."""


def read_json(path: Path, shape: Any) -> Any:
    """The content of a file, known to be of this shape.

    Raises:
        ValueError: it is not; the message says where.
        OSError: there is no such file, or it cannot be read.
    """
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"is larger than {MAX_BYTES >> 20} MiB")
    try:
        content = json.loads(path.read_bytes())
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    check(content, shape)
    return content


def check(value: Any, shape: Any, where: str = "it") -> None:
    """Raise ValueError where a value is not of the shape."""
    if isinstance(shape, Maybe):
        if value is not None:
            check(value, shape.shape, where)
    elif isinstance(shape, dict) and shape.keys() == {str}:
        _want(isinstance(value, dict), value, "a dict", where)
        for name, entry in value.items():
            check(entry, shape[str], f"{where}[{reprlib.repr(name)}]")
    elif isinstance(shape, dict):
        _want(isinstance(value, dict), value, "a dict", where)
        if strange := value.keys() ^ shape.keys():
            raise ValueError(f"{where} {'lacks' if strange & shape.keys() else 'has'} {reprlib.repr(min(strange))}")
        for name in shape:
            check(value[name], shape[name], f"{where}[{name!r}]")
    elif isinstance(shape, list | tuple):
        _want(isinstance(value, list), value, "a list", where)
        shapes = shape * len(value) if isinstance(shape, list) else shape
        _want(len(value) == len(shapes), value, f"a list of {len(shapes)}", where)
        for index, (entry, part) in enumerate(zip(value, shapes, strict=True)):
            check(entry, part, f"{where}[{index}]")
    else:
        _want(_is(value, shape), value, f"a {shape.__name__}", where)


def shape_of(example: Any) -> Any:
    """The shape of a value that came from nowhere else but here. A flag may have been left to the library (null)."""
    if isinstance(example, dict):
        return {name: shape_of(entry) for name, entry in example.items()}
    if isinstance(example, list | tuple):
        return tuple(shape_of(entry) for entry in example)
    if example is None or isinstance(example, bool):
        return Maybe(bool)
    if isinstance(example, float):
        return float if math.isfinite(example) else AnyNumber
    return float if isinstance(example, int) else type(example)


def _is(value: Any, kind: type) -> bool:
    if kind not in (int, float, AnyNumber):
        return isinstance(value, kind)
    if isinstance(value, int):
        return not isinstance(value, bool) and (0 if kind is int else -MAX_WHOLE) <= value <= MAX_WHOLE
    return isinstance(value, float) and kind is not int and (kind is AnyNumber or math.isfinite(value))


def _want(fits: bool, value: Any, want: str, where: str) -> None:
    if not fits:
        raise ValueError(f"{where} is {reprlib.repr(value)}, want {want}")
