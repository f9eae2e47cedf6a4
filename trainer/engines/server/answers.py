"""The comparison of what vLLM's routes answer, as JSON, with dataclasses.

An answer may come from another program, another version or a broken server. `parsed` compares all of it with types, so
that the code behind it needs no guards. Fields that a dataclass lacks are left out. Values and lengths of completions
are checked with those of all engines, in checked_engine.py.
"""

from __future__ import annotations

from dataclasses import is_dataclass
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints


def parsed(kind: Any, value: Any, at: str) -> Any:
    """JSON as `kind`: a dataclass, a list or a dict of one kind, a plain type, object, or one of these or None.

    Raises:
        ValueError: says where it is something else.
    """
    outer, inner = get_origin(kind) or kind, get_args(kind)
    if outer is UnionType:
        return None if value is None else parsed(inner[0], value, at)
    if outer is float and type(value) is int and abs(value) < 1e300:
        return float(value)
    if outer is not object and type(value) is not (dict if is_dataclass(outer) else outer):
        raise ValueError(f"{at} is {type(value).__name__}, want {outer.__name__}")
    if outer is str:
        value.encode()  # a lone surrogate can be sent to no server and written to no file
    if is_dataclass(outer):
        hints = _hints(kind)
        if missing := [name for name in hints if name not in value and not hasattr(outer, name)]:  # without a default
            raise ValueError(f"{at} is without {missing[0]}")
        return kind(**{name: parsed(hints[name], value[name], f"{at}.{name}") for name in hints if name in value})
    # All at once where it can be: item by item takes half a second for a million.
    if outer is list and (inner[0] is str or set(map(type, value)) != {inner[0]}):
        return [parsed(inner[0], item, f"{at}[{index}]") for index, item in enumerate(value)]
    if outer is dict and set(map(type, value.values())) != {inner[1]}:
        return {name: parsed(inner[1], item, f"{at}[{name[:20]!r}]") for name, item in value.items()}
    return value


_hints = cache(get_type_hints)
