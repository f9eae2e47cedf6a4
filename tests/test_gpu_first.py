"""The first command on a GPU, as a dry run where there is only what it needs, and what it says of stages that fail."""

import contextlib
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import gpu_first
import psutil
import pytest
from bare_venv import bare_venv

from fused_grpo import kernels

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "gpu_first.py"


def cpu_seconds() -> float:
    """CPU time of all processes that have ended, which is nearly the same whatever runs beside them."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def results_in(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


# With `--full` all of them; the other parts of the timings are tested in tests/bench/test_gpu_timings.py, too.
SOME = ("launch", "headline", "gpu", "device", "peers", "losses", "trace")


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory, pytestconfig) -> tuple[subprocess.CompletedProcess[str], Path, float]:
    """What a run said in an environment of five packages, what it left, and its CPU time in seconds."""
    folder = bare_venv(tmp_path_factory.mktemp("bare"), "torch", "triton", "numpy", "pytest", "hypothesis")
    env = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "HOME": str(folder), "FUSED_GRPO_COMMIT": "abc"}
    env |= {"OMP_NUM_THREADS": "1"}
    start = cpu_seconds()
    stages = "first,second" if pytestconfig.getoption("full") else ",".join(SOME)
    command = ["python", SCRIPT, folder / "out", "--tiny", "--seconds", "1800", "--stages", stages]
    process = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=1800)
    return process, folder / "out", cpu_seconds() - start


def test_a_dry_run_with_five_packages_ends_green(dry_run, pytestconfig):
    process, out, seconds = dry_run
    assert process.returncode == 0, process.stdout + process.stderr
    print(f"{seconds:.0f} s of CPU time\n{process.stdout}")
    assert seconds < 180
    ends = {line["stage"]: line["status"] for line in results_in(out) if line["figure"] == "seconds"}
    names = [stage.name for stage in gpu_first.stages(out, tiny=True) if stage.group != "trainers"]
    assert ends.keys() == {"machine", *(names if pytestconfig.getoption("full") else SOME)}
    sanitized = {"memcheck", "racecheck"}
    assert {name for name, status in ends.items() if status != "green"} == sanitized & ends.keys()
    said = (out / "stages.log").read_text()
    assert all(f"=== {name}\n" in said for name in ends.keys() - sanitized)
    assert {file.name for file in out.iterdir()} == {"results.jsonl", "stages.log", "trace.json.gz"}


def test_every_result_says_where_it_comes_from(dry_run):
    lines = results_in(dry_run[1])
    assert {line["commit"] for line in lines} == {"abc"}
    measured = [line for line in lines if line["stage"] == "losses" and line["figure"] != "seconds"]
    assert len(measured) > 8
    for line in measured:
        assert line["value"] > 0
        assert line["unit"] in ("ms", "GiB")
        assert line["gpu"] == "cpu"
        assert {"torch", "triton", "numpy", "python", "shape", "predicted", "ratio"} <= line.keys()


def test_tests_run_and_absent_peers_are_said_to_be(dry_run):
    lines = results_in(dry_run[1])
    passed = {line["stage"]: line["value"] for line in lines if line["figure"] == "tests"}
    assert passed["gpu"] > 40
    assert passed["device"] > 40
    absent = [line for line in lines if (line["stage"], line["figure"]) == ("peers", "TRL: loss, trainable")]
    assert [line["shape"].get("idle") for line in absent] == [None, 0.5]
    assert all(line["value"] is None and line["note"].startswith("absent: is not installed") for line in absent)


def test_the_headline_has_ours_its_products_full_logits_and_trl(dry_run):
    figures = {line["figure"]: line["value"] for line in results_in(dry_run[1]) if line["stage"] == "headline"}
    for name in ("fused-grpo", "full logits"):
        assert figures[f"{name}: loss, trainable: error of value"] < 1e-3
        assert figures[f"{name}: loss, trainable"] > 0
    assert figures["fused-grpo / products alone: loss, trainable"] > 0
    assert figures["TRL: loss, trainable"] is None  # which is not installed there


def test_peers_and_the_promised_ratios_are_measured(dry_run):
    lines = {line["figure"]: line for line in results_in(dry_run[1]) if line["stage"] == "peers"}
    assert lines["full logits: loss, trainable"]["value"] > 0
    ours, alone = (lines[f"{name}: logprobs, no_grad"]["value"] for name in ("fused-grpo", "products alone"))
    ratio = lines["fused-grpo / products alone: logprobs, no_grad"]
    assert ratio["value"] == ours / alone
    assert ratio["promised"] == "<= 1.2"
    assert lines["fused-grpo, 50% idle / none: loss, trainable"]["value"] > 0


def stage(name: str, code: str, *, seconds: int = 20, group: str = "first", alone: bool = True):
    command = (sys.executable, "-u", "-c", code)
    return gpu_first.Stage(name=name, group=group, seconds=seconds, command=command, alone=alone)


@pytest.mark.parametrize("group", ["first", "second"])
def test_a_group_ends_within_seven_minutes(group, tmp_path):
    """Two groups and a start have to fit a loan of 15 minutes; facts about the machine take ten seconds."""
    chosen = [stage for stage in gpu_first.stages(tmp_path, tiny=False) if stage.group == group]
    some_at_once = itertools.groupby(chosen, key=lambda stage: stage.alone)
    assert sum((sum if alone else max)(stage.seconds for stage in stages) for alone, stages in some_at_once) <= 380


def test_the_first_stages_are_the_shortest_way_to_what_matters(tmp_path):
    names = [stage.name for stage in gpu_first.stages(tmp_path, tiny=False)]
    assert names[:3] == ["launch", "headline", "gpu"]


FAILS = stage("fails", "raise SystemExit('FAILED tests/test_x.py::test_y - AssertionError')")
# Its child holds the pipe, and would go on.
HANGS = stage(
    "hangs",
    'import subprocess, sys; print(\'{"figure": "early", "value": 1.0}\'); '
    "subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])",
    seconds=3,
)
WORKS = stage("works", 'print(\'{"figure": "x", "value": 3.0, "unit": "ms", "predicted": 2.0, "ratio": 1.5}\')')
ABSENT = gpu_first.Stage(name="absent", group="first", seconds=1, command=None)
TESTS = """
import os, signal, time

def test_measures():
    print('{"figure": "measured", "value": 5.0}')

def test_fails():
    assert False

def test_ends_pytest():
    time.sleep(1)
    os.kill(os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    def run(*stages, arguments: tuple[str, ...] = ()):
        """(exit status, how each stage ended, what was printed)"""
        here = stage("machine", 'print(\'{"machine": {"gpu": "none", "torch": "0"}}\')')
        monkeypatch.setattr(gpu_first, "machine", lambda *, tiny: here)
        monkeypatch.setattr(gpu_first, "stages", lambda output, *, tiny: list(stages))
        status = gpu_first.main([str(tmp_path / "out"), *arguments])
        return status, {x["stage"]: x for x in results_in(tmp_path / "out")}, capsys.readouterr().out

    return run


def test_a_stage_that_fails_or_goes_on_is_said_to_and_the_next_one_runs(run, tmp_path):
    start = time.monotonic()
    status, last, said = run(FAILS, HANGS, ABSENT, WORKS)
    assert time.monotonic() - start < 20
    assert status == 1
    assert last["fails"]["status"] == "failed with status 1"
    assert last["hangs"]["status"] == "past its limit of 3 s"
    assert last["absent"]["status"] == "absent"
    assert last["works"]["status"] == "green"
    assert " 3 ms       predicted          2   x 1.50" in said
    assert "3 of 4 stages green" not in said
    assert "2 of 4 stages green" in said
    kept = results_in(tmp_path / "out")
    assert [line["note"] for line in kept if line["figure"] == "failed"] == [
        "FAILED tests/test_x.py::test_y - AssertionError"
    ]
    assert [line["value"] for line in kept if line["figure"] == "early"] == [1.0]


@pytest.mark.parametrize("spread", [(), ("-p", "xdist", "--numprocesses=1")])
def test_tests_that_are_killed_keep_counts_and_figures(run, tmp_path, spread, monkeypatch):
    """As those are that do not return from CUDA: pytest has no last word."""
    if spread:
        pytest.importorskip("xdist")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "imported"))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # else the test below would end the worker that runs this
    gpu_stage = next(stage for stage in gpu_first.stages(tmp_path, tiny=True) if stage.name == "gpu")
    file = tmp_path / "test_of_a_stage.py"
    file.write_text(TESTS)
    command = (*gpu_stage.command[: gpu_stage.command.index("tests/gpu")], *spread, "-p", "device_run", file)
    _, last, _ = run(replace(gpu_stage, command=command, seconds=120))
    assert last["gpu"]["status"] == "failed with status -9"
    lines = results_in(tmp_path / "out")
    assert [line["value"] for line in lines if line["figure"] == "measured"] == [5.0]
    assert [line["note"] for line in lines if line["figure"] == "tests"] == ["1 passed, 1 failed"]


def test_a_stage_ends_with_the_run_that_is_ended_from_outside(run, tmp_path):
    """As `timeout` does: a stage that went on would use the GPU beside the next run."""
    code = (
        "import os, signal, time; print(os.getpid(), flush=True); os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    )
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        run(stage("goes_on", code))
    name, number = (tmp_path / "out" / "stages.log").read_text().splitlines()[-2:]
    assert name == "=== goes_on"
    with pytest.raises(ProcessLookupError):
        os.kill(int(number), 0)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_stage_ends_with_the_run_that_is_killed(tmp_path):
    goes_on = (sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    code = f"""if True:
        import gpu_first, os, pathlib, signal, time
        stage, out = gpu_first.Stage(name="goes_on", seconds=60, command={goes_on!r}), pathlib.Path({str(tmp_path)!r})
        gpu_first.Running(stage, out, gpu_first.Records(out / "results.jsonl", {{}}), time.monotonic() + 60)
        while not (out / "goes_on.log").read_text().endswith("\\n"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)"""
    assert subprocess.run([sys.executable, "-c", code], cwd=SCRIPT.parent).returncode == -signal.SIGKILL
    number = int((tmp_path / "goes_on.log").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(number).wait(10) is None


def test_what_compute_sanitizer_found_is_a_figure():
    said = ["========= ERROR SUMMARY: 3 errors", "===== RACECHECK SUMMARY: 9 hazards displayed (2 errors, 7 warnings)"]
    figures = [figure for line in said for figure in gpu_first.figures_in(line)]
    assert [(figure["figure"], figure["value"]) for figure in figures] == [("memcheck", 3), ("racecheck", 2)]


def test_stages_that_are_not_alone_run_side_by_side(run, tmp_path):
    waits = "import pathlib, time\nwhile not pathlib.Path({!r}).exists(): time.sleep(0.01)\nprint('=== waited')"
    makes = "import pathlib; pathlib.Path({!r}).touch()"
    first, second = (str(tmp_path / name) for name in ("first", "second"))
    one = stage("one", waits.format(first), alone=False)
    two = stage("two", f"{makes.format(first)}\n{waits.format(second)}", alone=False, seconds=2)
    _, last, _ = run(one, two, stage("alone", makes.format(second)))
    ends = {name: line["status"] for name, line in last.items()}
    assert ends == {"machine": "green", "one": "green", "two": "past its limit of 2 s", "alone": "green"}
    log = (tmp_path / "out" / "stages.log").read_text()
    assert log.index("=== one\n=== waited\n") < log.index("=== two\n") < log.index("=== alone\n")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"results.jsonl", "stages.log"}


def test_with_all_stages_green_it_ends_with_0(run):
    assert run(WORKS, ABSENT)[0] == 0


def test_stages_share_a_limit(run):
    status, last, _ = run(HANGS, WORKS, arguments=("--seconds", "2"))
    assert status == 1
    assert last["hangs"]["status"].startswith("past its limit")
    assert last["works"]["status"] == "left out: the time of all stages is over"


def test_some_stages_can_be_chosen_and_no_others(run):
    timing = gpu_first.Stage(name="costs", group="second", seconds=9, command=WORKS.command)
    _, last, _ = run(WORKS, timing, arguments=("--stages", "second"))
    assert list(last) == ["machine", "costs"]
    _, last, _ = run(WORKS, timing, arguments=("--stages", "second,works"))
    assert list(last) == ["machine", "costs", "works"]
    with pytest.raises(SystemExit):
        run(WORKS, arguments=("--stages", "work"))


def test_a_sanitizer_would_see_every_kernel(dry_run):
    for name in {*kernels.__all__} - {"Divergence", "empty_tile", "is_available", "prefers_tiles"}:
        assert f"kernels.{name}(" in gpu_first.LAUNCH_ALL.read_text(), name
    said = [line["figure"] for line in results_in(dry_run[1]) if line["stage"] == "launch"]
    assert "every kernel was launched" in said, dry_run[0].stderr


def test_without_a_gpu_it_says_so_and_runs_nothing(tmp_path):
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.run([sys.executable, SCRIPT, tmp_path], env=env, capture_output=True, text=True, timeout=120)
    assert process.returncode == 1
    assert "which finds no GPU; fix: --tiny" in process.stderr
    assert [line["figure"] for line in results_in(tmp_path)] == ["seconds"]
