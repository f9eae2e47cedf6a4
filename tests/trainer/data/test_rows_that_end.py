"""Containers that are no dataset, one that ends, or does not begin, with an error, and torch's own streams."""

from itertools import count
from typing import Any

import datasets
import pytest
from datasets import Dataset
from pandas import DataFrame
from torch.utils.data import ChainDataset, IterableDataset

from fused_grpo.errors import DataError, InputError
from fused_grpo.trainer.collect import start_checks
from fused_grpo.trainer.data.datasets import MANY_ROWS, all_rows, check_dataset

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"}]


class Ends:
    """Two of five rows, and then an error, which may be one that also ends an iteration."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __len__(self) -> int:
        return 5

    def __getitem__(self, number: int) -> dict[str, str]:
        if number >= len(ROWS):
            raise self.error
        return ROWS[number]


class Sized(IterableDataset):
    """Of torch, which has `__getitem__` for all of its datasets."""

    def __len__(self) -> int:
        return len(ROWS)

    def __iter__(self) -> Any:
        return iter(ROWS)


class Once:
    """Each reader goes on where the last one was."""

    def __init__(self) -> None:
        self.rows = iter(ROWS)

    def __iter__(self) -> Any:
        return self.rows


class NeverBegins:
    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __iter__(self) -> Any:
        raise self.error


@pytest.mark.parametrize("error", [IndexError, StopIteration, KeyError, OSError, TypeError, ValueError])
def test_a_row_that_cannot_be_read_is_named_whatever_it_raises(error):
    name = "IndexError" if error is StopIteration else error.__name__  # either says that the rows end
    with pytest.raises(DataError, match=f"got {name} when reading row 2 of train_dataset"):
        check_dataset(Ends(error), name="train_dataset")
    with pytest.raises(DataError, match=f"got {error.__name__} when reading row 0 of train_dataset"):
        check_dataset(NeverBegins(error), name="train_dataset")


@pytest.mark.parametrize(
    ("dataset", "fix"),
    [
        (DataFrame(ROWS), r"rows that are dicts, not str, as of datasets.Dataset.from_pandas\(...\)"),
        ({"prompt": ["1+1="], "answer": ["2"]}, r"datasets.Dataset.from_dict\(...\), with a list for each column"),
        (ROWS[0], r"datasets.Dataset.from_dict\(...\), with a list for each column"),
        ({"train": ROWS}, r"choose a split of it \('train'\)"),
    ],
)
def test_the_fix_for_columns_is_not_that_for_splits(dataset, fix):
    with pytest.raises(DataError, match=f"fix: {fix}"):
        check_dataset(dataset, name="train_dataset")


def test_a_stream_of_torch_with_a_length_is_read_as_one(make_trainer):
    seen: list[str] = []
    trainer = make_trainer(
        lambda prompts, **_: seen.append(prompts[0]) or [0.0, 1.0, 0.0, 1.0],
        dataset=Sized(),
        shuffle_dataset=False,
        max_steps=-1,
        num_train_epochs=1.5,
    )
    assert (trainer.train().steps, seen) == (3, ["1+1=", "1+2=", "1+1="])


def test_a_length_of_0_of_a_stream_with_rows_is_unknown(make_trainer, monkeypatch):
    monkeypatch.setattr(Sized, "__len__", lambda self: 0)
    assert make_trainer(dataset=Sized(), shuffle_dataset=False).train().steps == 3


def test_a_chain_of_streams_has_no_length(make_trainer):
    chain = ChainDataset([Sized(), Dataset.from_list(ROWS).to_iterable_dataset()])
    assert make_trainer(dataset=chain, shuffle_dataset=False).train().steps == 3
    with pytest.raises(InputError, match="got a train_dataset without a length and max_steps=-1"):
        make_trainer(dataset=chain, shuffle_dataset=False, max_steps=-1)


def test_an_iterable_whose_readers_share_a_place_is_refused():
    with pytest.raises(DataError, match=r"got a Once as train_dataset.*which can start again"):
        check_dataset(Once(), name="train_dataset")


def test_a_stream_without_an_order_is_refused_before_a_model_is_loaded(make_trainer, monkeypatch):
    monkeypatch.setattr(start_checks, "load_model", None)
    with pytest.raises(DataError, match=r"got a Sized as train_dataset, which has no order to shuffle"):
        make_trainer(dataset=Sized())


def test_a_stream_that_may_have_no_end_is_named(caplog):
    endless = datasets.IterableDataset.from_generator(lambda: ({"prompt": str(k)} for k in count()))
    for rows in (MANY_ROWS, MANY_ROWS + 1):
        assert len(all_rows(endless.take(rows), name="eval_dataset")) == rows
        assert ("eval_dataset is a stream with more than 10,000 rows" in caplog.text) == (rows > MANY_ROWS)
