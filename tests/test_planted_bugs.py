"""Tests that cannot fail prove nothing: every bug of `planted_bugs.py` turns some of them red."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("planted_bugs.py")
spec = importlib.util.spec_from_file_location("planted_bugs", SCRIPT)
planted_bugs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(planted_bugs)


@pytest.fixture
def attempt(farm):
    def attempt(name):
        """(pytest's status, what it said) with the bug of this name, or for the tests that it selects."""
        process = farm.start(SCRIPT, "--here", name, stage="libraries", env=planted_bugs.ENVIRONMENT)
        return process.wait(timeout=300), process.output

    return attempt


@pytest.mark.parametrize("name", planted_bugs.BUGS)
def test_the_bug_is_caught(attempt, name):
    status, said = attempt(name)
    assert planted_bugs.is_caught(status, said), f"survived {planted_bugs.BUGS[name].caught_by}:\n{said}"


# They run in the suite as well; here it is seen that they do so in a copy.
@pytest.mark.full
@pytest.mark.parametrize("selection", planted_bugs.selections())
def test_without_a_bug_the_same_tests_are_green(attempt, selection):
    status, said = attempt(selection)
    assert status == 0, said
