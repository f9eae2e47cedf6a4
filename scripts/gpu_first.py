"""Tests and timings for a GPU that has not been tried yet, within ten minutes: `gpu_first.py OUT [--tiny]`.

First come the tests of correctness (the vendor's GEMMs with our arguments, tests/gpu, tests/kernels and tests/ops on
the device), then timings (ceilings, GEMMs, kernels, losses, a trace, peers), each beside its prediction, and
compute-sanitizer, if it is installed, in the time that is left. Whole trainers are runs of their own, `--stages phase`,
`longest` and `published`, for which TRL must be installed. A stage is a process with a time limit. If a stage fails, or
exceeds its limit, this is recorded and the next stage runs. In OUT:

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
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
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


def main(arguments: list[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, nargs="?", help="the folder for results; it is created")
    parser.add_argument("--tiny", action="store_true", help="rehearse all stages on a CPU")
    parser.add_argument("--stages", help="names of stages or groups, separated by commas (default: all but trainers)")
    parser.add_argument("--list", action="store_true", help="list the stages, and run none")
    parser.add_argument("--seconds", type=int, default=570, help="time limit of all stages in sum (default: 570)")
    given = parser.parse_args(arguments)
    found = stages((given.output or Path()).resolve(), tiny=given.tiny)
    known = {x for stage in found for x in (stage.name, stage.group)}
    asked = {*given.stages.split(",")} if given.stages else {"correctness", "timing"} & known
    chosen = [stage for stage in found if {stage.name, stage.group} & asked]
    if unknown := asked - known:
        parser.error(f"got --stages {','.join(sorted(unknown))}; fix: --list shows them")
    if given.list:
        for stage in found:
            print(f"{stage.name:12} {stage.group:12} {stage.seconds:4} s  {shown(stage)}")
        return 0
    if given.output is None:
        parser.error("got no folder for results")
    return run_all(chosen, given.output.resolve(), tiny=given.tiny, seconds=given.seconds)


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
        return Stage(name=name, group="correctness", seconds=seconds, command=command, environment=device)

    timings = {
        "ceilings": 30,
        "gemms": 60,
        "passes": 45,
        "forward": 60,
        "tiles": 90,
        "losses": 150,
        "trace": 45,
        "peers": 180,
    }
    trainers = {"phase": 400, "longest": 400, "published": 400}
    measure = (python, "-m", "fused_grpo.bench.gpu.timings")
    options = (*(("--tiny",) if tiny else ()), "--output", output)
    return [
        right("products", 60, *pytest, "tests/gpu/test_gemms.py"),
        right("gpu", 180, *pytest, *spread, *whole, "tests/gpu", "--deselect", "tests/gpu/test_gemms.py"),
        right("device", 180, *pytest, *spread, *both),
        *(
            Stage(name=name, group="timing", seconds=seconds, command=(*measure, name, *options))
            for name, seconds in timings.items()
        ),
        Stage(name="sanitizer", group="correctness", seconds=240, command=sanitizer),
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
    if run(machine(tiny=tiny), output, records, end) != "green":
        print((output / LOG).read_text()[-2000:], file=sys.stderr)
        return 1
    results = [(stage, run(stage, output, records, end)) for stage in chosen]
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


def run(stage: Stage, output: Path, records: Records, end: float) -> str:
    """Run a stage, at most until `end`, and record its results: "green", "absent", or what went wrong."""
    start, log = time.monotonic(), output / LOG
    limit = min(stage.seconds, end - start)
    if stage.command is None:
        status = "absent"
    elif limit <= 1:
        status = "left out: the time of all stages is over"
    else:
        written = log.stat().st_size if log.exists() else 0
        status = watched(stage, limit, log)
        said = log.read_bytes()[written:].decode(errors="replace")
        for figure in (figure for line in said.splitlines() for figure in figures_in(line)):
            note(figure, stage, records)
    seconds = time.monotonic() - start
    records.add(stage.name, {"figure": "seconds", "value": round(seconds, 1), "status": status})
    print(f"--- {stage.name}: {status}, {seconds:.1f} s", flush=True)
    return status


def watched(stage: Stage, limit: float, log: Path) -> str:
    """How the stage ended. Its children end with it."""
    assert stage.command is not None
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    if stage.environment.get("FUSED_GRPO_TEST_DEVICE") != "cpu":
        env.pop("TRITON_INTERPRET", None)
    how: dict[str, Any] = {"cwd": ROOT, "env": env | stage.environment, "stderr": subprocess.STDOUT}
    with log.open("a") as file:
        print(f"=== {stage.name}", file=file, flush=True)
        process = subprocess.Popen(stage.command, stdout=file, start_new_session=True, **how)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # pytest prints its failures then
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
            return f"past its limit of {limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return f"failed with status {status}" if status else "green"


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
    shape = " ".join(f"{name}={x}" for name, x in (figure.get("shape") or {}).items())
    print(f"{stage.name:10} {figure.get('figure', '?')[:48]:48} {shape:36} {said}", flush=True)


def shown(stage: Stage) -> str:
    if stage.command is None:
        return "absent here"
    variables = [f"{name}={value}" for name, value in stage.environment.items()]
    return " ".join([*variables, *(str(part) for part in stage.command)])


if __name__ == "__main__":
    sys.exit(main())
