"""`Task`: what a run trains on, beside its model and its options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Task:
    """Rows and their reward.

    train_dataset, eval_dataset and reward_funcs of `GRPOTrainer` are `train`, `heldout` and `reward`.
    """

    name: str
    train: list[Row]  # with a "prompt", and the columns that the reward reads
    heldout: list[Row]  # of the same columns, and with no prompt of `train`
    reward: Callable[..., list[float]]
    measures: str = "reward"  # what the mean of the reward is called
    load_model: Callable[[], tuple[Any, Any]] | None = None  # of a task with its own model: that and its tokenizer
