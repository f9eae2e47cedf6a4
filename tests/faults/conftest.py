"""Every fault has a time limit: how long it may take until the run has ended, or goes on without what failed."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest


class Clock:
    """Measures from the time of the fault."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """The fault happens now."""
        self.started = time.monotonic()


@pytest.fixture
def time_limit() -> Callable[[float], AbstractContextManager[Clock]]:
    """`with time_limit(10) as clock:` fails where the block takes longer than 10 s.

    The time is measured from the start of the block, or from the fault: `clock.start()` or `clock.started = ...`.
    """

    @contextmanager
    def limited(seconds: float) -> Iterator[Clock]:
        clock = Clock()
        yield clock
        taken = time.monotonic() - clock.started
        assert taken <= seconds, f"took {taken:.1f} s to end, want {seconds} s at most"

    return limited
