"""Faults that are timed, and become the table of docs/reliability.md."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest


class Clock:
    """Started when the fault happens."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """The fault happens now, and not when the block was entered."""
        self.started = time.monotonic()


@pytest.fixture
def fault(record_property) -> Callable[..., AbstractContextManager[Clock]]:
    """`with fault("a reward raises", policy="ends the run", within=10):` around what has to end within so many seconds.

    The row goes into the test's report (--junitxml), where scripts/reliability.py finds it.
    """

    @contextmanager
    def observed(what: str, *, policy: str, within: float) -> Iterator[Clock]:
        clock = Clock()
        yield clock
        seconds = time.monotonic() - clock.started
        record_property(
            "fault", json.dumps({"fault": what, "policy": policy, "seconds": round(seconds, 2), "within": within})
        )
        assert seconds <= within, f"took {seconds:.1f} s to end, want {within} s at most"

    return observed
