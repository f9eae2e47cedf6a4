"""`PromptSampler`: the prompts of each batch, in an order that only the seed decides. `Epochs` counts the passes.

docs/data.md has the order. Batch k is the next `prompts_per_batch * world_size / repeats` prompts of one sequence, and
each rank takes its share. So the number of prompts that have been used is the whole state of a run, and means the same
with any number of ranks and any batch size. Of a stream, which has no random access, every rank reads all.

With a curriculum (docs/tasks.md has the weight s of a prompt, by the newest groups of its level) a batch is a sample by
these weights without replacement (Efraimidis and Spirakis 2006: the rows with the greatest u^(1/s), for u uniform in
(0, 1]). It depends on the seed, the number of prompts drawn before and those groups, which are the same on every rank.
"""

from __future__ import annotations

import hashlib
import math
import random
import reprlib
import sys
import zlib
from array import array
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from itertools import islice
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
from packaging.version import Version

from fused_grpo.errors import CheckpointError, DataError, InputError
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.data.datasets import Row, RowCheck, is_plain_arrow, is_stream, length, read_rows, unreadable
from fused_grpo.trainer.types import EQUAL_REWARDS

END = object()
_COMPARED_ROWS = 256
DIFFICULTY = "difficulty"  # the column
LEVELS = 10  # at most, of a column
GROUPS, PER_LEVEL = 128, 2
LEAST = 0.02
MOST_DROPPED = 100_000  # prompts that are too long before the first that is not, of a stream that may have no end


class PromptSampler:
    """Draws this rank's rows of batch after batch, without end, and reads no others.

    Args:
        dataset: what `check_dataset` has accepted; `prompt_sampler` makes a `StreamSampler` of a stream.
        prompts_per_batch: rows per batch for each rank. All ranks must draw equally often.
        shuffle: a random order, a new one in each pass. Of a `datasets.IterableDataset`: its own, of shards and in a
            buffer.
        repeats: number of consecutive rows of the ranks that are the same prompt: each samples a part of its group.
        keep: False for a row of a stream and its number that is passed over, which `dropped` counts. None keeps all.
    """

    dropped = 0
    curriculum: str | None = None
    """What decides which prompts come next; None where each comes once in a pass."""
    stream_form: Any = None
    """What a position in the stream looks like; None where a position is a number of prompts alone."""
    read: int | None = None
    """A checksum of the prompts that a stream has given, which are the same on every rank; None of no stream."""

    def __init__(
        self,
        dataset: Any,
        *,
        prompts_per_batch: int,
        seed: int,
        shuffle: bool,
        rank: int = 0,
        world_size: int = 1,
        repeats: int = 1,
        keep: Callable[[Row, int], bool] | None = None,
    ) -> None:
        self.num_prompts = length(dataset)
        self.used = 0  # prompts drawn so far, by all ranks
        self.row_numbers = list[int]()  # of what was drawn last; of a stream, in its pass
        self.batch = list[int]()  # the same of all ranks, each prompt once; not of a stream
        self._dataset, self._seed, self._shuffle, self._keep = dataset, seed, shuffle, keep
        self._check = RowCheck("train_dataset")  # of what a transform makes, which may be another row each time
        self._order: tuple[int, array[int]] | None = None  # of the rows in one pass, and its number
        self._size = prompts_per_batch * world_size // repeats
        places = range(rank * prompts_per_batch, (rank + 1) * prompts_per_batch)
        self._share = [place // repeats for place in places]

    def next_batch(self) -> list[Row]:
        """The rows of this rank, `prompts_per_batch` of them; DataError for one that cannot be read or used."""
        self.batch = self._batch()
        self.row_numbers = [self.batch[place] for place in self._share]
        self.used += self._size
        return [self._row(number) for number in self.row_numbers]

    def metrics(self) -> dict[str, float]:
        """What there is to say about what was drawn."""
        return {"prompts/dropped": float(self.dropped)} if self.dropped else {}

    def next_pass(self, passes: int) -> None:
        """Leave the rest of a pass over the dataset out: go to the end of so many."""
        # The last batch may have begun the next pass. Prompts of its further rounds, if any, no step counts.
        end = passes * len(self._dataset)
        self.used = end if end > self.used - self._size else self.used + -self.used % len(self._dataset)

    def first_pass(self) -> Iterator[list[int]]:
        """The row numbers of this rank in the full batches of a first pass; what is drawn next stays as it is."""
        for batch in range(len(self._dataset) // self._size):
            yield [self._number_at(batch * self._size + place) for place in self._share]

    def position(self) -> dict[str, Any]:
        """The position in the sequence, as JSON. It is the same on every rank."""
        return {"prompts": self.used}

    def state_dict(self, position: dict[str, Any] | None = None) -> dict[str, Any]:
        """A position (None: the current one), and what identifies dataset and order, for which rows are read."""
        return {**self._identity, **(self.position() if position is None else position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there, with any number of ranks; CheckpointError for another dataset, seed or order."""
        for name, here in self._identity.items():
            if state.get(name) != here:
                raise CheckpointError(
                    f"got a train_dataset with {name}={here}, want {name}={reprlib.repr(state.get(name))} as in the "
                    "checkpoint; fix: the dataset, seed, shuffle_dataset and curriculum of that run, or a new run"
                )
        try:
            self._go_to(state)
        except CheckpointError:
            raise
        except Exception as error:  # `datasets` decides what a position in a stream is
            raise CheckpointError(
                f"got a place in the data that cannot be gone to ({type(error).__name__}: {error}); want one that a "
                "run has saved; fix: resume from another checkpoint"
            ) from error

    @cached_property
    def _identity(self) -> dict[str, Any]:
        return {
            "num_prompts": self.num_prompts,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "curriculum": self.curriculum,
            "contents": None if is_stream(self._dataset) else fingerprint(self._dataset),
        }

    def _go_to(self, state: dict[str, Any]) -> None:
        self.used = int(state["prompts"])

    def _batch(self) -> list[int]:
        return [self._number_at(self.used + place) for place in range(self._size)]

    def _row(self, number: int) -> Row:
        try:
            entry = self._dataset[number]
        except Exception as error:  # of the disk, or of a transform
            raise unreadable(number, "train_dataset", error) from error
        return self._check(number, entry)

    def _number_at(self, place: int) -> int:
        number, offset = divmod(place, len(self._dataset))
        if not self._shuffle:
            return offset
        if self._order is None or self._order[0] != number:
            self._order = number, array("q", range(len(self._dataset)))
            random.Random(f"{self._seed}/{number}").shuffle(self._order[1])
        return self._order[1][offset]


class StreamSampler(PromptSampler):
    """The sampler of a dataset that is read from its start, or a state of its own; DataError: no order to shuffle."""

    def __init__(self, dataset: Any, **options: Any) -> None:
        from datasets import IterableDataset, __version__

        super().__init__(dataset, **options)
        is_own = isinstance(dataset, IterableDataset)
        if self._shuffle and not is_own:
            raise DataError(
                f"got a {type(dataset).__name__} as train_dataset, which has no order to shuffle, want a "
                "datasets.IterableDataset; fix: shuffle_dataset=False, or datasets.IterableDataset.from_generator(...)"
            )
        if self._shuffle:
            self._dataset = dataset.shuffle(seed=self._seed)
        # Before 5.0.1 a mapped or filtered stream of Arrow data goes on behind rows that were not read.
        self._seeks = is_own and not self._shuffle and Version(__version__) >= Version("5.0.1")
        # Rows that were passed over count for the place in the pass, and not as used.
        self.dropped = self._pass = self._used_of_pass = 0
        self._kept_in_pass = False
        self._rows: Any = None  # the iterator of this pass; None: it starts, at this place, with the next draw
        self._place: dict[str, Any] | None = None
        self.read = 0  # by this sampler, which a resumed run makes anew

    def next_batch(self) -> list[Row]:
        drawn = [(self._next(), self._used_of_pass - 1) for _ in range(self._size)]
        self.row_numbers = [drawn[place][1] for place in self._share]
        return [drawn[place][0] for place in self._share]

    def next_pass(self, passes: int) -> None:
        if self._used_of_pass:
            self._pass, self._used_of_pass, self._place, self._rows = self._pass + 1, 0, None, None
            self._kept_in_pass = False

    def position(self) -> dict[str, Any]:
        place = self._dataset.state_dict() if self._seeks and self._rows is not None else self._place
        passes = {"pass": self._pass, "prompts_of_pass": self._used_of_pass, "stream": place}
        return {"prompts": self.used, **passes, **({"dropped": self.dropped} if self.dropped else {})}

    @property
    def stream_form(self) -> Any:
        return self._dataset.state_dict() if self._seeks else None

    def _go_to(self, state: dict[str, Any]) -> None:
        self.used, self._pass, self._used_of_pass = state["prompts"], state["pass"], state["prompts_of_pass"]
        self._rows, self._place = None, state["stream"]
        self.dropped, self._kept_in_pass = state.get("dropped", 0), True
        if self._seeks and (self._place or not self._used_of_pass):
            return
        self._open()
        passed_over = sum(1 for _ in islice(self._rows, self._used_of_pass))
        if passed_over < self._used_of_pass:
            raise CheckpointError(
                f"got a train_dataset of {passed_over} rows, want the checkpoint's, which has at least "
                f"{self._used_of_pass}; fix: the dataset of that run, or a new run"
            )

    def _next(self) -> Row:
        while True:
            if self._rows is None:
                self._open()
            number, entry = self._used_of_pass, next(self._rows, END)
            if entry is END and not number:
                raise DataError(f"got no row in pass {self._pass} over train_dataset, want at least one")
            if (entry is END or number == MOST_DROPPED) and not self._kept_in_pass:
                raise DataError(f"got {number} prompts in train_dataset, all of them too long, want one")
            if entry is END:
                self.next_pass(self._pass + 1)
                continue
            row = self._check(number, entry)
            self._used_of_pass += 1
            self.read = checksum([row], self.read or 0)
            if self._keep is None or self._keep(row, number):
                self._kept_in_pass = True
                self.used += 1
                return row
            self.dropped += 1

    def _open(self) -> None:
        if self._shuffle:
            self._dataset.set_epoch(self._pass)
        if self._seeks:
            # A stream starts every pass from the state it was given last: an empty one is its own start.
            self._dataset.load_state_dict(self._place or {})
        self._rows = read_rows(self._dataset, name="train_dataset")


class CurriculumSampler(PromptSampler):
    """Draws by the rewards of what was drawn before; `options` are those of `PromptSampler`.

    DataError for a stream; or for "difficulty", no such column, one that does not hold numbers, or one value alone.
    """

    def __init__(self, dataset: Any, *, curriculum: str, **options: Any) -> None:
        self.levels = np.array(levels_of(dataset, curriculum))
        super().__init__(dataset, **options)
        self.curriculum = curriculum
        self._difficulty = difficulties(dataset) if curriculum == "difficulty" else None
        count, self._drawn = int(self.levels.max()) + 1, list[int]()
        self._window = deque[tuple[int, int]](maxlen=max(GROUPS, PER_LEVEL * count))
        # Of each level, the groups in the window, and those of them with unequal rewards.
        self._seen, self._unequal = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)

    def update(self, rows: Sequence[int], rewards: Sequence[Sequence[float]]) -> None:
        """Learn from P groups of all ranks: the numbers of their rows, and G rewards each; NaN is none."""
        self._drawn += rows
        for row, group in zip(rows, rewards, strict=True):
            scored = [reward for reward in group if not math.isnan(reward)]
            if len(scored) > 1:
                self._add(row, int(max(scored) - min(scored) >= EQUAL_REWARDS))

    def _add(self, row: int, differs: int) -> None:
        if len(self._window) == self._window.maxlen:
            self._count(*self._window.popleft(), -1)
        self._window.append((row, differs))
        self._count(row, differs, 1)

    def _count(self, row: int, differs: int, sign: int) -> None:
        self._seen[self.levels[row]] += sign
        self._unequal[self.levels[row]] += sign * differs

    def weights(self) -> npt.NDArray[np.float64]:
        """Of each level."""
        weights: npt.NDArray[np.float64] = (self._unequal_share() + self._unequal) / (1 + self._seen)
        return np.maximum(weights, LEAST)

    def metrics(self) -> dict[str, float]:
        """The share of groups with unequal rewards in the window, and the difficulty of what was drawn since."""
        drawn, self._drawn = self._drawn or self.batch, []
        metrics = {"curriculum/unequal_rewards": self._unequal_share()}
        if self._difficulty is not None:
            metrics["curriculum/difficulty"] = fmean(self._difficulty[row] for row in drawn)
        return metrics

    def position(self) -> dict[str, Any]:
        """Prompts drawn so far, and the window, as JSON."""
        rows, unequal = zip(*self._window, strict=True) if self._window else ((), ())
        return {**super().position(), "groups": {"rows": list(rows), "unequal": list(unequal)}}

    def _batch(self) -> list[int]:
        seed = random.Random(f"{self._seed}/curriculum/{self.used}").getrandbits(64)
        weights, draw = self.weights()[self.levels], np.random.default_rng(seed).standard_exponential
        rows = list[int]()
        while len(rows) < self._size:  # a batch may have more prompts than there are
            count = min(self._size - len(rows), len(weights))
            keys = draw(len(weights)) / weights  # -log u / s, which falls where u^(1/s) rises
            least = np.argpartition(keys, count - 1)[:count]
            rows += least[keys[least].argsort()].tolist()
        return rows

    def _unequal_share(self) -> float:
        return int(self._unequal.sum()) / len(self._window) if self._window else 1.0

    def _go_to(self, state: dict[str, Any]) -> None:
        super()._go_to(state)
        rows, unequal = state["groups"]["rows"], state["groups"]["unequal"]
        most = self._window.maxlen or 0
        for name, values, end in (("rows", rows, len(self.levels)), ("unequal", unequal, 2)):
            if len(values) > most or not all(type(value) is int and 0 <= value < end for value in values):
                raise ValueError(f"groups.{name} of the curriculum are not at most {most} whole numbers below {end}")
        self._window.clear()
        self._seen[:] = self._unequal[:] = 0
        for entry in zip(rows, unequal, strict=True):
            self._add(*entry)


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
    column = [value.item() if getattr(value, "ndim", 1) == 0 else value for value in column]  # of NumPy and torch
    for number, value in enumerate(column):
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise DataError(
                f"got curriculum='difficulty' and {value!r} as {DIFFICULTY} of row {number} of train_dataset, want a "
                f"column {DIFFICULTY!r} of numbers; fix: add it, or curriculum='unequal_rewards'"
            )
    return column


def prompt_sampler(dataset: Any, *, curriculum: str = "off", **options: Any) -> PromptSampler:
    """The sampler of a dataset or a stream; `options` are those of `PromptSampler`."""
    if curriculum != "off":
        return CurriculumSampler(dataset, curriculum=curriculum, **options)
    return (StreamSampler if is_stream(dataset) else PromptSampler)(dataset, **options)


def checksum(rows: Iterable[Row], before: int = 0) -> int:
    """A sum of the prompts of these rows, behind that of others."""
    for row in rows:
        before = zlib.crc32(spelled(row["prompt"]).encode(errors="backslashreplace"), before)
    return before


def fingerprint(dataset: Any) -> str:
    """A hash that differs between datasets of one length: over 256 rows at even distances, or all of fewer.

    Of a `datasets.Dataset`, the stored values count: transforms may be random, and images are not decoded.
    """
    from datasets import Dataset
    from datasets.features.features import require_decoding

    if isinstance(dataset, Dataset):
        # Images and the like may be stored as paths, which differ from machine to machine.
        plain = [name for name, feature in dataset.features.items() if not require_decoding(feature)]
        dataset = dataset.with_format("arrow", columns=plain)
    total, count = hashlib.sha256(), min(_COMPARED_ROWS, len(dataset))
    for number in (place * len(dataset) // count for place in range(count)):
        try:
            row = dataset[number]
            row = row.to_pylist()[0] if hasattr(row, "to_pylist") else row
        except Exception as error:  # of the disk
            raise unreadable(number, "train_dataset", error) from error
        total.update(spelled(row).encode(errors="backslashreplace"))
    return total.hexdigest()[:16]


def spelled(value: Any) -> str:
    """Text that is equal on every rank for equal values. Of values without such a text, only the type counts."""
    if isinstance(value, Mapping):
        return f"{{{','.join(sorted(f'{spelled(key)}:{spelled(entry)}' for key, entry in value.items()))}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(spelled, value))}]"
    return repr(value) if isinstance(value, str | bytes | int | float | None) else type(value).__name__


class Epochs:
    """The epochs of a run of `max_steps` optimizer steps.

    A step is the share `prompts_per_step / num_prompts` of an epoch. A generated batch of P prompts that K steps use
    counts as P / K prompts for each of them. No row is dropped: an epoch that ends inside a batch ends with the step
    that uses its last row. Of a stream, whose length is unknown, the whole run is one epoch, as in transformers.
    """

    def __init__(self, num_prompts: int | None, prompts_per_step: Fraction, max_steps: int) -> None:
        self.per_step = Fraction(1, max_steps) if num_prompts is None else prompts_per_step / num_prompts
        # A stream may be longer than any number of steps.
        self.total = sys.maxsize if num_prompts is None else math.ceil(max_steps * self.per_step)
        self.skipped = Fraction(0)

    def at(self, step: int) -> Fraction:
        """Epochs after `step` optimizer steps."""
        return step * self.per_step + self.skipped

    def ends_with(self, step: int) -> bool:
        """Whether the last row of an epoch is used in that step."""
        return math.floor(self.at(step)) > math.floor(self.at(step - 1))

    def skip(self, step: int) -> Fraction:
        """Leave the rest of the epoch out: the next step is the first of the next one. Returns the epochs before it."""
        self.skipped += math.ceil(self.at(step)) - self.at(step)
        return self.at(step)

    def resume(self, step: int, epoch: float, *, of: int) -> None:
        """Continue after `step` `of` a run of so many, which ended at `epoch`: what was skipped follows from these."""
        # Of a stream, a step is another share of a longer run.
        per_step = Fraction(1, of) if self.total == sys.maxsize else self.per_step
        self.skipped = Fraction(round((epoch - float(step * per_step)) * per_step.denominator), per_step.denominator)


def planned_steps(args: GRPOConfig, num_prompts: int | None, num_processes: int) -> tuple[int, Epochs]:
    """The optimizer steps of a run over a dataset of `num_prompts` rows, and its epochs; InputError: unknown."""
    if num_prompts is None and args.max_steps <= 0:
        raise InputError("got a train_dataset without a length and max_steps=-1; fix: set max_steps")
    batch = args.prompts_per_generation(num_processes)
    steps = args.optimizer_steps_per_generation(num_processes) * args.num_iterations
    # 1.1 epochs of 100 prompts are 110, and not 110.00000000000001.
    generations = math.ceil(Fraction(str(args.num_train_epochs)) * (num_prompts or 0) / batch)
    max_steps = args.max_steps if args.max_steps > 0 else generations * steps
    return max_steps, Epochs(num_prompts, Fraction(batch, steps), max_steps)
