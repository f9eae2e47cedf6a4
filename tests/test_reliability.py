"""The page of promises is what its raw file says, and the raw file is what the tests and the soak have said."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
JUNIT = """<testsuites><testsuite>
<testcase file="tests/faults/test_a.py" name="test_x[1]" time="2.5"><properties>
<property name="fault" value='{"fault": "a reward | raises", "policy": "ends", "seconds": 0.41, "within": 10}'/>
<property name="hostile" value='{"what": "ops", "inputs": 4000}'/>
<property name="of somebody else" value="7"/></properties></testcase>
<testcase file="tests/faults/test_b.py" name="test_k" time="3"><properties>
<property name="kills" value='{"what": "a run", "points": 30, "inside a save": 12, "equal": 30}'/>
</properties></testcase>
<testcase file="tests/faults/test_c.py" name="test_y" time="1"><properties>
<property name="fault" value='{"fault": "not yet", "policy": "ends", "seconds": 99, "within": 1}'/></properties>
<failure/></testcase>
</testsuite></testsuites>"""
MEMORY = {"growth": 0.0123, "samples": 1800, "mebibytes": [390.0, 401.0, 400.4]}
SOAK = {
    "command": "python scripts/soak --minutes 30",
    "minutes": 30,
    "tracks": {
        "steady": {
            **{"engines": ["transformers", "server"], "steps": 9000, "runs": 150, "trainers": 320, "wrong": []},
            **{"faults": {"a reward raises": 12}, "ended_with": {"NaN: NonFiniteError": 3}},
            **{"held_at_the_end": {"threads": 4}, "memory": MEMORY},
        },
        "killed": {"steps": 24, "rounds": 90, "starts": 400, "SIGKILL": 230, "SIGTERM": 80, "wrong": []},
    },
    "server": {"kills": 20, "faults": {"answers 500": 31}},
    "left": {"processes": [], "shared memory": []},
    "broken": [],
}


@pytest.fixture
def reliability(monkeypatch, tmp_path):
    """The script, in a repository of its own."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("reliability", SCRIPTS / "reliability.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "PAGE", tmp_path / "docs" / "reliability.md")
    monkeypatch.delitem(sys.modules, "soak.machine", raising=False)
    (tmp_path / "docs").mkdir()
    return module


@pytest.fixture
def made(reliability, tmp_path):
    """The page, from a report and a soak."""
    (tmp_path / "junit.xml").write_text(JUNIT)
    about = {name: value for name, value in reliability.described().items() if name not in SOAK}
    (tmp_path / "soak.json").write_text(json.dumps({**about, **SOAK}))
    assert reliability.main(["--junit", str(tmp_path / "junit.xml"), "--soak", str(tmp_path / "soak.json")]) == 0
    return reliability.PAGE


def test_the_page_of_this_repository_is_current(reliability, monkeypatch):
    monkeypatch.setattr(reliability, "ROOT", SCRIPTS.parent)
    monkeypatch.setattr(reliability, "PAGE", SCRIPTS.parent / "docs" / "reliability.md")
    assert reliability.main(["--check"]) == 0, "fix: python scripts/reliability.py --render"


def test_the_page_says_what_tests_and_soak_have_found(made):
    text = made.read_text()
    for line in (
        "| a reward \\| raises | ends | [test_x](../tests/faults/test_a.py) | 0.4 s | 10 s |",
        "| a run | 30 | 12 | 30 | [test_k](../tests/faults/test_b.py) |",
        "| **all** | **4,000** |  |",
        "| **all** | **30** | **12** | **30** |  |",
        "sampling with transformers and server**: 9,000 steps by 320 trainers in 150 runs.",
        "+1.23 % by a robust fit over 1,800 samples; at most 2 % is allowed",
        "90 runs, started 400 times, stopped 230 by SIGKILL and 80 by SIGTERM",
        "no processes, no shared memory were left.",
        ": 2 passed, **1 failed and are not in the tables** in 6 s.",
    ):
        assert line in text
    assert "not yet" not in text, "figures of a test that failed"


def test_a_bar_that_did_not_hold_is_in_the_page(reliability):
    about = reliability.described()
    text = reliability.soak_text({**about, **SOAK, "broken": ["steady: memory grew by 3 %"]})
    assert "**A bar did not hold: steady: memory grew by 3 %**" in text


def test_check_changes_nothing_and_finds_a_page_that_says_something_else(reliability, made, capsys):
    assert reliability.main(["--check"]) == 0
    made.write_text(made.read_text().replace("4,000", "9,000"))
    assert reliability.main(["--check"]) == 1
    assert "fix: python scripts/reliability.py --render" in capsys.readouterr().out
    assert "9,000" in made.read_text()
    assert reliability.main(["--render"]) == 0
    assert reliability.main(["--check"]) == 0


def test_without_a_new_soak_the_last_one_stays(reliability, made, tmp_path):
    assert reliability.main(["--junit", str(tmp_path / "junit.xml")]) == 0
    assert "9,000 steps" in made.read_text()
