"""Work in daemon threads, with its result as a future, and event loops in such threads."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")
LONGEST = 10**8  # seconds; timeouts of the standard library overflow a little above
_one_at_a_time = threading.Lock()
_loops = dict[str, asyncio.AbstractEventLoop]()
_SILENCE = 5.0  # seconds without a sign of a loop, after which later calls get another one


def in_thread(work: Callable[[], T], name: str = "background") -> Future[T]:
    """Start `work` in a daemon thread: unlike a thread of an executor, it does not keep the process alive."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # a running future cannot be cancelled

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome


def event_loop(name: str) -> asyncio.AbstractEventLoop:
    """The event loop of that name. A client that stays open is bound to the loop that it was opened in."""
    with _one_at_a_time:  # two threads would each make one
        if name not in _loops:
            _loops[name] = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(_loops[name],), name=name, daemon=True).start()
        return _loops[name]


def leave_blocked_loop(name: str, *, timeout: float) -> None:
    """A new one for later calls, where the event loop is silent after one took `timeout`: it may never await."""
    loop, answers = _loops.get(name), threading.Event()
    if loop is not None:
        loop.call_soon_threadsafe(answers.set)
        if not answers.wait(min(_SILENCE, timeout)):
            with _one_at_a_time:
                if _loops.get(name) is loop:  # else another thread has left it
                    del _loops[name]


def _leave_loops() -> None:
    """In a fork, in which their threads do not run."""
    global _one_at_a_time
    _one_at_a_time = threading.Lock()  # a thread may have held the other
    _loops.clear()


os.register_at_fork(after_in_child=_leave_loops)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Until the process ends: a task may stop the loop, and asyncio lets these two out of it."""
    while True:
        with suppress(SystemExit, KeyboardInterrupt):  # which their task has as its result
            loop.run_forever()
