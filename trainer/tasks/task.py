"""`Task`: what a run trains on, beside its model and its options."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Task:
    """Rows and their reward.

    train_dataset, eval_dataset, reward_funcs and tools of `GRPOTrainer` are `train`, `heldout`, `reward` and `tools`.
    """

    name: str
    train: list[Row]  # with a "prompt", and the columns that the reward reads
    heldout: list[Row]  # of the same columns, and with no prompt of `train`
    reward: Callable[..., list[float]]
    tools: Sequence[Callable[..., Any]] = ()  # functions that the model may call
    measures: str = "reward"  # what the mean of the reward is called
    load_model: Callable[[], tuple[Any, Any]] | None = None  # of a task with its own model: that and its tokenizer


def interval(mean: float, count: int) -> tuple[float, float]:
    """The 95 % interval of Wilson (1927) around the mean of `count` independent rewards of 0 to 1.

    It is that of a share. Rewards between 0 and 1 spread less, so theirs is no wider.

    >>> [round(end, 3) for end in interval(0.25, 100)]
    [0.175, 0.343]
    """
    z = 1.959964
    middle, half = mean + z * z / (2 * count), z * math.sqrt(mean * (1 - mean) / count + z * z / (4 * count * count))
    return max(0.0, (middle - half) / (1 + z * z / count)), min(1.0, (middle + half) / (1 + z * z / count))
