"""SIGTERM: finish the step, save, leave.

That is how clusters take a machine back: Slurm before a job's time is up, Kubernetes when it moves a pod, a cloud
before it reclaims a spot instance. The signal is only noted; the loop looks at the end of each step, and all processes
stop at the same one, also where only one of them was told. The exit status is 143, as of a process that SIGTERM has
ended, so that a scheduler takes the run for what it is: not done.

A second SIGTERM ends the process at once, also where it waits in C++ for a peer that hangs: Python's own handler runs
between two instructions of the main thread alone, so a thread watches the signals as they arrive. One that comes right
behind the first is the same: launchers pass on what the scheduler has sent to everybody already. Ctrl-C is an interrupt
as everywhere in Python: it ends the run where it is.
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
        self._process = os.getpid()
        self._before: Any = None
        self._watch: _Watch | None = None

    def __enter__(self) -> StopOnSigterm:
        self.asked = False
        if threading.current_thread() is threading.main_thread():
            self._watch = _Watch()
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._watch is not None:
            # None: a handler that Python has not installed, and cannot put back.
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)
            self._watch.close()
            self._watch = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        # A process that was forked off meanwhile has nobody who would look.
        if os.getpid() != self._process:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.asked = True


class _Watch:
    """A thread that hears of every signal when it arrives, whatever the main thread is at, and ends the process at the
    second SIGTERM."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        _watches.add(self)
        self._thread = threading.Thread(target=self._listen, name="sigterm", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Back to whoever was told of signals before."""
        _watches.discard(self)
        signal.set_wakeup_fd(self._before)
        os.close(self._write)
        self._thread.join()
        os.close(self._read)

    def _listen(self) -> None:
        first: float | None = None
        while numbers := os.read(self._read, 1):  # nothing: `close`
            if numbers[0] != signal.SIGTERM:
                continue
            if first is not None and time.monotonic() - first > ECHO_SECONDS:
                os._exit(EXIT_STATUS)  # only the main thread could restore the default handler, and it is in C++
            first = time.monotonic() if first is None else first


_watches: set[_Watch] = set()


def _leave_the_pipe() -> None:
    """In a process that was forked off: its SIGTERM is not that of the process it comes from."""
    if _watches:
        signal.set_wakeup_fd(-1)
        _watches.clear()


os.register_at_fork(after_in_child=_leave_the_pipe)
