"""Tests that cannot fail prove nothing: every bug of `planted_bugs.py` turns some of them red."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("planted_bugs", Path(__file__).with_name("planted_bugs.py"))
planted_bugs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(planted_bugs)


@pytest.fixture(scope="module")
def verdicts(request):
    """Of the bugs that were asked for, two at a time: most of each is waiting for imports."""
    ours = (item for item in request.session.items if item.path == request.path and hasattr(item, "callspec"))
    with ThreadPoolExecutor(2) as pool:
        yield {
            name: pool.submit(planted_bugs.survives, name) for name in (item.callspec.params["name"] for item in ours)
        }


@pytest.mark.parametrize("name", planted_bugs.BUGS)
def test_the_bug_is_caught(verdicts, name):
    said = verdicts[name].result()
    assert said is None, f"survived {planted_bugs.BUGS[name].caught_by}:\n{said}"


def test_without_a_bug_the_same_tests_are_green(tmp_path):
    folder = planted_bugs.copy_of_the_project(tmp_path)
    selections = {tuple(bug.caught_by) for bug in planted_bugs.BUGS.values()}
    for selection in sorted(selections):
        done = planted_bugs.run(list(selection), folder)
        assert done.returncode == 0, done.stdout[-2000:]
