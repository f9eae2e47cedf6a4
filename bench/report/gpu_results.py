"""results.jsonl of scripts/gpu_first.py: as a result file, for tables and charts, and as the sections of a page.

Of several figures with one name and the same sizes, in one stage, the last one counts.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fused_grpo.bench.heads.suites import is_met
from fused_grpo.bench.heads.work import HEADS, Work
from fused_grpo.bench.report import tables
from fused_grpo.bench.report.results_file import Result, number_text
from fused_grpo.errors import DataError

Line = dict[str, Any]
COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped)\b")
# The package of an implementation, by the start of its name.
PACKAGES = {"TRL": "trl", "Liger": "liger-kernel", "CCE": "cut-cross-entropy", "full logits": "torch", "verl": "verl"}
PACKAGES |= {"fused-grpo": "fused_grpo"}
# Measured over predicted beyond this, or below its inverse, is bold.
FAR = 1.3


def read_lines(path: Path) -> list[Line]:
    """
    Raises:
        DataError: it is no file of scripts/gpu_first.py.
    """
    want = "want a results.jsonl of scripts/gpu_first.py; fix: run it"
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise DataError(f"got {path} ({error}), {want}") from error
    if not any(isinstance(line, dict) and line.get("figure") == "machine" for line in lines):
        raise DataError(f"got {path}, which names no machine, {want}")
    return lines


def latest(lines: Sequence[Line]) -> list[Line]:
    """The figures that count, in the order of their first lines. Failed tests are those of the last run of a stage."""
    figures, failed = dict[tuple[Any, ...], Line](), dict[str, set[tuple[Any, ...]]]()
    for line in lines:
        stage, figure, shape = line["stage"], line["figure"], line.get("shape") or {}
        sizes = {name: x for name, x in shape.items() if name != "fastest"}
        key = stage, figure, json.dumps(sizes), line.get("note") if figure == "failed" else None
        failed.setdefault(stage, set()).discard(key)
        figures[key] = line
        if figure == "tests":  # the end of what a run says; what failed in an earlier one alone has passed, or is gone
            for old in failed[stage]:
                del figures[old]
            failed[stage] = {key for key in figures if key[:2] == (stage, "failed")}
    return [*figures.values()]


def facts_of(lines: Sequence[Line]) -> dict[str, Any]:
    """Machine and versions, of the last run in the file."""
    facts: dict[str, Any] = [line for line in lines if line["figure"] == "machine"][-1]["facts"]
    return facts


def result_of(path: Path) -> Result:
    """The peers, the trainers and what was promised of them, as a result file."""
    every = read_lines(path)
    lines, facts = latest(every), facts_of(every)
    packages = ("python", "cuda", "triton", *PACKAGES.values())
    machine = {"name": path.parent.name, "device": facts["gpu"], "cores": facts.get("cpu_count")}
    machine["versions"] = {name: facts[name] for name in packages if facts.get(name)}
    machine["memory_gib"] = round(facts.get("memory", 0) / 2**30)
    return {
        "machine_info": machine | {"tiny": any(line.get("tiny") for line in every)},
        "commit_info": {"id": [line["commit"] for line in every if line.get("commit")][-1]},
        "datetime": facts.get("date", path.stem),
        "benchmarks": [*heads(lines, facts), *trainers(lines)],
        "absent": [*absent(lines)],
        "promises": [promise_of(line) for line in lines if line.get("promised")],
    }


def work_of(line: Line) -> Work | None:
    """The work of a figure of the stage `peers`; None for other figures."""
    match = re.fullmatch(r"[^:/]+: (?P<kind>loss|logprobs), (?P<gradients>\w+)(: .+)?", line["figure"])
    shape = line.get("shape") or {}
    heads = [
        name for name, head in HEADS.items() if name.startswith(("Qwen3", "tiny")) and head.hidden == shape.get("D")
    ]
    if line["stage"] != "peers" or match is None or not heads:
        return None
    options: Any = {**match.groupdict(), "idle": shape.get("idle") or 0.0}
    return Work(head=heads[0], tokens=shape["N"], dtype="bfloat16", sequences=16, **options)


def heads(lines: Sequence[Line], facts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The measured rows of the peers' works."""
    values = {(line["figure"], work): line["value"] for line in lines if (work := work_of(line)) is not None}
    for line in lines:
        work, figure = work_of(line), line["figure"]
        if work is None or line["unit"] != "ms" or line["value"] is None:
            continue
        name, peak = figure.partition(":")[0], values.get((f"{figure}: peak", work))
        errors = {what: values.get((f"{figure}: error of {what}", work)) for what in ("value", "d_hidden", "d_weight")}
        version = next((facts.get(package) for start, package in PACKAGES.items() if name.startswith(start)), None)
        extra = {"implementation": name, "version": version, "work": work.described(), "errors": errors}
        extra["peak_bytes"] = None if peak is None else round(peak * 2**30)
        yield timed(work.name, extra, [ms / 1e3 for ms in line.get("rounds") or [line["value"]]])


def absent(lines: Sequence[Line]) -> Iterator[dict[str, str]]:
    for line in lines:
        work, note = work_of(line), line.get("note") or ""
        if work is not None and note.startswith("absent: "):
            name = line["figure"].partition(":")[0]
            yield {"group": work.name, "implementation": name, "why": note.removeprefix("absent: ")}


def trainers(lines: Sequence[Line]) -> Iterator[dict[str, Any]]:
    phase_lines = [line for line in lines if line["stage"] == "phase" and line.get("shape")]
    values = {(line["figure"], json.dumps(line["shape"])): line["value"] for line in phase_lines}
    for line in phase_lines:
        if line["figure"].startswith("a step: "):
            trainer, sizes = line["figure"].removeprefix("a step: "), line["shape"]
            rate, peak = (values[f"training phase: {trainer}{what}", json.dumps(sizes)] for what in ("", ", peak"))
            extra = {"implementation": trainer, "completion_tokens_per_second": rate, "peak_bytes": round(peak * 2**30)}
            yield timed(f"training phase, {shape_text(line)}", extra, line["rounds"])


def timed(group: str, extra: dict[str, Any], seconds: Sequence[float]) -> dict[str, Any]:
    stats = {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds), "rounds": len(seconds)}
    return {"group": group, "name": group, "extra_info": extra, "stats": stats | {"data": [*seconds]}}


def promise_of(line: Line) -> dict[str, Any]:
    value, bound = line["value"], line["promised"]
    promise = {"what": line["figure"], "group": shape_text(line), "value": value, "bound": bound}
    return promise | {"met": is_met(value, bound)}


def shape_text(line: Line) -> str:
    """`N=8,192, D=4,096`."""
    shape = (line.get("shape") or {}).items()
    return ", ".join(f"{name}={x:,}" if isinstance(x, int) else f"{name}={x}" for name, x in shape)


def machine_section(lines: Sequence[Line]) -> str:
    facts, commits = facts_of(lines), dict.fromkeys(line["commit"] for line in lines if line.get("commit"))
    packages = (
        "python",
        "torch",
        "triton",
        "numpy",
        "transformers",
        "trl",
        "liger-kernel",
        "cut-cross-entropy",
        "verl",
    )
    versions = ", ".join(f"{name} {facts[name]}" for name in packages if facts.get(name))
    memory = f"{facts.get('memory', 0) / 2**30:.0f} GiB, {facts.get('multiprocessors', '?')} multiprocessors"
    names = ", ".join(f"`{commit}`" for commit in commits)
    return f"Measured on one {facts['gpu']} ({memory}), CUDA {facts.get('cuda')}, {versions}; commit {names}."


def correctness_section(lines: Sequence[Line]) -> str:
    """Counts of tests by stage, what compute-sanitizer found, and the tests that failed."""
    rows, notes = [], []
    for line in latest(lines):
        if line["figure"] == "tests":
            counts = {what.rstrip("s"): number for number, what in COUNT.findall(line["note"])}
            rows.append(
                [f"`{line['stage']}`", *(counts.get(what, "0") for what in ("passed", "failed", "error", "skipped"))]
            )
        elif line.get("unit") == "errors":
            notes.append(f"- `compute-sanitizer --tool {line['figure']}`: {errors_text(line)}")
        elif line["figure"] == "failed":
            notes.append(f"- {tables.escaped(line['note'])}")
    return "\n\n".join(
        [tables.markdown(["stage", "passed", "failed", "errors", "skipped"], rows), "\n".join(notes)]
    ).strip()


def errors_text(line: Line) -> str:
    return str(line["note"]) if line["value"] is None else f"{line['value']} errors"


def predictions_section(lines: Sequence[Line]) -> str:
    """A table for each stage of every figure that was predicted."""
    predictions = [line for line in latest(lines) if line.get("predicted") and line.get("value") is not None]
    near = sum(1 / FAR <= line["value"] / line["predicted"] <= FAR for line in predictions)
    parts = [f"{near} of {len(predictions)} figures are within {FAR}x of their prediction; the others are bold."]
    for stage in dict.fromkeys(line["stage"] for line in predictions):
        rows = [predicted_row(line) for line in predictions if line["stage"] == stage]
        parts += [
            f"### `{stage}`",
            tables.markdown(["", "sizes", "unit", "measured", "predicted", "ratio"], rows, text=3),
        ]
    return "\n\n".join(parts)


def predicted_row(line: Line) -> list[str]:
    ratio = line["value"] / line["predicted"]
    numbers = [number_text(float(line["value"])), number_text(float(line["predicted"]))]
    far = not 1 / FAR <= ratio <= FAR
    return [line["figure"], shape_text(line), line["unit"], *numbers, tables.bold(f"{ratio:.2f}", far)]


SECTIONS: dict[str, Callable[[Sequence[Line]], str]] = {
    "machine": machine_section,
    "correctness": correctness_section,
    "predictions": predictions_section,
}
