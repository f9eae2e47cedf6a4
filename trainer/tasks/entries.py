"""Entries of a generator: as text that gives the same entry again, with a number for their difficulty.

An entry of reasoning-gym is {"question", "answer", "metadata"}. Its metadata are Python values of any form: tuples,
sets, numbers as keys. Rows of a dataset hold text and numbers, so an entry travels as JSON in which each form that JSON
does not have is an object with one key that begins with "!".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, cast

from fused_grpo.errors import DataError, quoted
from fused_grpo.trainer.rewards.builtin_rewards import NUMBER, final_answer, sole_number

_COLLECTIONS: dict[str, type[Any]] = {"!tuple": tuple, "!set": set, "!frozenset": frozenset}
_FORMS: dict[str, type[Any]] = {**_COLLECTIONS, "!dict": dict}


def as_text(entry: Mapping[str, Any]) -> str:
    """An entry as JSON; DataError for a value that has no such form."""
    return json.dumps(_plain(entry), ensure_ascii=False)


def from_text(text: str) -> dict[str, Any]:
    """The inverse of `as_text`."""
    return cast(dict[str, Any], json.loads(text, object_hook=_restored))


def _plain(value: Any) -> Any:
    match value:
        case None | bool() | str():
            return value if not isinstance(value, str) else str(value)
        case Integral():  # NumPy's too
            return int(value)
        case Real():
            return float(value)
        case list():
            return [_plain(entry) for entry in value]
        case Mapping():
            if all(isinstance(key, str) and not key.startswith("!") for key in value):
                return {str(key): _plain(entry) for key, entry in value.items()}
            return {"!dict": [[_plain(key), _plain(entry)] for key, entry in value.items()]}
    for name, kind in _COLLECTIONS.items():
        if isinstance(value, kind):
            return {name: [_plain(entry) for entry in value]}
    if callable(getattr(value, "tolist", None)):
        return _plain(value.tolist())
    raise DataError(f"got {quoted(value)}, a {type(value).__name__}, in an entry, want plain values")


def _restored(value: dict[str, Any]) -> Any:
    """What an object stands for; those in it are restored before it."""
    name, content = next(iter(value.items()), ("", None))
    return _FORMS[name](content) if name in _FORMS else value


def difficulties(entries: Sequence[Mapping[str, Any]]) -> list[float] | None:
    """A number from 0 (easiest) to 1 for each entry: the mean over what varies of where its value lies in its range.

    What makes an entry difficult, the generator lists in metadata["difficulty"]; the entry's own value of it is in the
    metadata under the same name. None where no such value is a number that varies.

    >>> entry = {"metadata": {"num_terms": 3, "difficulty": {"num_terms": (2, 6)}}}
    >>> other = {"metadata": {"num_terms": 5, "difficulty": {"num_terms": (2, 6)}}}
    >>> difficulties([entry, other, other])
    [0.0, 1.0, 1.0]
    """
    columns = list[list[float]]()
    for name in dict.fromkeys(name for entry in entries for name in _listed(entry)):
        values = [_own_value(entry, name) for entry in entries]
        low, high = min(values), max(values)
        if all(map(math.isfinite, values)) and low < high:
            columns.append([(value - low) / (high - low) for value in values])
    return [sum(row) / len(row) for row in zip(*columns, strict=True)] or None


def _listed(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    listed = entry["metadata"].get("difficulty")
    return listed if isinstance(listed, Mapping) else {}


def _own_value(entry: Mapping[str, Any], name: str) -> float:
    """The entry's value of that name, or its number of that name; NaN where it is no number."""
    names = (name, f"num_{name}", f"n_{name}")
    for value in (*map(entry["metadata"].get, names), _listed(entry).get(name)):
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return math.nan


def last_answer(text: str, correct: str) -> str:
    """The answer in a completion: what stands in its last <answer> tags; without them, its end.

    Without tags, that is the content of the last `\\boxed{}`, what follows the last `####`, or the whole text after
    the thoughts (`</think>`); of it the last number, if the correct answer is a number.

    >>> last_answer("<think>30 + 52?</think> It is <answer> 82 </answer>.", "82")
    '82'
    >>> last_answer("37 + 45 = 82.", "82"), last_answer(" blue ", "blue")
    ('82', 'blue')
    """
    if (tagged := tagged_answer(text)) is not None:
        return tagged
    answer = final_answer(text.rpartition("</think>")[2])
    numbers = NUMBER.findall(answer.replace("−", "-")) if sole_number(correct) is not None else ()
    return numbers[-1] if numbers else answer


def tagged_answer(text: str, correct: str = "") -> str | None:
    """What stands in the last <answer> tags, as reasoning-gym's `extract_answer`; None without any.

    >>> tagged_answer("<answer>1</answer> or <answer>2</answer>"), tagged_answer("2")
    ('2', None)
    """
    before, closed, _ = text.rpartition("</answer>")
    _, opened, answer = before.rpartition("<answer>")
    return answer.strip() if closed and opened else None
