"""Datasets: where rows come from, and the check that each has a prompt.

Three kinds are taken. A list of dicts. A `datasets.Dataset`, which stays on disk: its rows are read when they are
drawn. A stream, which is anything else that can be iterated over again and again (`datasets.IterableDataset`): its
rows are checked as they come. Every row has a "prompt", a string or a list of messages; its other columns go to the
reward functions.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Mapping
from glob import glob
from itertools import islice
from pathlib import Path
from typing import Any

from fused_grpo.errors import DataError
from fused_grpo.trainer.data.prompts import is_conversational, prompt_problem

Row = dict[str, Any]
RESERVED = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}
NULL_ROW = re.compile(rb"\A\s*null|^null\s*$", re.MULTILINE)
FILE_FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


def is_stream(dataset: Any) -> bool:
    """Whether rows can only be had in their order, not by their number."""
    return not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"))


class RowCheck:
    """Checks rows of one dataset, each against the first of them.

    Raises:
        DataError: a row that is no mapping, has no "prompt", an unusable one or one of another kind than the first
            row, has other columns than the first row, or a column named like the model's output.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.first: Row | None = None

    def __call__(self, number: int, entry: Any) -> Row:
        """The entry as a row; `number` is its place in the dataset."""
        if not isinstance(entry, Mapping):
            raise DataError(f"got a {type(entry).__name__} as row {number} of {self.name}, want a dict")
        row = dict(entry)
        if self.first is None:
            self._columns(number, row)
            self.first = row
        elif row.keys() != self.first.keys():
            raise DataError(
                f"got columns {list(row)} in row {number} of {self.name}, want those of row 0: {list(self.first)}"
            )
        self.prompt(number, row["prompt"])
        return row

    def prompt(self, number: int, prompt: Any) -> None:
        """The same for the prompt alone."""
        if problem := prompt_problem(prompt):
            raise DataError(f"got {repr(prompt)[:200]} as the prompt of row {number} of {self.name}, {problem}")
        if self.first is not None and isinstance(prompt, str) is is_conversational(self.first):
            kinds = ("a string", "a conversation")
            got, want = kinds if isinstance(prompt, str) else kinds[::-1]
            raise DataError(f"got {got} as the prompt of row {number} of {self.name}, want {want} as in row 0")

    def _columns(self, number: int, row: Row) -> None:
        if strange := [column for column in row if not isinstance(column, str)]:
            raise DataError(f"got {self.name} with a column {strange[0]!r}, want names: rewards get them as arguments")
        if reserved := RESERVED & row.keys():
            raise DataError(
                f"got {self.name} with a column {min(reserved)!r}, a name that reward functions know as the model's "
                "output; fix: dataset.rename_column(...)"
            )
        if "prompt" not in row:
            have = ", ".join(map(repr, row)) or "none"
            raise DataError(
                f"got {self.name} without a 'prompt' column in row {number} (columns: {have}); "
                "fix: dataset.rename_column(<yours>, 'prompt')"
            )


def check_dataset(dataset: Any, *, name: str, indexed: bool = False) -> Any:
    """The dataset as it is, with every prompt known to be usable (of a stream: the first one).

    `indexed` refuses a stream, as where all of the dataset is used at once: it may have no end.

    Reads the rows once and holds none of them; of a `datasets.Dataset`, whose rows all have the same columns, it reads
    the prompts alone.

    Raises:
        DataError: no dataset, an empty one, several splits, something that cannot be iterated over twice, a stream
            where it has to be indexed, or a row that `RowCheck` refuses.
    """
    want = "want a datasets.Dataset, a datasets.IterableDataset or a list of dicts with a 'prompt' column"
    if dataset is None:
        raise DataError(f"got no {name}, {want}")
    got = f"got a {type(dataset).__name__} as {name}, {want}"
    if isinstance(dataset, Mapping):
        raise DataError(f"{got}; fix: choose a split of it ({', '.join(map(repr, dataset)) or 'it has none'})")
    if isinstance(dataset, (str, Path)):
        raise DataError(f"{got}; fix: datasets.load_dataset(...)")
    try:
        entries = iter(dataset)
    except TypeError as error:
        raise DataError(got) from error
    if entries is dataset:
        raise DataError(f"{got}; fix: datasets.IterableDataset.from_generator(...), which can start again")
    if indexed and is_stream(dataset):
        raise DataError(
            f"got a {type(dataset).__name__} as {name}, want a dataset with a length and random access; "
            "fix: datasets.Dataset.from_list(list(itertools.islice(dataset, 200)))"
        )
    check = RowCheck(name)
    for entry in islice(read_rows(dataset, name=name), 1):
        if not isinstance(entry, Mapping):
            raise DataError(got)
        check(0, entry)
    if check.first is None:
        raise DataError(f"got an empty {name}, want at least one row with a 'prompt'")
    if _is_arrow(dataset):
        batches = dataset.select_columns(["prompt"]).iter(batch_size=1000)
        for number, prompt in enumerate(prompt for batch in batches for prompt in batch["prompt"]):
            check.prompt(number, prompt)
    elif not is_stream(dataset):
        for number, entry in islice(enumerate(read_rows(dataset, name=name)), 1, None):
            check(number, entry)
    return dataset


def read_rows(dataset: Any, *, name: str) -> Iterator[Any]:
    """The entries of a dataset, which is read, and mapped by the user's functions, while they are drawn.

    Raises:
        DataError: one that cannot be read.
    """
    number = 0
    try:
        for entry in dataset:
            yield entry
            number += 1
    except Exception as error:  # of the file format, of the file system, of the user's own code
        raise unreadable(number, name, error) from error


def unreadable(number: int, name: str, error: Exception) -> DataError:
    """The error for a row that raises another one when it is read."""
    return DataError(
        f"got {type(error).__name__} when reading row {number} of {name}: {error}; fix: the file, or the function that "
        "makes its rows"
    )


def load_rows(source: str, *, split: str = "train", config: str | None = None, streaming: bool = False) -> Any:
    """The dataset that a string names, a `datasets.Dataset` or (streaming) a `datasets.IterableDataset`.

    Args:
        source: a file or a glob pattern of files (.jsonl, .json, .csv, .parquet), all of which are read; a directory
            of `save_to_disk`; a directory of such files, or a dataset's hub id.
        split: which split, where there are several: in a directory and on the hub.
        config: the configuration of a hub dataset that has several ("main" of "openai/gsm8k").
        streaming: read rows as they are needed, and download no more than that.

    Raises:
        DataError: a source that does not exist, cannot be read or has no such split.
    """
    try:
        return _load(Path(source), source, split=split, config=config, streaming=streaming)
    except Exception as error:  # of the hub, of the network, of the file format, of the file system
        raise DataError(
            f"got dataset {source!r} (split {split!r}), which cannot be loaded: {error.__cause__ or error}"
        ) from error


def _load(path: Path, source: str, *, split: str, config: str | None, streaming: bool) -> Any:
    from datasets import load_dataset, load_from_disk

    if path.suffix in FILE_FORMATS:
        files = [path] if path.is_file() else [Path(name) for name in glob(source)]
        if not files:
            raise FileNotFoundError("no such file")
        for file in files if FILE_FORMATS[path.suffix] == "json" else ():
            _refuse_null_rows(file)
        return load_dataset(FILE_FORMATS[path.suffix], data_files=source, split="train", streaming=streaming)
    if (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file():
        saved = load_from_disk(source)
        if isinstance(saved, dict):
            if split not in saved:
                raise ValueError(f"it has the splits {sorted(saved)}")
            saved = saved[split]
        return saved.to_iterable_dataset() if streaming else saved
    return load_dataset(source, config, split=split, streaming=streaming)


def _refuse_null_rows(path: Path) -> None:
    """Arrow's reader does not raise at a row that is null: it takes the process down (apache/arrow issue 47409)."""
    if not path.stat().st_size:
        raise ValueError("the file is empty")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if found := NULL_ROW.search(content):
            row = content[: found.start()].count(b"\n")
            raise ValueError(f"row {row} of {path.name} is null, want an object")


def _is_arrow(dataset: Any) -> bool:
    """Whether it is a `datasets.Dataset` whose rows are those of its table, not what a transform makes of them."""
    from datasets import Dataset

    return isinstance(dataset, Dataset) and dataset.format["type"] is None
