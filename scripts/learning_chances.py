"""How often a test of learning fails by chance: `python scripts/learning_chances.py` prints a table.

It runs the tests marked `learning` with many seeds, and a few seeds with the arithmetic of another CPU, and writes what
each run has learned to bench/results/<machine>/learning-<date>.json. The chance is that of a further run with less than
the test demands, by Student's t with the mean and standard deviation of the runs. tests/test_learning_chances.py keeps
the tests to at most 1 in 1,000.

The runs sample with transformers' generate. `make demo` and tests/test_demo.py sample the same task with vLLM, from the
same distributions: its log-probs agree to 1e-6.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fused_grpo.env import environment

ROOT = Path(__file__).resolve().parent.parent
TESTS = [f"tests/trainer/recipes/test_{name}.py" for name in ("arithmetic", "calculator")]
TESTS += ["tests/test_examples.py", "tests/trainer/test_distillation.py"]
# (environment, seeds)
RUNS = (({}, 20), ({"ATEN_CPU_CAPABILITY": "default"}, 4))


def main(arguments: Sequence[str]) -> None:
    (native, other) = (measured({**os.environ, **env}, seeds, arguments) for env, seeds in RUNS)
    today = datetime.date.today().isoformat()
    path = ROOT / "bench" / "results" / f"cpu-{os.cpu_count()}-cores" / f"learning-{today}.json"
    header = {"made_by": "python scripts/learning_chances.py", "date": today, "environment": environment()}
    path.write_text(json.dumps({**header, "native": native, "ATEN_CPU_CAPABILITY=default": other}, indent=1) + "\n")
    print(f"{path}\n\n| what | seeds | mean | sd | demanded | chance | another CPU |")
    print("|---|---:|---:|---:|---:|---:|---|")
    for what, (least, values) in native.items():
        spread = f"{len(values)} | {statistics.mean(values):.3f} | {statistics.stdev(values):.3f} | {least}"
        elsewhere = ", ".join(f"{value:.2f}" for value in other[what][1])
        print(f"| {what} | {spread} | {chance(values, least):.0e} | {elsewhere} |")


def measured(env: dict[str, str], seeds: int, arguments: Sequence[str]) -> dict[str, tuple[float, list[float]]]:
    """What was measured -> (the least that its test accepts, what it was with each seed)."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        pytest = [sys.executable, "-m", "pytest", "-q", "--full", "-m", "learning", f"--seeds={seeds}"]
        pytest += ["-o", "junit_family=xunit1", f"--junitxml={report}"]
        subprocess.run([*pytest, *TESTS, *arguments], cwd=ROOT, env={**env, "OMP_NUM_THREADS": "1"}, check=False)
        records = ElementTree.parse(report).iterfind(".//property[@name='learned']")
        values = dict[str, tuple[float, list[float]]]()
        for record in records:
            figures: dict[str, Any] = json.loads(record.attrib["value"])
            values.setdefault(figures["what"], (figures["least"], []))[1].append(figures["found"])
    return values


def chance(values: Sequence[float], least: float) -> float:
    """The probability that one more value of the same normal distribution is below `least`."""
    n, mean, sd = len(values), statistics.mean(values), statistics.stdev(values)
    margin, grid = (mean - least) / (sd * math.sqrt(1 + 1 / n)), [x / 1000 for x in range(-100_000, 100_001)]
    density = [(1 + x * x / (n - 1)) ** (-n / 2) for x in grid]
    return sum(p for x, p in zip(grid, density, strict=True) if x > margin) / sum(density)


if __name__ == "__main__":
    main(sys.argv[1:])
