"""Datasets: load them by name, check that every row has a prompt, and fit them to the trainer.

A dataset is one of three things: a list of dicts; a `datasets.Dataset`, which stays on disk, and whose rows are read
when they are drawn; or a stream, which is any other iterable that can be iterated again (`datasets.IterableDataset`),
and whose rows are checked when they are drawn. Every row has a "prompt", a string or a list of messages. Reward
functions get the other columns. What fits one to the trainer leaves a `datasets.Dataset` one, and a stream a stream.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from glob import escape, glob
from itertools import islice
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset as TorchIterableDataset

from fused_grpo.errors import DataError, DatasetTypeError
from fused_grpo.trainer.common.formatting import joined
from fused_grpo.trainer.common.warnings import warn_once

Row = dict[str, Any]
RESERVED = {"prompts", "completions", "trainer_state", "log_extra", "log_metric"}
NOT_PASSED = {"prompt", "completion", "completion_ids"}  # columns that reward functions do not get, as in TRL
# Of JSON: a bracket, null, or a byte that no JSON has, after strings (one that is not closed ends with its line) and
# all else.
_TOKENS = re.compile(rb'(?:[^]"[{}n\0]++|n(?!ull)|"(?:[^"\\\n]++|\\.)*+"?)*+([][{}\0]|null)')
MANY_ROWS = 10_000  # of a stream to be evaluated, behind which it may have no end
_DEEPEST = 200  # levels; Arrow's schemas end before 300
IMAGES = ("image", "images")  # TRL's names
FILE_FORMATS = {".jsonl": "json", ".json": "json", ".ndjson": "json", ".csv": "csv", ".parquet": "parquet"}
# pandas takes None, NA and n/a for no value: as an answer they are text, which only an empty field is not.
_CSV_OPTIONS: dict[str, Any] = {"keep_default_na": False, "na_values": [""]}
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip")
_SURROGATE = re.compile("[\ud800-\udfff]")  # alone, as JSON may hold one; no tokenizer takes it


def is_stream(dataset: Any) -> bool:
    """True for a dataset without random access."""
    # torch's has a `__getitem__` that raises, and may have a length.
    has_access = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return not has_access or isinstance(dataset, TorchIterableDataset)


def length(dataset: Any) -> int | None:
    """Its number of rows; None where that is not known, or 0 of a stream that has some."""
    with suppress(TypeError, NotImplementedError):
        return len(dataset) or None
    return None


def as_row(entry: Mapping[str, Any]) -> Row:
    """A row as everything after the dataset gets it: a dict, whose prompt has no keys that Arrow made."""
    return {**entry, "prompt": _without_none(entry["prompt"])} if isinstance(entry.get("prompt"), list) else {**entry}


class RowCheck:
    """Checks the rows of one dataset, each against the first one.

    DataError for a row that is not a mapping, has no usable "prompt", has another kind of prompt or other columns than
    the first row, or has a column with a name of `RESERVED` or `IMAGES`.
    """

    def __init__(self, name: str) -> None:
        self.name, self.first, self.number = name, Row(), 0

    def __call__(self, number: int, entry: Any) -> Row:
        """Row `number` of the dataset as a dict."""
        if not isinstance(entry, Mapping):
            raise DataError(f"got a {type(entry).__name__} as row {number} of {self.name}, want a dict")
        row = as_row(entry)
        if not self.first:
            check_columns(row, name=self.name)
            if "prompt" not in row:
                raise DataError(
                    f"got {self.name} without a 'prompt' column in row {number} (columns: "
                    f"{', '.join(map(repr, row)) or 'none'}); fix: dataset.rename_column(<yours>, 'prompt')"
                )
            self.first, self.number = row, number
        elif row.keys() != self.first.keys():
            raise DataError(
                f"got columns {list(row)} in row {number} of {self.name}, want those of row {self.number}: "
                f"{list(self.first)}"
            )
        self.prompt(number, row["prompt"])
        return row

    def prompt(self, number: int, prompt: Any) -> None:
        if problem := prompt_problem(clean_prompt(prompt)):
            raise DataError(f"got {repr(prompt)[:200]} as the prompt of row {number} of {self.name}, {problem}")
        if isinstance(prompt, str) is is_conversational(self.first):
            kinds = ("a string", "a conversation")
            got, want = kinds if isinstance(prompt, str) else kinds[::-1]
            raise DataError(
                f"got {got} as the prompt of row {number} of {self.name}, want {want} as in row {self.number}"
            )


def check_dataset(dataset: Any, *, name: str) -> Any:
    """The dataset itself, after a check of all its prompts (of a stream: of the first row); `name` is for errors.

    Reads the rows once and keeps none; of a `datasets.Dataset` it reads only the prompts after the first row.
    DatasetTypeError for no dataset, several splits, or an iterator that cannot start again; DataError for none, an
    empty one, or a row that `RowCheck` refuses.
    """
    kinds = "a `Dataset` or `IterableDataset` of `datasets`, or a list of dicts, with a 'prompt' column"
    if dataset is None:
        raise DataError(f"got no {name}: `{name}` is required, {kinds}")
    got = f"got a {type(dataset).__name__} as {name}: `{name}` must be {kinds}"
    if isinstance(dataset, Mapping):
        fix = f"choose a split of it ({', '.join(map(repr, dataset)) or 'it has none'})"
        fix = "datasets.Dataset.from_dict(...), with a list for each column" if "prompt" in dataset else fix
        raise DatasetTypeError(f"{got}; fix: {fix}")
    if isinstance(dataset, (str, Path)):
        raise DatasetTypeError(f"{got}; fix: datasets.load_dataset(...)")
    if not isinstance(dataset, Iterable) and is_stream(dataset):
        raise DatasetTypeError(got)
    ends = isinstance(dataset, Iterator)
    with suppress(Exception):  # which is raised again when it is read
        ends = ends or (is_stream(dataset) and iter(dataset) is iter(dataset))
    if ends:
        raise DatasetTypeError(f"{got}; fix: datasets.IterableDataset.from_generator(...), which can start again")
    # Before they are decoded. A transform may rename the other columns.
    names = getattr(dataset, "column_names", None) or ()
    check_columns([column for column in IMAGES if column in names], name=name)
    check, rows = RowCheck(name), enumerate(read_rows(dataset, name=name))
    first = next(rows, None)
    if first is None:
        raise DataError(f"got an empty {name}, want at least one row with a 'prompt'")
    if not isinstance(first[1], Mapping):
        fix = "datasets.Dataset.from_pandas(...)" if hasattr(dataset, "iterrows") else "dataset.with_format(None)"
        raise DatasetTypeError(f"{got}; fix: rows that are dicts, not {type(first[1]).__name__}, as of {fix}")
    check(*first)
    if is_plain_arrow(dataset):
        batches = dataset.select_columns(["prompt"]).iter(batch_size=1000)
        for number, prompt in enumerate(prompt for batch in batches for prompt in batch["prompt"]):
            check.prompt(number, prompt)
    elif not is_stream(dataset):
        for number, row in rows:
            check(number, row)
    return dataset


def check_columns(columns: Iterable[Any], *, name: str) -> None:
    """DataError for a column that reward functions cannot get, or that TRL takes images from."""
    for column in columns:
        got = f"got {name} with a column {column!r}"
        if not isinstance(column, str):
            raise DataError(f"{got}, want strings: rewards get keyword arguments")
        if column in RESERVED:
            raise DataError(f"{got}, which is another argument of reward functions; fix: dataset.rename_column(...)")
        if column in IMAGES:
            raise DataError(
                f"{got}, want text alone: the model would not see the images; fix: dataset.remove_columns({column!r}), "
                "or rename_column if only reward functions read it"
            )


def eval_sets(given: Any, *, check: bool = False) -> dict[str, Any]:
    """The eval sets of an argument `eval_dataset` by name; a single one is called "". `check`: by `check_dataset`.

    DataError for a mapping without sets, a name that is no string, or what `check_dataset` refuses.
    """
    if isinstance(given, Mapping):
        if not given or not all(isinstance(name, str) and name for name in given):
            raise DataError(f"got eval_dataset with the names {list(given)}, want a non-empty string for each set")
        sets = dict(given)
    else:
        sets = {} if given is None else {"": given}
    for name, dataset in sets.items() if check else ():
        check_dataset(dataset, name=set_name(name))
    return sets


def set_name(name: str) -> str:
    """What errors call the eval set of that name."""
    return f"eval_dataset[{name!r}]" if name else "eval_dataset"


def chosen_eval_sets(chosen: Any, given: Any) -> dict[str, Any]:
    """The sets of one evaluation by name: those chosen (sets, or the name of one of the trainer's), or all `given`.

    DataError where there is none, or none of that name, or for what `check_dataset` refuses.
    """
    sets = eval_sets(given)
    if isinstance(chosen, str):
        if chosen not in sets:
            raise DataError(f"got eval_dataset={chosen!r}, want the name of an eval set: {list(filter(None, sets))}")
        return {"": sets[chosen]}
    if chosen is not None:
        sets = eval_sets(chosen, check=True)
    if not sets:
        raise DataError("got no eval_dataset, want one to evaluate; fix: pass it to GRPOTrainer(...) or evaluate(...)")
    return sets


def all_rows(dataset: Any, *, name: str) -> list[Row]:
    """Every row of a dataset, checked, of a stream to its end; DataError where there is none or one is of no use."""
    check, rows = RowCheck(name), list[Row]()
    for number, entry in enumerate(read_rows(dataset, name=name)):
        rows.append(check(number, entry))
        if number == MANY_ROWS and is_stream(dataset):
            warn_once(
                f"{name} is a stream with more than {MANY_ROWS:,} rows, read to its end and sampled; fix: if it has "
                "none, or for fewer, .take(500)"
            )
    if not rows:
        raise DataError(f"got an empty {name}, want at least one row with a 'prompt'")
    return rows


def read_rows(dataset: Any, *, name: str) -> Iterator[Any]:
    """Iterate over a dataset; DataError with the number of a row that cannot be read."""
    number = 0
    try:
        # By its length, where it has one: a map-style dataset may have a row for every index.
        for entry in dataset if is_stream(dataset) else islice(dataset, len(dataset)):
            yield entry
            number += 1
        if not is_stream(dataset) and number < len(dataset):  # what `__getitem__` raises may also end an iteration
            raise IndexError(f"the last of {len(dataset)} rows")
    except Exception as error:  # of the file, or of the user's function in `map`
        raise unreadable(number, name, error) from error


def unreadable(number: int, name: str, error: Exception) -> DataError:
    return DataError(
        f"got {type(error).__name__} when reading row {number} of {name}: {error}; fix: the file, or the function that "
        "makes its rows"
    )


def load_rows(source: str, *, split: str = "train", config: str | None = None) -> Any:
    """The `datasets.Dataset` that a string names, or a DataError.

    Args:
        source: a file or a glob pattern of files (.jsonl, .json, .csv, .parquet), which together are one dataset; a
            directory of `save_to_disk`; a directory of such files; or a dataset's hub id.
        split, config: of a directory or a hub dataset; the configuration where it has several ("main").
    """
    from datasets import load_dataset, load_from_disk

    path = Path(source)
    try:
        if file_format := FILE_FORMATS.get(path.suffix):
            files = [source] if path.is_file() else sorted(glob(source, recursive=True))
            if not files:
                raise FileNotFoundError("no such file")
            for name in files:
                _check_file(Path(name))
            # `datasets` takes a name for a pattern: that of rows[1].jsonl would be rows1.jsonl.
            options = _CSV_OPTIONS if file_format == "csv" else {}
            return load_dataset(file_format, data_files=list(map(escape, files)), split="train", **options)
        if (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file():
            saved = load_from_disk(source)
            if isinstance(saved, dict) and split not in saved:
                raise ValueError(f"it has the splits {sorted(saved)}")
            return saved[split] if isinstance(saved, dict) else saved
        for file in path.rglob("*"):
            if file.suffix in _PACKED and FILE_FORMATS.get(file.with_suffix("").suffix, "json") == "json":
                raise ValueError(f"{file.name} is compressed, so its JSON cannot be looked at first; unpack it")
            if file.suffix in FILE_FORMATS and not file.is_dir():
                _check_file(file)
        formats = {FILE_FORMATS.get(file.suffix) for file in path.rglob("*")} - {None}
        return load_dataset(source, config, split=split, **(_CSV_OPTIONS if formats == {"csv"} else {}))
    except Exception as error:  # of the hub, the network, the file system or the file format
        got = f"got dataset {source!r} (split {split!r})"
        raise DataError(f"{got}, which cannot be loaded: {error.__cause__ or error}") from error


def _check_file(path: Path) -> None:
    """Raise ValueError for a file that would hang or crash its native reader, and with it the process.

    Arrow crashes at a row that is null (apache/arrow issue 47409), in lines or in a list, and at deep nesting. It would
    unpack a file that is compressed, whatever its name says: it is not looked into here.
    """
    if not path.is_file():
        raise ValueError(f"{path.name} is no regular file")
    if not path.stat().st_size:
        raise ValueError("the file is empty")
    if FILE_FORMATS[path.suffix] != "json":
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start = content[:1000].removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
        if start not in b'{["-0123456789tfn':
            raise ValueError(f"{path.name} is not JSON text; unpack it, if it is compressed")
        depth, row, rows_at = 0, 0, start == b"["
        for match in _TOKENS.finditer(content):
            token = match[1]
            if token == b"null" and depth == rows_at:
                raise ValueError(f"row {row} of {path.name} is null, want an object")
            if token == b"\0":
                raise ValueError(f"{path.name} is not JSON text: it has a zero byte")
            depth = max(0, depth + (token in (b"[", b"{")) - (token in (b"]", b"}")))
            row += token in (b"]", b"}") and depth == rows_at
            if depth > _DEEPEST:
                raise ValueError(f"row {row} of {path.name} is nested deeper than {_DEEPEST} levels")


def is_plain_arrow(dataset: Any) -> bool:
    """True for a `datasets.Dataset` without a transform: its rows are those of its table."""
    from datasets import Dataset

    return isinstance(dataset, Dataset) and dataset.format["type"] is None


def column_names(dataset: Any) -> list[str]:
    """Names of the columns, those of the first row where the dataset has no names; none where there is no row."""
    names = getattr(dataset, "column_names", None)
    if names is None and (isinstance(dataset, Iterable) or not is_stream(dataset)):
        names = next((list(row) for row in first_rows(dataset, 1) if isinstance(row, Mapping)), None)
    return list(names or [])


def renamed(dataset: Any, names: Mapping[str, str]) -> Any:
    """The dataset with columns renamed, `names` being the present name by the new one, which replaces a column."""
    moved = {old: new for new, old in names.items() if old != new}
    if not moved:
        return dataset
    replaced = [name for name in column_names(dataset) if name in moved.values() and name not in moved]
    if hasattr(dataset, "rename_columns"):
        return (dataset.remove_columns(replaced) if replaced else dataset).rename_columns(moved)
    rows = read_rows(dataset, name="the dataset")
    return [{moved.get(name, name): value for name, value in row.items() if name not in replaced} for row in rows]


def as_conversations(dataset: Any, system: str | None = None) -> Any:
    """The dataset with prompts of text as conversations: the message `system`, if there is one, and the user's."""

    def as_conversation(row: Any) -> Any:
        if not isinstance(row, Mapping) or not isinstance(row.get("prompt"), str):
            return row
        before = [{"role": "system", "content": system}] if system else []
        return {**row, "prompt": [*before, {"role": "user", "content": row["prompt"]}]}

    return mapped(dataset, as_conversation)


def mapped(dataset: Any, function: Callable[[Any], Any]) -> Any:
    """The dataset with a function of each row; what is no dataset as it is: `check_dataset` refuses it."""
    if isinstance(dataset, Mapping | str | Iterator):
        return dataset
    if hasattr(dataset, "map"):
        return dataset.map(function)
    if not is_stream(dataset):
        return [function(row) for row in read_rows(dataset, name="the dataset")]
    return _MappedStream(dataset, function) if isinstance(dataset, Iterable) else dataset


class _MappedStream:
    def __init__(self, rows: Iterable[Any], function: Callable[[Any], Any]) -> None:
        self._rows, self._function = rows, function

    def __iter__(self) -> Iterator[Any]:
        return map(self._function, self._rows)


def first_rows(dataset: Any, count: int) -> Any:
    """The first `count` rows, or all where there are fewer."""
    if not hasattr(dataset, "take"):
        return list(islice(read_rows(dataset, name="the dataset"), count))
    return dataset.take(min(count, len(dataset)) if hasattr(dataset, "__len__") else count)


def is_conversational(row: Mapping[str, Any]) -> bool:
    """Whether the prompt is a list of messages: else it is a string."""
    return not isinstance(row["prompt"], str)


def clean_prompt(prompt: Any) -> Any:
    """A conversation as chat templates expect it, and any other value as it is: contents of parts are one string.

    Arrow gives all messages of a column the same keys: those that are None were not there.
    """
    if not isinstance(prompt, list):
        return prompt
    messages = _without_none(prompt)
    for message in messages:
        if isinstance(message, dict) and "content" in message:
            message["content"] = joined(message["content"])
    return messages


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    return list(map(_without_none, value)) if isinstance(value, list) else value


def prompt_problem(prompt: Any) -> str | None:
    """Why this value, cleaned, cannot be a prompt; None if it can."""
    if not isinstance(prompt, str | list) or not prompt:
        return "want a non-empty string or a non-empty list of {'role': ..., 'content': ...} messages"
    for message in prompt if isinstance(prompt, list) else ():
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return "want messages of the form {'role': ..., 'content': ...}"
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            return (
                "want a string, or parts {'type': 'text', 'text': ...}, as the content of every message: text alone; "
                "fix: leave out rows, or parts, with anything else"
            )
    texts = [prompt] if isinstance(prompt, str) else [message.get("content") or "" for message in prompt]
    if any(_SURROGATE.search(str(text)) for text in texts):
        return "want text: it holds half of a surrogate pair, which UTF-8 cannot encode"
    return None
