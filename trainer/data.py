"""Prompts: checked once, then drawn in a deterministic order.

A dataset is a `datasets.Dataset` or a list of dicts with a "prompt" column of strings; its other columns go to the
reward functions. The order of a pass depends on the seed and the number of the pass alone, so step k sees the same
prompts in every run and on every number of processes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fused_grpo.errors import DataError

Row = dict[str, Any]
RESERVED = {"prompts", "completions", "completion_ids"}


def check_rows(dataset: Any, *, name: str) -> list[Row]:
    """The rows of a dataset, each with a usable prompt.

    Raises:
        DataError: no dataset, an empty one, no "prompt" column, a prompt that is not a non-empty string, rows with
            different columns, or a column named like the model's output.
    """
    if dataset is None:
        raise DataError(f"got no {name}, want a datasets.Dataset or a list of dicts with a 'prompt' column")
    entries = list(dataset)
    if not entries:
        raise DataError(f"got an empty {name}, want at least one row with a 'prompt'")
    if not all(isinstance(entry, Mapping) for entry in entries):
        hint = "; fix: choose a split of it" if isinstance(dataset, Mapping) else ""
        raise DataError(f"got a {type(dataset).__name__} as {name}, want a datasets.Dataset or a list of dicts{hint}")
    rows = [dict(entry) for entry in entries]
    for number, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            raise DataError(
                f"got columns {sorted(row)} in row {number} of {name}, want those of row 0: {sorted(rows[0])}"
            )
        if reserved := RESERVED & row.keys():
            raise DataError(
                f"got {name} with a column {min(reserved)!r}, a name that reward functions know as the model's output; "
                "fix: dataset.rename_column(...)"
            )
        if "prompt" not in row:
            have = ", ".join(map(repr, row)) or "none"
            raise DataError(
                f"got {name} without a 'prompt' column in row {number} (columns: {have}); "
                "fix: dataset.rename_column(<yours>, 'prompt')"
            )
        if not isinstance(row["prompt"], str) or not row["prompt"]:
            raise DataError(
                f"got {row['prompt']!r} as the prompt of row {number} of {name}, want a non-empty string "
                "(for a conversation: tokenizer.apply_chat_template(..., tokenize=False))"
            )
    return rows


def prompt_batches(
    rows: Sequence[Row], size: int, *, seed: int, shuffle: bool, rank: int = 0, world_size: int = 1
) -> Iterator[list[Row]]:
    """This rank's `size` rows of every batch of `size * world_size`, for ever, one pass right after another."""

    def passes() -> Iterator[Row]:
        number = 0
        while True:
            order = list(range(len(rows)))
            if shuffle:
                random.Random(f"{seed}/{number}").shuffle(order)
            yield from (rows[index] for index in order)
            number += 1

    stream = passes()
    while True:
        batch = [next(stream) for _ in range(size * world_size)]
        yield batch[rank * size : (rank + 1) * size]


def load_rows(source: str, *, split: str) -> list[Row]:
    """The rows of a local file (.jsonl, .json, .csv, .parquet) or of a hub dataset's split.

    Raises:
        DataError: a file that does not exist or cannot be read, or a dataset that cannot be had.
    """
    from datasets import load_dataset

    formats = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
    suffix = Path(source).suffix
    try:
        if suffix in formats:
            if not Path(source).is_file():
                raise FileNotFoundError("no such file")
            return list(load_dataset(formats[suffix], data_files=source, split="train"))
        return list(load_dataset(source, split=split))
    except Exception as error:
        raise DataError(f"got dataset {source!r}, which cannot be loaded: {error}") from error
