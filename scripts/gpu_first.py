"""Tests and timings for a GPU, in two commands of less than seven minutes: `gpu_first.py OUT [--stages second]`.

The stages called `first` launch every kernel once, then time a loss of 8192 and of 256 tokens beside its bare GEMMs,
full logits and TRL's, each after its check against fp64. Then come tests/gpu, beside them memcheck of compute-sanitizer
if it is installed; then, alone, passes over rows, tiles, the kernel without logits and a trace. `second`: tests/kernels
and tests/ops on the device, beside them racecheck; losses over tokens and chunks, peers, GEMMs. `trainers`: whole
trainers, for which TRL must be installed.

A stage is a process with a time limit. If a stage fails, or exceeds its limit, this is recorded and the others run;
what it printed until then counts. In OUT:

    results.jsonl    a line per result: figure, value, unit, predicted, ratio, shape, machine and commit
    stages.log       the output of all stages
    trace.json.gz    a profile of one call

It needs torch, triton, numpy, pytest and hypothesis; with pytest-xdist tests run side by side, and peers are timed if
they are installed. `--tiny` is a dry run of all stages on a CPU. The exit status is 0 if every stage was green. The
commit is read from $FUSED_GRPO_COMMIT or a file COMMIT.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LAUNCH_ALL = ROOT / "tests" / "gpu" / "launch_all.py"
LOG = "stages.log"
# Of each test as soon as it has ended, from `pytest -v`.
OUTCOME = re.compile(r"(?=.*\[ *\d+%\]).*\b(PASSED|FAILED|ERROR|SKIPPED)\b")
# Of hazards those that racecheck calls errors: a reduction across threads is a warning to it.
SANITIZED = re.compile(r"(ERROR|RACECHECK) SUMMARY: .*?(\d+) errors?")
# No other plugins: their warnings would count as errors.
PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
# A stage has so many seconds after its limit to say what it found.
GRACE = 10
MODULES = ("torch", "triton", "numpy", "pytest", "hypothesis")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A process, and its time limit."""

    name: str
    group: str = ""
    """"first", "second" or "trainers"."""
    seconds: int
    command: tuple[str | Path, ...] | None
    """None if the machine does not have what the stage needs."""
    environment: dict[str, str] = field(default_factory=dict)
    alone: bool = True
    """Whether nothing may run beside it; neighbours in the list that are not alone run side by side."""


def main(arguments: list[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="the folder for results; it is created")
    parser.add_argument("--tiny", action="store_true", help="a dry run of all stages on a CPU")
    parser.add_argument("--stages", default="first", help="stages or groups in order, with commas (default: first)")
    parser.add_argument("--seconds", type=int, default=400, help="time limit of all stages in sum (default: 400)")
    given = parser.parse_args(arguments)
    output, asked = given.output.resolve(), given.stages.split(",")
    every = stages(output, tiny=given.tiny)
    if given.tiny:  # kernels are interpreted, maybe beside other work: only what hangs is ended
        every = [replace(stage, seconds=5 * stage.seconds) for stage in every]
    names = [x for stage in every for x in (stage.group, stage.name)]
    if unknown := {*asked}.difference(names):
        parser.error(f"got --stages {','.join(sorted(unknown))}; fix: some of {', '.join(dict.fromkeys(names))}")
    chosen = {stage.name: stage for x in asked for stage in every if x in (stage.name, stage.group)}
    return run_all([*chosen.values()], output, tiny=given.tiny, seconds=given.seconds)


def stages(output: Path, *, tiny: bool) -> list[Stage]:
    """All stages, in order."""
    python, small = sys.executable, ("--tiny",) if tiny else ()
    device = {"FUSED_GRPO_TEST_DEVICE": "cpu" if tiny else "cuda", "OMP_NUM_THREADS": "2", **PLUGINS}
    pytest = (python, "-m", "pytest", "-v", "-rfEs", "-p", "no:cacheprovider", "-W", "default::UserWarning")
    spread = () if tiny or not has("xdist") else ("-p", "xdist", "--numprocesses=8", "--dist=worksteal")
    losses = ("tests/ops/test_grpo_loss.py", "tests/kernels/test_grpo_loss.py")
    both, whole = (losses, ()) if tiny else (("tests/kernels", "tests/ops"), ("--full",))
    places = [os.environ.get("PATH", ""), *(str(path) for path in Path("/usr/local").glob("cuda*/bin"))]
    sanitizer = None if tiny else shutil.which("compute-sanitizer", path=os.pathsep.join(places))

    def right(name: str, seconds: int, *command: str | Path, **environment: str) -> Stage:
        environment = device | environment
        return Stage(name=name, seconds=seconds, command=command or None, environment=environment, alone=False)

    def sanitized(*tool: str) -> Stage:
        options = ("--error-exitcode", "1", "--tool", *tool)
        command = () if sanitizer is None else (sanitizer, *options, python, LAUNCH_ALL)
        return right(tool[0], 120, *command, PYTORCH_NO_CUDA_MEMORY_CACHING="1")

    def timed(name: str, seconds: int, *, alone: bool = True) -> Stage:
        command = (python, "-m", "fused_grpo.bench.gpu.timings", name, *small, "--output", output)
        return Stage(name=name, seconds=seconds, command=command, alone=alone)

    def trained(name: str, seconds: int) -> Stage:
        installed = all(map(has, ("transformers", "accelerate", "datasets", "trl", "peft")))
        command = (python, "-m", "fused_grpo.bench.gpu.training", name, *small)
        return Stage(name=name, seconds=seconds, command=command if installed else None)

    groups = {
        "first": [
            right("launch", 70, python, LAUNCH_ALL, **({"TRITON_INTERPRET": "1"} if tiny else {})),
            timed("headline", 65),
            right("gpu", 120, *pytest, *spread, *whole, "tests/gpu"),
            sanitized("memcheck"),
            timed("warm", 90, alone=False),
            *(timed(*each) for each in (("passes", 20), ("tiles", 35), ("forward", 35), ("trace", 30))),
        ],
        "second": [
            right("device", 150, *pytest, *spread, *both),
            sanitized("racecheck", "--racecheck-report", "all"),
            timed("warm_peers", 90, alone=False),
            *(timed(*each) for each in (("losses", 45), ("peers", 140), ("ceilings", 10), ("gemms", 20))),
        ],
        "trainers": [trained("longest", 150), trained("phase", 200), trained("published", 200)],
    }
    return [replace(stage, group=group) for group, members in groups.items() for stage in members]


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def run_all(chosen: list[Stage], output: Path, *, tiny: bool, seconds: int) -> int:
    output.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    records = Records(output / "results.jsonl", {"tiny": tiny, "commit": commit()})
    if run([machine(tiny=tiny)], output, records, end) != ["green"]:
        print((output / LOG).read_text()[-2000:], file=sys.stderr)
        return 1
    results: list[tuple[Stage, str]] = []
    for alone, group in itertools.groupby(chosen, key=lambda stage: stage.alone):
        for stages in [[stage] for stage in group] if alone else [list(group)]:
            results += zip(stages, run(stages, output, records, end), strict=True)
    print()
    for stage, status in results:
        print(f"{stage.name:12} {stage.group:12} {status}")
    red = [stage for stage, status in results if status not in ("green", "absent")]
    print(f"{len(results) - len(red)} of {len(results)} stages green; results in {output}")
    return bool(red)


def machine(*, tiny: bool) -> Stage:
    """The first stage: facts about the machine."""
    command = (sys.executable, "-m", "fused_grpo.bench.gpu.timings", "machine", *(("--tiny",) if tiny else ()))
    return Stage(name="machine", seconds=120, command=command)


def commit() -> str | None:
    """The commit as given by the caller: there may be no git on this machine."""
    file = ROOT / "COMMIT"
    return os.environ.get("FUSED_GRPO_COMMIT") or (file.read_text().strip() if file.exists() else None)


class Records:
    """The file of results. Each line is written as soon as it is known."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self.path, self.facts = path, facts

    def add(self, stage: str, result: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"stage": stage, **result, **self.facts}) + "\n")

    def learn(self, facts: dict[str, Any]) -> None:
        """Add facts about the machine to every line from now on."""
        names = ("gpu", "memory", "cuda", "fused_grpo", "python", *MODULES)
        self.facts |= {name: facts[name] for name in names if name in facts}
        self.add("machine", {"figure": "machine", "facts": facts})


def run(stages: list[Stage], output: Path, records: Records, end: float) -> list[str]:
    """Run stages side by side, at most until `end`, and record their results: "green", "absent", or what went wrong."""
    # `timeout` ends this process alone, and its stages would go on beside what is measured next.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    running = [Running(stage, output, records, end) for stage in stages]
    try:
        while [one for one in running if not one.ended()]:
            time.sleep(0.05)
    finally:
        for one in running:
            one.close()
        signal.signal(signal.SIGTERM, before)
    return [one.status or "" for one in running]


class Running:
    """A stage that runs. Its output goes to a file of its own, and from there to that of all stages when it ended."""

    def __init__(self, stage: Stage, output: Path, records: Records, end: float) -> None:
        self.stage, self.records, self.log = stage, records, output / LOG
        self.start = time.monotonic()
        self.limit = min(stage.seconds, end - self.start)
        self.own, self.line, self.late = output / f"{stage.name}.log", "", False
        self.outcomes = Counter[str]()  # of tests
        self.status: str | None = None
        self.process: subprocess.Popen[bytes] | None = None
        if stage.command is None:
            self._end("absent")
        elif self.limit <= 1:
            self._end("left out: the time of all stages is over")
        else:
            self._launch(stage.command)

    def _launch(self, command: tuple[str | Path, ...]) -> None:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        if self.stage.environment.get("FUSED_GRPO_TEST_DEVICE") != "cpu":
            env.pop("TRITON_INTERPRET", None)
        given: dict[str, Any] = {"cwd": ROOT, "env": env | self.stage.environment, "stderr": subprocess.STDOUT}
        given |= {"start_new_session": True, "preexec_fn": end_with_parent}
        with self.own.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, **given)
        self.said = self.own.open(errors="replace")

    def ended(self) -> bool:
        """Whether it has ended. Records what it said since the last call, and has it end after its limit."""
        if self.process is None:
            return True
        code = self.process.poll()  # before it is read, so that nothing is said after the last reading
        lines = (self.line + self.said.read()).split("\n")
        self.line = lines.pop() if code is None else ""
        for line in lines:
            self.outcomes.update(map(str.lower, OUTCOME.findall(line)))
            for figure in figures_in(line):
                note(figure, self.stage, self.records)
        if code is not None:
            late = f"past its limit of {self.limit:.0f} s"
            self._end(late if self.late else f"failed with status {code}" if code else "green")
            return True
        over = time.monotonic() - self.start - self.limit
        if over > 0 and not self.late:
            self.late = True
            self.process.send_signal(signal.SIGINT)  # pytest prints its failures then
        if over > GRACE:
            self.process.kill()
        return False

    def _end(self, status: str) -> None:
        self.close()
        if self.outcomes:
            said = ", ".join(f"{number} {what}" for what, number in self.outcomes.items())
            count = {"figure": "tests", "value": self.outcomes["passed"], "unit": "passed", "note": said}
            note(count, self.stage, self.records)
        self.status, seconds = status, time.monotonic() - self.start
        self.records.add(self.stage.name, {"figure": "seconds", "value": round(seconds, 1), "status": status})
        print(f"--- {self.stage.name}: {status}, {seconds:.1f} s", flush=True)

    def close(self) -> None:
        """End the process and its children, and move its output."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None
        self.said.close()
        with self.log.open("ab") as file:
            file.write(b"=== " + self.stage.name.encode() + b"\n" + self.own.read_bytes())
        self.own.unlink()


def end_with_parent() -> None:
    """In a stage: where this process is killed, the stage is, by PR_SET_PDEATHSIG."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def figures_in(line: str) -> Iterator[dict[str, Any]]:
    """The figures in a line of output: JSON of what is measured, failures of tests, counts of compute-sanitizer."""
    if line.startswith("{"):
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)
    elif line.startswith(("FAILED ", "ERROR ")):
        yield {"figure": "failed", "note": line.strip()[:500]}
    elif match := SANITIZED.search(line):
        name = {"ERROR": "memcheck", "RACECHECK": "racecheck"}[match[1]]
        yield {"figure": name, "value": int(match[2]), "unit": "errors", "note": line.strip("= ")}


def note(figure: dict[str, Any], stage: Stage, records: Records) -> None:
    """Record a figure and print it."""
    if "machine" in figure:
        records.learn(figure["machine"])
        print(", ".join(f"{name} {value}" for name, value in records.facts.items()), flush=True)
        return
    records.add(stage.name, figure)
    value, predicted = figure.get("value"), figure.get("predicted")
    said = figure.get("note") or ""
    if value is not None and not said:
        said = f"{value:10.4g} {figure.get('unit', ''):8}"
        said += f" predicted {predicted:10.4g}   x {value / predicted:.2f}" if predicted else ""
        said += f" promised {figure['promised']}" if figure.get("promised") else ""
    shape = " ".join(f"{name}={x}" for name, x in (figure.get("shape") or {}).items())
    print(f"{stage.name:10} {figure.get('figure', '?')[:48]:48} {shape:36} {said}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
