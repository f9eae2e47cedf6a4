"""The tests of learning fail by chance at most once in a thousand runs, by what each of twenty seeds has learned."""

import json
import statistics
from pathlib import Path

import pytest
from learning_chances import TESTS, chance

ROOT = Path(__file__).resolve().parent.parent
# Of each test, what was measured last.
RAW = sorted((ROOT / "bench" / "results").glob("*/learning-*.json"), key=lambda path: path.stem)
NATIVE = {what: values for path in RAW for what, values in json.loads(path.read_text())["native"].items()}


@pytest.mark.parametrize("what", NATIVE)
def test_a_test_of_learning_fails_by_chance_once_in_a_thousand_runs(what):
    least, values = NATIVE[what]
    assert len(values) >= 20
    assert 0 < least < min(values)
    assert chance(values, least) <= 1e-3


def test_every_file_with_such_a_test_was_measured():
    """fix: add it to TESTS of scripts/learning_chances.py and run that"""
    paths = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    mark = "mark." + "learning"
    assert sorted(TESTS) == sorted(path for path in paths if mark in (ROOT / path).read_text())


def test_the_chance_is_that_of_students_t():
    """Its table: t = 1.729 with 19 degrees of freedom is exceeded once in 20 times, and 3.579 once in 1,000."""
    values = [float(x) for x in range(20)]
    spread = statistics.stdev(values) * (1 + 1 / 20) ** 0.5
    for t, expected in ((1.729, 0.05), (3.579, 0.001), (-1.729, 0.95)):
        assert chance(values, statistics.mean(values) - t * spread) == pytest.approx(expected, rel=0.01)
