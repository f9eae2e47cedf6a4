"""1,100 random datasets: each gives rows with usable prompts, or an error that names the row without one."""

import bz2
import gc
import gzip
import json
import lzma
import os
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, IterableDataset
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_grpo.errors import DataError
from fused_grpo.trainer.common.formatting import message_text
from fused_grpo.trainer.data.datasets import _check_file, check_dataset, load_rows
from fused_grpo.trainer.data.prompt_sampler import prompt_sampler
from fused_grpo.trainer.data.prompts import encode_prompts

SAY = {"role": "user", "content": "hi"}
PROMPTS: list[Any] = [
    *("1+1=", "1+1=", "\0", "\ud800", "é" * 1000, " ", "{{ 7*7 }}", [SAY], [SAY], [SAY, {**SAY, "name": "x"}]),
    *(None, "", b"x", 0, 1.5, float("nan"), True, [], [[]], [None], ["hi"], {}, SAY, [{}], [{"role": "user"}], ("1",)),
    *([{"content": "hi"}], [{**SAY, "content": None}], [{**SAY, "content": [SAY]}], [{**SAY, "role": 1}], object()),
    *([{**SAY, "tool_calls": 1}], [{**SAY, "content": "", "tool_calls": [{}]}], range(3), iter("ab"), [SAY, "hi"]),
]
ROWS: list[Any] = [
    *(None, 1, "row", b"row", [], ["prompt"], {}, {1: 2}, {"question": "1"}, {"prompts": "1", "prompt": "2"}, set()),
    *({"prompt": "1", **more} for more in ({"completions": 1}, {2: 3}, {None: 3}, {"trainer_state": 0})),
]
CONTAINERS: list[Any] = [
    *(None, 1, "", "a/b", b"", {}, {"train": []}, [], (), set(), object(), int, iter([]), range(2), "ab"),
]
EXTENSIONS = (".jsonl", ".jsonl", ".jsonl", ".json", ".csv", ".parquet", ".txt", "")
CONTENTS: list[bytes] = [
    *(b"", b"\0", b"\xff\xfe\0", b"{", b"[]", b"{}", b"null", b"1", b'"x"', b"[1, 2]", b"prompt\n", b"prompt,a\nx\n"),
    *(b'{"prompt": "1"}\n{"prompt": 2}\n', b'{"prompt": "1"}\n{"other": 2}\n', b'{"prompt": "1"}\n{', b"PAR1PAR1"),
    *(b'{"prompt": ' + value + b"}" for value in (b"[" * 3000 + b"]" * 3000, b"1e999", b'"\\ud800"')),
    b"\x80\x04K\x01.",
]


def some_rows(rng: random.Random) -> list[Any]:
    """Rows of mostly one kind of prompt, some of them with something else."""
    usual, rows = rng.choice(PROMPTS[:10]), []
    for _ in range(rng.randint(1, 6)):
        prompt = usual if rng.random() < 0.8 else rng.choice(PROMPTS)
        row = {"prompt": prompt, "answer": rng.choice([1, 1, 1, "x", None])}
        rows.append(row if rng.random() < 0.9 else rng.choice(ROWS))
    return rows


def as_stream(rows: list[Any]) -> IterableDataset:
    return IterableDataset.from_generator(lambda: iter(rows))


def use(dataset: Any, tokenizer: Any) -> None:
    """What the trainer does with a dataset: checks it once, then draws a batch and encodes it."""
    sampler = prompt_sampler(check_dataset(dataset, name="train_dataset"), prompts_per_batch=3, seed=0, shuffle=False)
    for row in sampler.next_batch():
        assert message_text(row["prompt"])
        assert all(encode_prompts([row], tokenizer, row_numbers=[0]))


def test_rows_given_in_python(hostile, chat_tokenizer):
    def draw(rng: random.Random) -> None:
        rows = some_rows(rng)
        shape = rng.choice([list, list, list, tuple, iter, as_stream])
        use(rng.choice(CONTAINERS) if rng.random() < 0.1 else shape(rows), chat_tokenizer)

    assert min(hostile(draw, 900)) > 0.05


@pytest.mark.filterwarnings("ignore")  # datasets leaves files open where it raises
def test_files(hostile, chat_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def load(rng: random.Random) -> None:
        file = tmp_path / f"rows{rng.getrandbits(64)}{rng.choice(EXTENSIONS)}"
        sound = "".join(json.dumps({"prompt": str(n), "answer": n}) + "\n" for n in range(5)).encode()
        if rng.random() < 0.9:
            file.write_bytes(rng.choice([sound, damaged(rng, sound), rng.choice(CONTENTS)]))
        use(load_rows(str(file)), chat_tokenizer)

    assert min(hostile(load, 200)) > 0.02
    gc.collect()  # those files, while the warnings of it are still ignored


def damaged(rng: random.Random, content: bytes) -> bytes:
    """A file cut short, or with a few bytes changed."""
    changed = bytearray(content[: rng.randrange(len(content))] if rng.random() < 0.5 else content)
    for _ in range(rng.randint(0, 4)):
        changed[rng.randrange(len(changed) or 1) :][:1] = rng.randbytes(1)
    return bytes(changed)


ROW = '{"prompt": "1"}'
NULLS = [
    *(("null", 0), ("\n null", 0), (f"{ROW}\nnull\n", 1), (f"{ROW}\r\n\tnull\r\n{ROW}", 1), ("\ufeffnull", 0)),
    *((f"[null, {ROW}]", 0), (f"[\n{ROW},\n  null\n]", 1), (f"null {ROW}", 0), (f'{{"a": "\\"]"}}\n{ROW} null', 2)),
]


@pytest.mark.parametrize(("content", "row"), NULLS)
def test_a_row_of_null_does_not_take_the_process_down(tmp_path: Path, content, row):
    (tmp_path / "rows.jsonl").write_text(content)
    for source in (tmp_path / "rows.jsonl", tmp_path):
        with pytest.raises(DataError, match=f"row {row} of rows.jsonl is null, want an object"):
            load_rows(str(source))


@pytest.mark.parametrize("deep", ["[" * 20_000 + "]" * 20_000, '{"a":' * 20_000 + "1" + "}" * 20_000, "[\n" * 20_000])
def test_deep_nesting_does_not_take_the_process_down(tmp_path: Path, deep):
    for content in (f'{ROW}\n{{"prompt": "1", "x": {deep}}}\n', f"[{ROW}, {deep}]", deep):
        (tmp_path / "rows.json").write_text(content)
        with pytest.raises(DataError, match=r"row \d of rows\.json is nested deeper than"):
            load_rows(str(tmp_path / "rows.json"))


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".json.bz2", ".ndjson.xz", ".jsonl.zst", ".json.lz4", ".zip"])
def test_compressed_json_in_a_folder_does_not_take_the_process_down(tmp_path: Path, suffix):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / f"train{suffix}").write_bytes(gzip.compress(b"[" * 20_000))
    with pytest.raises(DataError, match=f"train{suffix} is compressed, so its JSON cannot .*; unpack it"):
        load_rows(str(tmp_path))


def test_compressed_tables_in_a_folder_are_read(tmp_path: Path):
    (tmp_path / "train.csv.gz").write_bytes(gzip.compress(b"prompt,answer\n1+1=,2\n"))
    assert load_rows(str(tmp_path))[0] == {"prompt": "1+1=", "answer": 2}


VALUES = st.recursive(
    st.one_of(st.none(), st.integers(), st.text('[]{}",\\ n\n', max_size=6)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("a]", max_size=2), inner, max_size=2),
    max_leaves=8,
)


@settings(deadline=None)
@given(rows=st.lists(VALUES, min_size=1, max_size=4), indent=st.sampled_from([None, 1]), listed=st.booleans())
def test_a_file_is_refused_by_its_null_rows_alone(tmp_path_factory, rows, indent, listed):
    path = tmp_path_factory.getbasetemp() / "any.json"
    lines = "\n".join(json.dumps(None if row is None else {"a": row}, indent=indent) for row in rows)
    path.write_text(json.dumps(rows, indent=indent) if listed else lines)
    with pytest.raises(ValueError, match="is null") if None in rows else nullcontext():
        _check_file(path)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.mkdir()])
def test_a_file_without_an_end_is_refused(tmp_path: Path, make):
    make(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match=r"rows\.jsonl is no regular file"):
        load_rows(str(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_a_packed_file_is_not_unpacked_unseen(tmp_path: Path, pack):
    (tmp_path / "rows.jsonl").write_bytes(pack(b"null"))
    with pytest.raises(DataError, match=r"is not JSON text; unpack it"):
        load_rows(str(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize("streaming", [True, False])
def test_a_row_that_raises_when_it_is_read_is_named(streaming, chat_tokenizer):
    def shout(row: dict[str, Any]) -> dict[str, Any]:
        return {"prompt": row["prompt"] + "!" if row["prompt"] != "2" else 1 / 0}

    dataset: Any = Dataset.from_list([{"prompt": str(n)} for n in range(4)])
    dataset = dataset.to_iterable_dataset().map(shout) if streaming else Shouting(map(str, range(4)), shout)
    with pytest.raises(DataError, match="got ZeroDivisionError when reading row 2 of train_dataset: division by zero"):
        use(dataset, chat_tokenizer)


class Shouting(list[str]):
    """Rows that are computed when they are read."""

    def __init__(self, rows: Any, make: Any) -> None:
        super().__init__(rows)
        self._make = make

    def __getitem__(self, index: Any) -> Any:
        return self._make({"prompt": super().__getitem__(index)})

    def __iter__(self) -> Any:
        return (self[index] for index in range(len(self)))
