"""What ends a run early, on all ranks after the same step: signals, and the decisions of callbacks.

SIGTERM, SIGHUP and SIGUSR1: finish the optimizer step, save a checkpoint, exit with status 143.

Slurm, Kubernetes and spot instances send SIGTERM before they end a job, Slurm's `--signal=USR1@120` some time earlier,
and a terminal that closes sends SIGHUP. The handler only sets a flag. The loop reads it after each step, and all ranks
stop after the same one. The same signal a second time ends the process at once; within two seconds of the first it is
the same request, because launchers forward what the scheduler has sent to every process.

SIGHUP and SIGUSR1 stay as they are where they are handled or ignored already, by nohup or a plugin of the scheduler.

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
    decisions = torch.tensor([float(getattr(control, name)) for name in names], device=accelerator.device)
    for name, ranks in zip(names, accelerator.reduce(decisions, reduction="sum").tolist(), strict=True):
        setattr(control, name, ranks > 0)


class StopOnSignal:
    """`with StopOnSignal() as stop:` sets `stop.requested` on a signal; the handlers that were there come back.

    In the main thread only: Python runs signal handlers nowhere else.
    """

    def __init__(self) -> None:
        self._process, self._before = os.getpid(), dict[int, Any]()
        self._since: dict[int, float] = {}  # when each signal came first

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return bool(self._since)

    @property
    def reason(self) -> str:
        """The name of the first signal."""
        return next((signal.Signals(number).name for number in self._since), "a signal to another process")

    def __enter__(self) -> StopOnSignal:
        self._since = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
                if number == signal.SIGTERM or signal.getsignal(number) == signal.SIG_DFL:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            number, handler = self._before.popitem()
            # None: a handler that was not installed from Python, and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = time.monotonic() - self._since.setdefault(number, time.monotonic()) > SAME_REQUEST_SECONDS
        # A process that was forked off has no loop that would read the flag.
        if again or os.getpid() != self._process:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
