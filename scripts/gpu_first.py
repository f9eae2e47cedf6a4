"""Tests and timings for a GPU that has not been tried yet, within ten minutes: `gpu_first.py OUT [--tiny]`.

First come the tests of correctness, side by side: the vendor's GEMMs with our arguments, tests/gpu, tests/kernels and
tests/ops on the device, and compute-sanitizer if it is installed; beside them the stage `warm` compiles what timings
launch. Then come timings, alone and each beside its prediction: peers, losses, a trace, tiles, kernels, ceilings and
GEMMs. Whole trainers are runs of their own, `--stages phase`, `longest` and `published`, for which TRL must be
installed. A stage is a process with a time limit. If a stage fails, or exceeds its limit, this is recorded and the
others run. In OUT:

    results.jsonl    a line per result: figure, value, unit, predicted, ratio, shape, machine and commit
    stages.log       the output of all stages
    trace.json.gz    a profile of one call

It needs torch, triton, numpy, pytest and hypothesis; peers are timed if they are installed. `--tiny` rehearses all
stages on a CPU. The exit status is 0 if every stage was green. The commit is read from $FUSED_GRPO_COMMIT or a file
COMMIT.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOG = "stages.log"
SUMMARY = re.compile(r"(\d+) (passed|failed|errors?|skipped|deselected)\b")
# No other plugins: their warnings would count as errors.
PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
# A stage has so many seconds after its limit to say what it found.
GRACE = 10
MODULES = ("torch", "triton", "numpy", "pytest", "hypothesis")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A process, and its time limit."""

    name: str
    group: str
    """"correctness", "timing" or "trainers"."""
    seconds: int
    command: tuple[str | Path, ...] | None
    """None if the machine does not have what the stage needs."""
    environment: dict[str, str] = field(default_factory=dict)
    alone: bool = True
    """Whether nothing may run beside it; neighbours in the list that are not alone run side by side."""


def main(arguments: list[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, nargs="?", help="the folder for results; it is created")
    parser.add_argument("--tiny", action="store_true", help="rehearse all stages on a CPU")
    parser.add_argument(
        "--stages", help="names of stages or groups in order, separated by commas (default: all but trainers)"
    )
    parser.add_argument("--list", action="store_true", help="list the stages, and run none")
    parser.add_argument("--seconds", type=int, default=570, help="time limit of all stages in sum (default: 570)")
    given = parser.parse_args(arguments)
    found = stages((given.output or Path()).resolve(), tiny=given.tiny)
    if given.tiny:  # kernels are interpreted, maybe beside other work: only what hangs is ended
        found = [replace(stage, seconds=5 * stage.seconds) for stage in found]
    known = {x for stage in found for x in (stage.name, stage.group)}
    asked = given.stages.split(",") if given.stages else [x for x in ("correctness", "timing") if x in known]
    chosen = {stage.name: stage for x in asked for stage in found if x in (stage.name, stage.group)}
    if unknown := {*asked} - known:
        parser.error(f"got --stages {','.join(sorted(unknown))}; fix: --list shows them")
    if given.list:
        for stage in chosen.values() if given.stages else found:
            print(f"{stage.name:12} {stage.group:12} {stage.seconds:4} s  {shown(stage)}")
        return 0
    if given.output is None:
        parser.error("got no folder for results")
    return run_all([*chosen.values()], given.output.resolve(), tiny=given.tiny, seconds=given.seconds)


def stages(output: Path, *, tiny: bool) -> list[Stage]:
    """All stages, in order."""
    python = sys.executable
    device = {"FUSED_GRPO_TEST_DEVICE": "cpu" if tiny else "cuda", "OMP_NUM_THREADS": "2", **PLUGINS}
    # -rP shows the output of green tests, too: it has figures.
    pytest = (python, "-m", "pytest", "-v", "-rfEsP", "-p", "no:cacheprovider", "-W", "default::UserWarning")
    spread = () if tiny or not has("xdist") else ("-p", "xdist", "--numprocesses=8", "--dist=worksteal")
    whole = () if tiny else ("--full",)
    some = ("tests/ops/test_grpo_loss.py", "tests/kernels/test_grpo_loss.py")
    both = some if tiny else ("tests/kernels", "tests/ops")
    sanitizer = None if tiny else sanitizer_command(python)

    def right(name: str, seconds: int, *command: str | Path) -> Stage:
        return Stage(name=name, group="correctness", seconds=seconds, command=command, environment=device, alone=False)

    def timed(name: str, seconds: int, *, alone: bool = True) -> Stage:
        command = (python, "-m", "fused_grpo.bench.gpu.timings", name, *(("--tiny",) if tiny else ()))
        return Stage(name=name, group="timing", seconds=seconds, command=(*command, "--output", output), alone=alone)

    timings = {"peers": 130, "losses": 90, "trace": 45, "tiles": 90}
    timings |= {"forward": 60, "ceilings": 30, "gemms": 60, "passes": 45}
    trainers = {"phase": 400, "longest": 400, "published": 400}
    return [
        right("products", 60, *pytest, "tests/gpu/test_gemms.py"),
        right("gpu", 150, *pytest, *spread, *whole, "tests/gpu", "--deselect", "tests/gpu/test_gemms.py"),
        right("device", 150, *pytest, *spread, *both),
        Stage(name="sanitizer", group="correctness", seconds=110, command=sanitizer, alone=False),
        timed("warm", 90, alone=False),
        *(timed(name, seconds) for name, seconds in timings.items()),
        *(
            Stage(name=part, group="trainers", seconds=seconds, command=whole_trainers(part, tiny=tiny))
            for part, seconds in trainers.items()
        ),
    ]


def has(module: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(module) is not None


def whole_trainers(part: str, *, tiny: bool) -> tuple[str, ...] | None:
    """None where what they need is not installed."""
    if not all(map(has, ("transformers", "accelerate", "datasets", "trl", "peft"))):
        return None
    return (sys.executable, "-m", "fused_grpo.bench.gpu.training", part, *(("--tiny",) if tiny else ()))


def sanitizer_command(python: str) -> tuple[str | Path, ...] | None:
    """Both tools over every kernel at small shapes, or None where there is no compute-sanitizer."""
    places = [os.environ.get("PATH", ""), *(str(path) for path in Path("/usr/local").glob("cuda*/bin"))]
    found = shutil.which("compute-sanitizer", path=os.pathsep.join(places))
    return None if found is None else (python, ROOT / "tests" / "gpu" / "launch_all.py", found)


def run_all(chosen: list[Stage], output: Path, *, tiny: bool, seconds: int) -> int:
    output.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    records = Records(output / "results.jsonl", {"tiny": tiny, "commit": commit()})
    if run([machine(tiny=tiny)], output, records, end) != ["green"]:
        print((output / LOG).read_text()[-2000:], file=sys.stderr)
        return 1
    results: list[tuple[Stage, str]] = []
    for alone, some in itertools.groupby(chosen, key=lambda stage: stage.alone):
        for stages in [[stage] for stage in some] if alone else [list(some)]:
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
    return Stage(name="machine", group="correctness", seconds=120, command=command)


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
    running = [Running(stage, output, records, end) for stage in stages]
    try:
        while [one for one in running if not one.ended()]:
            time.sleep(0.05)
    finally:
        for one in running:
            one.close()
    return [one.status or "" for one in running]


class Running:
    """A stage that runs. Its output goes to a file of its own, and from there to that of all stages when it ended."""

    def __init__(self, stage: Stage, output: Path, records: Records, end: float) -> None:
        self.stage, self.records, self.log = stage, records, output / LOG
        self.start = time.monotonic()
        self.limit = min(stage.seconds, end - self.start)
        self.own, self.line, self.late = output / f"{stage.name}.log", "", False
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
        with self.own.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, start_new_session=True, **given)
        self.said = self.own.open(errors="replace")

    def ended(self) -> bool:
        """Whether it has ended. Records what it said since the last call, and has it end after its limit."""
        if self.process is None:
            return True
        code = self.process.poll()  # before it is read, so that nothing is said after the last reading
        lines = (self.line + self.said.read()).split("\n")
        self.line = lines.pop() if code is None else ""
        for figure in (figure for line in lines for figure in figures_in(line)):
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


def figures_in(line: str) -> Iterator[dict[str, Any]]:
    """The figures in a line of output: JSON of a stage that measures, failures and counts of pytest."""
    if line.startswith("{"):
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)
    elif line.startswith(("FAILED ", "ERROR ")):
        yield {"figure": "failed", "note": line.strip()[:500]}
    elif re.search(r" in \d+\.\d+s", line) and (counts := {what: n for n, what in SUMMARY.findall(line)}):
        yield {"figure": "tests", "value": int(counts.get("passed", 0)), "unit": "passed", "note": line.strip()}


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


def shown(stage: Stage) -> str:
    if stage.command is None:
        return "absent here"
    variables = [f"{name}={value}" for name, value in stage.environment.items()]
    return " ".join([*variables, *(str(part) for part in stage.command)])


if __name__ == "__main__":
    sys.exit(main())
