"""`make test-cpus` has a list of what it leaves out, not of what it runs; nothing that compares results is on it."""

import re
from pathlib import Path
from typing import Any

import pytest
import test_cpus as cpus

TESTS = Path(__file__).parent
# What a test calls that compares results of arithmetic, or demands that a run has learned.
COMPARES = re.compile(r"assert_close|allclose|learned\(|logp_difference")
LEFT_OUT = [(path, reason) for reason, paths in cpus.LEFT_OUT.items() for path in paths]


@pytest.mark.parametrize(("path", "reason"), LEFT_OUT)
def test_what_is_left_out_is_there_and_its_reason_is_true(path: str, reason: str) -> None:
    """fix: take it off the list, or move what compares results to a file of its own"""
    files = sorted((TESTS / path).rglob("test_*.py")) if (TESTS / path).is_dir() else [TESTS / path]
    assert files
    texts = {file: file.read_text() for file in files}
    if not reason.startswith(("needs a GPU", "compiles for GPUs", "runs the tests of other files")):
        assert [file.name for file, text in texts.items() if COMPARES.search(text)] == []
    elif reason.startswith("needs a GPU"):
        assert any(re.search("gpu|cuda|device", text, re.IGNORECASE) for text in texts.values())


def test_a_row_has_the_code_of_its_cpu_and_all_other_tests(monkeypatch, capsys) -> None:
    seen: list[tuple[list[str], dict[str, str]]] = []

    def run_tests(python: Any, tests: list[str], *, env: dict[str, str]) -> Any:
        seen.append((tests, env))
        return len(seen) > 1, (5, len(seen) == 1, 3, "0.1")

    monkeypatch.delenv("MKL_CBWR", raising=False)  # of the row that runs this
    monkeypatch.setattr(cpus, "run_tests", run_tests)
    monkeypatch.setattr(cpus, "this_cpu", lambda: ({"avx2"}, "a CPU"))
    monkeypatch.setattr(cpus, "DIGEST", "import os; print(os.environ['OMP_NUM_THREADS'])")
    monkeypatch.setattr(cpus, "ROWS", [row for row in cpus.ROWS if row.variable in ("OMP_NUM_THREADS", "MKL_CBWR")])
    assert cpus.main(["-k", "loop"]) == 1
    paths = [f"--ignore=tests/{path}" for path, _ in LEFT_OUT]
    assert [tests for tests, _ in seen] == [["tests", *paths, "-k", "loop"]] * 4
    assert [env["OMP_NUM_THREADS"] for _, env in seen] == ["1", "2", "1", "1"]
    assert all(env["OMP_WAIT_POLICY"] == "PASSIVE" for _, env in seen)
    assert [env.get("MKL_CBWR") for _, env in seen] == [None, None, "COMPATIBLE", "AVX2"]
    table = capsys.readouterr().out.splitlines()
    assert table[0] == "a CPU"
    assert table[4:6] == [
        "| OMP_NUM_THREADS=1 | 1 | 5 | True | 3 | 0.1 |",
        "| OMP_NUM_THREADS=2 | 2 | 5 | False | 3 | 0.1 |",
    ]
    assert table[-1].startswith("| MKL_CBWR=AVX512 | | not on this CPU, which has no avx512bw, ")


@pytest.mark.parametrize("flags", [{"avx2"}, {"avx2", "amx_tile"}])
def test_what_aborts_with_amx_is_left_out_there_alone(monkeypatch, flags) -> None:
    seen = []
    monkeypatch.setattr(cpus, "run_tests", lambda python, tests, *, env: seen.append(tests) or (True, (1, 0, 0, "0.1")))
    monkeypatch.setattr(cpus, "this_cpu", lambda: (flags, "a CPU"))
    monkeypatch.setattr(cpus, "DIGEST", "print('bits')")
    assert cpus.main(["ONEDNN_MAX_CPU_ISA=AVX2", "MKL_CBWR=AVX2"]) == 0
    (ignored,) = cpus.ABORT_WITH_AMX["ONEDNN_MAX_CPU_ISA"]
    assert (TESTS.parent / ignored.removeprefix("--ignore=")).exists()
    assert [ignored in tests for tests in seen] == [False, "amx_tile" in flags]


def test_rows_that_are_named_run_alone(monkeypatch, capsys) -> None:
    monkeypatch.setattr(cpus, "run_tests", lambda python, tests, *, env: (tests[-1] == "-x", (1, 0, 0, "0.1")))
    monkeypatch.setattr(cpus, "DIGEST", "print('bits')")
    assert cpus.main(["MKL_CBWR=COMPATIBLE", "OMP_NUM_THREADS=2", "-x"]) == 0
    rows = [line.split()[1] for line in capsys.readouterr().out.splitlines()[4:]]
    assert rows == ["OMP_NUM_THREADS=2", "MKL_CBWR=COMPATIBLE"]
