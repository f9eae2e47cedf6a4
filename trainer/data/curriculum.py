"""`CurriculumSampler`: prompts whose groups have unequal rewards are drawn more often: they are those that teach.

docs/tasks.md has the weight s of a prompt, by the newest groups of its level. A batch is a sample by these weights
without replacement (Efraimidis and Spirakis 2006: the rows with the greatest u^(1/s), for u uniform in (0, 1]). It
depends on the seed, the number of prompts drawn before and those groups, which are the same on every rank.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from fused_grpo.errors import DataError
from fused_grpo.trainer.data.datasets import is_plain_arrow, is_stream, read_rows
from fused_grpo.trainer.data.prompt_sampler import PromptSampler
from fused_grpo.trainer.types import EQUAL_REWARDS

DIFFICULTY = "difficulty"  # the column
LEVELS = 10  # at most, of a column
GROUPS, PER_LEVEL = 128, 2
LEAST = 0.02


class CurriculumSampler(PromptSampler):
    """Draws by the rewards of what was drawn before; `options` are those of `PromptSampler`.

    DataError for a stream; or for "difficulty", no such column, one that does not hold numbers, or one value alone.
    """

    def __init__(self, dataset: Any, *, curriculum: str, **options: Any) -> None:
        self.levels = levels_of(dataset, curriculum)
        super().__init__(dataset, **options)
        self.curriculum = curriculum
        self._difficulty = difficulties(dataset) if curriculum == "difficulty" else None
        self._window = deque[tuple[int, int]](maxlen=max(GROUPS, PER_LEVEL * len(set(self.levels))))

    def update(self, rows: Sequence[int], rewards: Sequence[Sequence[float]]) -> None:
        """Learn from P groups of all ranks: the numbers of their rows, and G rewards each; NaN is none."""
        for row, group in zip(rows, rewards, strict=True):
            known = [reward for reward in group if not math.isnan(reward)]
            if len(known) > 1:
                self._window.append((row, int(max(known) - min(known) >= EQUAL_REWARDS)))

    def weights(self) -> list[float]:
        count = max(self.levels) + 1
        seen, unequal = [0] * count, [0] * count
        for row, differs in self._window:
            seen[self.levels[row]] += 1
            unequal[self.levels[row]] += differs
        prior = self._unequal_share()
        return [max(LEAST, (prior + some) / (1 + all_)) for some, all_ in zip(unequal, seen, strict=True)]

    def metrics(self) -> dict[str, float]:
        """The share of groups with unequal rewards in the window, and the difficulty of the batch."""
        metrics = {"curriculum/unequal_rewards": self._unequal_share()}
        if self._difficulty is not None:
            metrics["curriculum/difficulty"] = fmean(self._difficulty[row] for row in self.batch)
        return metrics

    def position(self) -> dict[str, Any]:
        """Prompts drawn so far, and the window, as JSON."""
        rows, unequal = zip(*self._window, strict=True) if self._window else ((), ())
        return {**super().position(), "groups": {"rows": list(rows), "unequal": list(unequal)}}

    def _batch(self) -> list[int]:
        weights, draw = self.weights(), random.Random(f"{self._seed}/curriculum/{self.used}").random
        rows = list[int]()
        while len(rows) < self._size:  # a batch may have more prompts than there are
            keys = [math.log(1 - draw()) / weights[level] for level in self.levels]
            rows += heapq.nlargest(self._size - len(rows), range(len(keys)), key=keys.__getitem__)
        return rows

    def _unequal_share(self) -> float:
        return fmean(differs for _, differs in self._window) if self._window else 1.0

    def _go_to(self, state: dict[str, Any]) -> None:
        super()._go_to(state)
        rows, unequal = state["groups"]["rows"], state["groups"]["unequal"]
        most = self._window.maxlen or 0
        for name, values, end in (("rows", rows, len(self.levels)), ("unequal", unequal, 2)):
            if len(values) > most or not all(type(value) is int and 0 <= value < end for value in values):
                raise ValueError(f"groups.{name} of the curriculum are not at most {most} whole numbers below {end}")
        self._window.clear()
        self._window.extend(zip(rows, unequal, strict=True))


def levels_of(dataset: Any, curriculum: str) -> list[int]:
    """The level of each row, from 0; DataError as `CurriculumSampler`.

    >>> levels_of([{"difficulty": 2}, {"difficulty": 1.5}, {"difficulty": 2}], "difficulty")
    [1, 0, 1]
    """
    if is_stream(dataset):
        raise DataError(
            f"got curriculum={curriculum!r} with a stream as train_dataset, want one with a length: any of its rows "
            "may be drawn next; fix: a datasets.Dataset, or curriculum='off'"
        )
    if curriculum == "unequal_rewards":
        return list(range(len(dataset)))
    values = difficulties(dataset)
    starts = _starts(Counter(values), least=len(values) / LEVELS)
    if len(starts) == 1:
        raise DataError(
            f"got curriculum='difficulty' and one level of {DIFFICULTY} in train_dataset, want several; fix: "
            "curriculum='unequal_rewards', which needs no such column"
        )
    return [bisect_right(starts, value) - 1 for value in values]


def _starts(counts: Mapping[float, int], *, least: float) -> list[float]:
    """The values with which levels begin: all of a few, or of many those after which a level has `least` rows."""
    if len(counts) <= LEVELS:
        return sorted(counts)
    starts, rows = list[float](), math.inf
    for value, count in sorted(counts.items()):
        if rows >= least:
            starts.append(value)
            rows = 0
        rows += count
    return starts


def difficulties(dataset: Any) -> list[float]:
    """The column "difficulty"; DataError where there is none, or something else than a number in it."""
    column: list[Any]
    if is_plain_arrow(dataset):
        column = list(dataset[DIFFICULTY]) if DIFFICULTY in dataset.column_names else [None]
    else:
        column = [row.get(DIFFICULTY) for row in read_rows(dataset, name="train_dataset")]
    for number, value in enumerate(column):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise DataError(
                f"got curriculum='difficulty' and {value!r} as {DIFFICULTY} of row {number} of train_dataset, want a "
                f"column {DIFFICULTY!r} of numbers; fix: add it, or curriculum='unequal_rewards'"
            )
    return column
