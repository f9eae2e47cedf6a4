"""An interrupted run of the suite continues with the cases that it had not measured, and writes the whole result."""

import json

import pytest

# The real suite, with a pool that measures in no time and is interrupted in its third case.
PROGRAM = r"""
import os, signal, sys
from pathlib import Path
from fused_grpo.bench import __main__
from fused_grpo.bench.heads import worker_pool as pool

class Instant(pool.WorkerPool):
    def measure(self, work, names, *, rounds, slow, memory):
        log = Path(sys.argv[2])
        log.write_text((log.read_text() if log.exists() else "") + work.name + "\n")
        if sys.argv[3] == "interrupted" and len(log.read_text().splitlines()) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        errors = {"value": 0.0, "d_hidden": 0.0, "d_weight": 0.0}
        return {name: pool.Measurement(seconds=[1.0] * rounds, errors=errors) for name in names}

    def longest(self, work, names, *, most):
        return {name: {"tokens": most} for name in names}

pool.WorkerPool = Instant
some = ["-m", "gpu", "--only", "loss and trainable"]
sys.exit(__main__.main(["--suite", "gpu", "--tiny", "--output", sys.argv[1], *some]))
"""


@pytest.fixture
def suite(fork_server, tmp_path):
    """Run it; its exit status, and the cases that have been measured so far."""
    program, output, log = tmp_path / "program.py", tmp_path / "out", tmp_path / "measured.txt"
    program.write_text(PROGRAM)

    def run(fault: str) -> tuple[int, list[str]]:
        # In no repository, because another test that edits a file at the same time would make it another run. And in no
        # worker of xdist, where pytest-benchmark writes no file.
        env = {"GIT_DIR": str(tmp_path / "none"), "PYTEST_XDIST_WORKER": ""}
        process = fork_server.start(program, output, log, fault, env=env)
        return process.wait(), log.read_text().splitlines() if log.exists() else process.output

    run.output = output
    return run


def test_what_was_measured_is_not_measured_again(suite):
    status, before = suite("interrupted")
    assert (status, len(before)) == (2, 3)
    assert not list(suite.output.glob("*/*.json"))
    status, measured = suite("to its end")
    assert status == 0
    again = measured[3:]
    assert again[0] == before[2], "the case that was interrupted"
    assert not set(again) & set(before[:2])
    (result,) = suite.output.glob("*/gpu-loss-and-trainable-????-??-??.json")  # and not that of all tests
    groups = {benchmark["group"] for benchmark in json.loads(result.read_text())["benchmarks"]}
    assert groups == set(measured)
    assert not (suite.output / ".partial.jsonl").exists()


@pytest.mark.full
@pytest.mark.parametrize("spoiled", ["half a line", "another run"])
def test_what_cannot_be_used_is_measured_again(suite, spoiled):
    _, before = suite("interrupted")
    kept = suite.output / ".partial.jsonl"
    if spoiled == "half a line":
        kept.write_text(kept.read_text()[:-20])
    else:
        kept.write_text(kept.read_text().replace('"run": "', '"run": "other '))
    _, measured = suite("to its end")
    assert (before[1] in measured[3:], before[0] in measured[3:]) == (True, spoiled == "another run")
