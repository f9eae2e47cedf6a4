"""SIGTERM: finish the step, save, leave.

That is how clusters take a machine back: Slurm before a job's time is up, Kubernetes when it moves a pod, a cloud
before it reclaims a spot instance. The signal is only noted; the loop looks at the end of each step, and all processes
stop at the same one, also where only one of them was told. The exit status is 143, as of a process that SIGTERM has
ended, so that a scheduler takes the run for what it is: not done.

A second SIGTERM ends the process at once. One that comes right behind the first is the same: launchers pass on what the
scheduler has sent to everybody already. Ctrl-C is an interrupt as everywhere in Python: it ends the run where it is.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

EXIT_STATUS = 128 + signal.SIGTERM
ECHO_SECONDS = 2.0


class StopOnSigterm:
    """`with StopOnSigterm() as stop:` notes SIGTERM in `stop.asked` and puts the handler back that was there.

    In the main thread alone: Python has signals nowhere else.
    """

    def __init__(self) -> None:
        self.asked = False
        self._first, self._process = 0.0, os.getpid()
        self._before: Any = None

    def __enter__(self) -> StopOnSigterm:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        again = self.asked and time.monotonic() - self._first > ECHO_SECONDS
        # A process that was forked off meanwhile has nobody who would look.
        if again or os.getpid() != self._process:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if not self.asked:
            self.asked, self._first = True, time.monotonic()
