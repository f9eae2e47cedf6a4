"""Fit a dataset to the trainer: rename its columns, make its prompts conversations, take its first rows.

That is what the options `--prompt-column`, `--answer-column`, `--system-prompt` and `--limit` of the command line do. A
dataset is what datasets.py describes; a `datasets.Dataset` stays one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from fused_grpo.errors import DataError
from fused_grpo.trainer.data.datasets import Row, is_stream, read_rows


def columns_of(dataset: Any) -> list[str]:
    """Names of the columns, of the first row where the dataset does not know them; none where there is no row."""
    names = getattr(dataset, "column_names", None)
    if names is None and (isinstance(dataset, Iterable) or not is_stream(dataset)):
        names = next((list(row) for row in first_rows(dataset, 1) if isinstance(row, Mapping)), None)
    return list(names or [])


def renamed(dataset: Any, names: Mapping[str, str]) -> Any:
    """The dataset with columns renamed; one that has a new name already is left out.

    Args:
        dataset: its rows.
        names: the present name by the new one.

    Raises:
        DataError: a column that the dataset does not have.
    """
    have = columns_of(dataset)
    if missing := sorted(set(names.values()) - set(have)):
        raise DataError(f"got no column {missing[0]!r} in data with {', '.join(map(repr, have))}")
    moved = {old: new for new, old in names.items() if old != new}
    replaced = [name for name in moved.values() if name in have and name not in moved]
    if not moved:
        return dataset
    rows = read_rows(dataset, name="the dataset")
    if hasattr(dataset, "rename_columns"):
        return (dataset.remove_columns(replaced) if replaced else dataset).rename_columns(moved)
    return [{moved.get(name, name): value for name, value in row.items() if name not in replaced} for row in rows]


def with_system_prompt(dataset: Any, text: str) -> Any:
    """The dataset with prompts of text as conversations: the system message `text`, if not empty, and the prompt."""

    def as_conversation(row: Mapping[str, Any]) -> Row:
        if not isinstance(row["prompt"], str):
            return dict(row)
        system = [{"role": "system", "content": text}] if text else []
        return {**row, "prompt": [*system, {"role": "user", "content": row["prompt"]}]}

    if hasattr(dataset, "map"):
        return dataset.map(as_conversation)
    return [as_conversation(row) for row in read_rows(dataset, name="the dataset")]


def first_rows(dataset: Any, count: int) -> Any:
    """The first `count` rows, or all where there are fewer."""
    if not hasattr(dataset, "take"):
        return list(islice(read_rows(dataset, name="the dataset"), count))
    return dataset.take(min(count, len(dataset)) if hasattr(dataset, "__len__") else count)
