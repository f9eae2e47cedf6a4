"""Tests that cannot fail prove nothing: every bug of `planted_bugs.py` turns some of them red."""

import importlib.util
import json
from pathlib import Path

import pytest

LIST, PLANT, SWAP = (Path(__file__).with_name(name) for name in ("planted_bugs.py", "plant.py", "swap.py"))
spec = importlib.util.spec_from_file_location("planted_bugs", LIST)
planted_bugs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(planted_bugs)
WITHOUT_A_BUG = planted_bugs.without_a_bug()


@pytest.fixture
def attempt(fork_server):
    def attempt(bug, script=PLANT):
        """(pytest's status, what it said) where this is planted."""
        stage = "collected" if script == SWAP else "libraries"
        process = fork_server.start(script, json.dumps(bug), stage=stage, env=planted_bugs.ENVIRONMENT)
        return process.wait(timeout=300), process.output

    return attempt


@pytest.mark.parametrize("name", planted_bugs.BUGS)
def test_the_bug_is_caught(attempt, name):
    status, said = attempt(bug := planted_bugs.BUGS[name], SWAP)
    if not planted_bugs.is_caught(status, said):  # it may need another import, or a process that imports it
        status, said = attempt(bug)
    assert planted_bugs.is_caught(status, said), f"survived {bug.caught_by}:\n{said}"


# They run in the suite as well; here it is seen that they do so where bugs are planted.
@pytest.mark.full
@pytest.mark.parametrize("script", [SWAP, PLANT], ids=["in memory", "in a copy"])
@pytest.mark.parametrize("selection", WITHOUT_A_BUG)
def test_without_a_bug_the_same_tests_are_green(attempt, selection, script):
    status, said = attempt(WITHOUT_A_BUG[selection], script)
    assert status == 0, said
