"""Numbers, durations and conversations as the console and the report show them, and values as JSON."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

MISSING = "-"


def to_json(value: object) -> object:
    """`value` for strict JSON and YAML: NaN and infinities as null, paths and unknown objects as text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        # Also of an IntEnum, which YAML refuses as it does np.float64. Python writes no more than 4,300 digits.
        return int(value) if value.bit_length() < 14_000 else hex(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(item) for item in value]
    if hasattr(type(value), "tolist"):  # of NumPy, or a tensor
        return to_json(value.tolist())  # type: ignore[attr-defined]
    return getattr(value, "__qualname__", None) or str(value)


def message_text(value: object) -> str:
    """A prompt or completion as plain text: a string as it is, a conversation as one `role: content` line a message."""
    parts = conversation(value, name="")
    return "\n".join(f"{role}: {text}" if role else text for role, text in parts)


def conversation(value: object, *, name: str) -> list[tuple[str, str]]:
    """A prompt or completion as (role, text) parts; anything but a list of messages is one part called `name`."""
    if isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(part, Mapping) for part in value):
        return [(str(message.get("role", "?")), _said(message)) for message in value]
    return [(name, str(value))]


def _said(message: Mapping[str, Any]) -> str:
    """The content, and each tool call as a line `name(argument=value)`; calls not in TRL's form as they are."""
    calls = message.get("tool_calls") or ()
    try:
        functions = [call["function"] for call in calls]
        lines = [f"{one['name']}({', '.join(f'{k}={v!r}' for k, v in one['arguments'].items())})" for one in functions]
    except (TypeError, KeyError, AttributeError):
        lines = [str(calls)]
    return "\n".join(filter(None, [str(joined(message.get("content")) or ""), *lines]))


def joined(content: Any) -> Any:
    """The content of a message: parts of text as one string, anything else as it is."""
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        return "".join(part["text"] for part in content)
    return content


def whole_repr(value: object) -> str:
    """`repr(value)` with a sum of all numbers of each array in it: NumPy and torch show a few of a long one.

    >>> import numpy as np
    >>> first, second = np.zeros(2000), np.zeros(2000)
    >>> second[1000] = 1.0
    >>> [repr({"a": first}) == repr({"a": second}), whole_repr({"a": first}) == whole_repr({"a": second})]
    [True, False]
    """
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {whole_repr(one)}' for key, one in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(whole_repr, value))}]"
    return digest_of_array(value) if is_array(value) else repr(value)


def is_array(value: object) -> bool:
    """Whether it is a NumPy array or scalar, or a tensor."""
    return hasattr(value, "tolist") and hasattr(value, "dtype")


def digest_of_array(array: Any) -> str:
    """Type, shape, element type and a sum of the elements of a NumPy array or scalar, or of a tensor on any device."""
    kind = f"{type(array).__name__}{[*array.shape]} {array.dtype}"
    return f"{kind}, sha256 {hashlib.sha256(repr(array.tolist()).encode()).hexdigest()[:16]}"


def from_here(path: object) -> str:
    """A path as it is typed in the present folder, if it is below that."""
    try:
        return str(path).removeprefix(f"{os.getcwd()}/")
    except OSError:  # which is gone
        return str(path)


def short_number(value: float | None) -> str:
    """A number in about five characters: 0.512, 12.3, 4.1k, 1e-06; `-` for None."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    if abs(value) < 1:
        return f"{value:.3f}"
    from huggingface_hub.utils.tqdm import tqdm  # which a configuration, whose values become JSON here, does without

    return str(tqdm.format_sizeof(value))


def percent(fraction: float | None) -> str:
    """0.0123 as `1.2%`; `-` for None."""
    return MISSING if fraction is None else f"{100 * fraction:.1f}%"


def bytes_text(size: int | None) -> str:
    """Bytes as `512 B`, `1.5 MB` or `24.7 GB`, in powers of 1000; `-` for None."""
    if size is None:
        return MISSING
    if size < 1000:
        return f"{size} B"
    power = min(int(math.log10(1.0006 * size)) // 3, 6)  # 999.6 kB is 1 MB, not 1e+03 kB
    return f"{size / 1000**power:.3g} {'BkMGTPE'[power]}B"


def duration(seconds: float | None) -> str:
    """Seconds as `4.2s`, `3m05s`, `2h07m` or `3d04h`; `-` for None."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    small, unit, letters = (86400, 3600, "dh") if round(seconds / 60) >= 24 * 60 else (3600, 60, "hm")
    if round(seconds) < 3600:
        small, unit, letters = 60, 1, "ms"
    whole = round(seconds / unit) * unit
    return f"{whole // small}{letters[0]}{whole % small // unit:02d}{letters[1]}"
