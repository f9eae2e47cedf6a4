"""Tests that cannot fail prove nothing: every bug of `planted_bugs.py` turns some of them red."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("planted_bugs.py")
spec = importlib.util.spec_from_file_location("planted_bugs", SCRIPT)
planted_bugs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(planted_bugs)


def verdicts_of(*arguments):
    done = subprocess.run([sys.executable, "-W", "ignore", SCRIPT, *arguments], stdout=subprocess.PIPE, text=True)
    return {verdict["name"]: verdict for verdict in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def verdicts(request):
    """Of the bugs that were asked for, from one process."""
    ours = (item for item in request.session.items if item.path == request.path and hasattr(item, "callspec"))
    return verdicts_of(*(item.callspec.params["name"] for item in ours))


@pytest.mark.parametrize("name", planted_bugs.BUGS)
def test_the_bug_is_caught(verdicts, name):
    assert verdicts[name]["passed"], f"survived {planted_bugs.BUGS[name].caught_by}:\n{verdicts[name]['said']}"


def test_without_a_bug_the_same_tests_are_green():
    verdicts = verdicts_of("--none")
    assert {name: verdict["said"] for name, verdict in verdicts.items() if not verdict["passed"]} == {}
    assert len(verdicts) == len({tuple(bug.caught_by) for bug in planted_bugs.BUGS.values()})
