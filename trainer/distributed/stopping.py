"""What ends a run early, on all ranks after the same step: SIGTERM, and the decisions of callbacks.

SIGTERM: finish the optimizer step, save a checkpoint, exit with status 143.

Slurm, Kubernetes and spot instances send SIGTERM before they end a job. The handler only sets a flag. The loop reads it
after each step, and all ranks stop after the same one. A second SIGTERM ends the process at once; one within two
seconds of the first is the same request, because launchers forward what the scheduler has sent to every process.

Callbacks run on every rank and decide in the `TrainerControl` of their rank. What one of them decides on any rank holds
on all ranks, or they would wait for each other in different collectives.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from transformers import TrainerControl

EXIT_STATUS = 128 + signal.SIGTERM
SAME_REQUEST_SECONDS = 2.0


def agree(accelerator: Accelerator, control: TrainerControl) -> None:
    """Set on this rank what is set on any rank: to stop, log, evaluate or save. A collective."""
    if accelerator.num_processes == 1:
        return
    names = [field.name for field in dataclasses.fields(control)]
    mine = torch.tensor([float(getattr(control, name)) for name in names], device=accelerator.device)
    for name, ranks in zip(names, accelerator.reduce(mine, reduction="sum").tolist(), strict=True):
        setattr(control, name, ranks > 0)


class StopOnSigterm:
    """`with StopOnSigterm() as stop:` sets `stop.requested` on SIGTERM; the handler that was there comes back.

    In the main thread only: Python runs signal handlers nowhere else.
    """

    def __init__(self) -> None:
        self.requested, self._since, self._process = False, 0.0, os.getpid()
        self._handles = False
        self._before: Any = None

    def __enter__(self) -> StopOnSigterm:
        self.requested = False
        self._handles = threading.current_thread() is threading.main_thread()
        if self._handles:
            self._before = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handles:
            # None: a handler that was not installed from Python, and cannot be put back.
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = self.requested and time.monotonic() - self._since > SAME_REQUEST_SECONDS
        # A process that was forked off has no loop that would read the flag.
        if again or os.getpid() != self._process:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._since = self._since if self.requested else time.monotonic()
        self.requested = True
