"""Faults that a trainer meets once on order, some steps after it began, and what each of them has to come to."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fused_grpo.errors import CheckpointError, NonFiniteError, UnavailableError, WeightSyncError

NAN_ONCE, NAN = "one step is NaN", "every step from one on is NaN"
DISK_FULL, STALE, SHORT = "the disk is full while saving", "log-probs of other weights", "a completion too few"
# None: the run goes on, and passes over one step.
ENDS_WITH: dict[str, type[Exception] | None] = {
    NAN_ONCE: None,
    NAN: NonFiniteError,
    DISK_FULL: CheckpointError,
    STALE: WeightSyncError,
    SHORT: UnavailableError,
}
SKIPPED_STEPS = 1


class Fault:
    """One of them, in one trainer."""

    def __init__(self, name: str, trainer: Any, *, after: int) -> None:
        self.name, self.trainer, self.after = name, trainer, after
        self.step: int | None = None
        self.happened = False
        if name in (NAN, NAN_ONCE):
            trainer.model.model.register_forward_hook(self._poison)
        elif name == DISK_FULL:
            trainer.save_checkpoint = self._instead(trainer.save_checkpoint, _save)
        else:
            change, engine = _shifted if name == STALE else _shortened, trainer.engine
            engine.generate = self._instead(engine.generate, lambda generate, *asked: change(generate(*asked)))

    def due(self) -> bool:
        """Whether it is time, and whether this is a step that it happens in."""
        if self.step is None:
            self.step = self.trainer.step + self.after
        due = self.trainer.step == self.step if self.name == NAN_ONCE else self.trainer.step >= self.step
        self.happened = self.happened or due
        return due

    def explains(self, error: Exception) -> bool:
        """Whether it has happened and ends in such an error."""
        wanted = ENDS_WITH[self.name]
        return self.happened and wanted is not None and isinstance(error, wanted)

    def noticed(self) -> bool:
        """Whether a trainer that came to its end has noticed it. A step that was passed over leaves its batch."""
        if not self.happened:
            return True
        kept = self.trainer.output_dir / f"nonfinite-step-{(self.step or 0) + 1}"
        return self.name in (NAN, NAN_ONCE) and kept.is_dir()

    def _instead(self, call: Callable[..., Any], failing: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: failing(call, *arguments) if self.due() else call(*arguments)

    def _poison(self, module: Any, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled() and self.due():
            output.last_hidden_state = output.last_hidden_state * math.nan


@contextlib.contextmanager
def small_files_only() -> Iterator[None]:
    """The operating system refuses to write on in a file of 64 KiB, as it does on a disk without space."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _save(save: Callable[[], Path]) -> Path:
    with small_files_only():
        return save()


def _shifted(rollouts: Any) -> Any:
    shifted = [[value - 0.5 for value in values] for values in rollouts.sampling_logprobs]
    return dataclasses.replace(rollouts, sampling_logprobs=shifted)


def _shortened(rollouts: Any) -> Any:
    return dataclasses.replace(rollouts, completion_ids=rollouts.completion_ids[:-1])
