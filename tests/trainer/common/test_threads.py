"""Event loops in threads."""

import asyncio
import os

import pytest

from fused_grpo.trainer.common.threads import event_loop


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # Python 3.12's, for any process with threads
def test_a_fork_has_loops_of_its_own() -> None:
    def answer() -> int:
        return asyncio.run_coroutine_threadsafe(asyncio.sleep(0, 7), event_loop("of a test")).result(10)

    assert answer() == 7
    if (child := os.fork()) == 0:
        try:
            os._exit(answer())
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
