"""Containers that are no dataset, or one that ends, or does not begin, with an error."""

from typing import Any

import pytest
from pandas import DataFrame

from fused_grpo.errors import DataError
from fused_grpo.trainer.data.datasets import check_dataset

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
