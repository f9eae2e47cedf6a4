"""Run every test that makes something fail, and write docs/reliability.md's table of them: `make faults`.

A test is one fault, or as many as it has random inputs (`portion` in tests/conftest.py); a property test counts once.
A fault is survived where the run ends or goes on as the test demands; else it is bad, and the exit status is 1.
"""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reliability.md"
# What fails -> its tests.
AREAS = {
    "reward functions": ["tests/faults/test_rewards.py", "tests/trainer/rewards"],
    "tools and environments": ["tests/faults/test_tools.py", "tests/trainer/episodes/test_isolated_tools.py"],
    "dataset rows": ["tests/faults/test_rows.py", "tests/hostile/test_data.py"],
    "options": [f"tests/hostile/test_{name}.py" for name in ("config", "commands", "models", "scripts")],
    "rollout engines and servers": [
        *("tests/faults/test_engines.py", "tests/faults/test_leftovers.py"),
        *("tests/trainer/engines/test_vllm_server.py", "tests/trainer/collect/test_rollout_failures.py"),
    ],
    "the training step": ["tests/faults/test_nonfinite.py"],
    "one of several processes": [f"tests/faults/test_{name}.py" for name in ("peers", "alike", "starts")],
    "checkpoints and disks": [
        *("tests/faults/test_checkpoints.py", "tests/faults/test_disk_full.py"),
        *("tests/faults/test_hostile_checkpoints.py", "tests/hostile/test_resumed.py"),
    ],
    "kills and signals": [
        *("tests/faults/test_kills.py", "tests/faults/test_episode_kills.py"),
        "tests/faults/test_stopping.py",
    ],
    "attacks": ["tests/security"],
    "arguments of the ops": ["tests/hostile/test_ops.py", "tests/ops/test_bad_input.py"],
}


def main(arguments: list[str]) -> int:
    """Run pytest with these arguments and rewrite the table; 1 where a fault was bad."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "junit.xml")
        tests = [path for paths in AREAS.values() for path in paths]
        command = [sys.executable, "-m", "pytest", "-q", "--numprocesses=3", "--dist=loadfile", f"--junitxml={result}"]
        subprocess.run([*command, *tests, *arguments], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
        cases = list(ElementTree.parse(result).getroot().iter("testcase"))
    rows = [(area, *count([case for case in cases if is_of(case, paths)])) for area, paths in AREAS.items()]
    total = ("all", *(sum(row[column] for row in rows) for column in (1, 2, 3)))
    lines = [f"| {' | '.join(map(str, row))} |" for row in (*rows, total)]
    head = ["| what fails | tried | survived | bad |", "|---|---:|---:|---:|"]
    shown = "\n".join(
        [f"On {datetime.date.today()}, `make faults {' '.join(arguments)}".strip() + "`:", "", *head, *lines]
    )
    print(shown)
    page, places = re.subn(
        r"(<!-- faults -->\n).*?(\n<!-- end -->)", rf"\g<1>\n{shown}\n\g<2>", PAGE.read_text(), flags=re.DOTALL
    )
    assert places == 1, f"{PAGE} has no place for the table"
    PAGE.write_text(page)
    return int(total[3] > 0)


def is_of(case: ElementTree.Element, paths: list[str]) -> bool:
    """Whether a test lies in one of these files or folders; pytest writes the file with dots."""
    file = case.attrib["classname"] + "."
    return any(file.startswith(path.removesuffix(".py").replace("/", ".") + ".") for path in paths)


def count(cases: list[ElementTree.Element]) -> tuple[int, int, int]:
    """(tried, survived, bad), without what was skipped."""
    tried = bad = 0
    for case in cases:
        if case.find("skipped") is not None:
            continue
        inputs = sum(int(entry.attrib["value"]) for entry in case.iter("property") if entry.attrib["name"] == "tried")
        tried += inputs or 1
        bad += case.find("failure") is not None or case.find("error") is not None
    return tried, tried - bad, bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
