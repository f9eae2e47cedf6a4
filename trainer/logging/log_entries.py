"""Entries of `trainer.state.log_history`, as transformers and TRL make them.

`metrics.jsonl` has a line for every step. The history has an entry for every `logging_steps` steps: the mean of each
metric over the steps since the last entry, or over the generated batches since then where it describes these. Its last
entry, made at the end of `train`, has the time of the run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from transformers.trainer_utils import speed_metrics

# Of these the last step counts, not the mean.
LATEST = ("grad_norm", "learning_rate", "num_tokens", "weight_version", "generate_calls")


class LogEntry(dict[str, Any]):
    """The numbers of an entry, which are all in metrics.jsonl. What a callback or a subclass adds is not yet there."""

    def __init__(self, numbers: Mapping[str, Any]) -> None:
        super().__init__(numbers)
        self.written = frozenset(numbers)

    def added(self) -> dict[str, Any]:
        """What has been added since."""
        return {name: value for name, value in self.items() if name not in self.written}


class StepMetrics:
    """Collects the metrics of steps for the next entry, and the mean loss and the time of one call of `train`."""

    def __init__(self) -> None:
        self.start, self.losses, self.steps = time.time(), list[float](), 0
        self.unlogged: dict[str, list[Any]] = {}  # since the last entry, and saved with a checkpoint
        self.generation: Mapping[str, Any] = {}  # the one that was counted last

    def add(self, record: Mapping[str, Any], generation: Mapping[str, Any]) -> None:
        """One step. The metrics of its generated batch count once, as in TRL, although several steps may use it."""
        self.steps += 1
        if math.isfinite(record.get("loss", math.nan)):
            self.losses.append(record["loss"])
        counted = generation.keys() if generation is self.generation else ()
        self.generation = generation
        for name, value in record.items():
            # The entry has step and epoch from the state. Names, such as that of the engine, have no mean.
            if name not in ("step", "epoch", *counted) and not isinstance(value, str):
                self.unlogged.setdefault(name, []).append(value)

    def take(self) -> dict[str, Any]:
        """The means over the steps since the last call; None where a metric had no value, as in TRL."""
        since, self.unlogged = self.unlogged, {}
        return {name: values[-1] if name in LATEST else _mean(values) for name, values in since.items()}

    @property
    def train_loss(self) -> float:
        """Mean loss of the steps; 0 of none."""
        return _mean(self.losses) or 0.0

    def closing(self, sequences_per_step: int) -> dict[str, Any]:
        """transformers' last entry of a run: time, speed and mean loss."""
        speed: dict[str, Any] = speed_metrics(
            "train", self.start, num_samples=self.steps * sequences_per_step, num_steps=self.steps
        )
        # A number of floating point operations is not counted.
        return speed | {"total_flos": 0.0, "train_loss": self.train_loss}


def _mean(values: list[Any]) -> float | None:
    numbers = [value for value in values if value is not None and not math.isnan(value)]
    return sum(numbers) / len(numbers) if numbers else None
