"""Figures in Markdown pages, from their raw files: `python -m fused_grpo.bench.pages [--check] [PAGE...]`.

A page has blocks, whose content this module writes:

    <!-- figures: loss from bench/results/cpu-2-cores/2026-11-21.json -->
    ...
    <!-- end of figures -->

    loss, logprobs, divergence, distillation
                      a table of one group of that kind (`results_file.headline`)
    over              a table over N of the groups whose names have that in them
    trainer           tables of the groups of whole trainers and generation
    machine           machine, versions and date of a result file, in one sentence
    accuracy          all of a file of accuracy.py
    predictions       all of predicted.json
    published_runs    tables of predictions/published_runs.json
    simulated         a table of a file of simulated_run.py
    beside_trl        a table of a file of trainers/beside_trl.py
    gpu of SECTION    of a results.jsonl of scripts/gpu_first.py: machine, correctness, promises, peers, training or
                      predictions

`loss of GPT-2, N=2048 from ...` selects a group with that in its name; so does `trainer of ...`. The path is relative
to the page, like that of a link. Without PAGE these are the pages of `PAGES` in the current folder. `--check` changes
nothing, and exits with 1 if a block differs from its file.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fused_grpo.bench.heads.suites import FLOOR
from fused_grpo.bench.predictions import published_runs
from fused_grpo.bench.predictions.predicted import shape_of
from fused_grpo.bench.report import beside_trl, tables
from fused_grpo.bench.report.gpu_results import SECTIONS, read_lines
from fused_grpo.bench.report.results_file import (
    Group,
    Result,
    commit,
    day,
    groups_of,
    headline,
    machine_text,
    number_text,
    read,
    work_of,
)
from fused_grpo.errors import DataError, FusedGRPOError

PAGES = (
    "README.md",
    "docs/agents.md",
    "docs/benchmarks.md",
    "docs/accuracy.md",
    "bench/predictions/README.md",
    "bench/predictions/measured.md",
    "docs/gpu.md",
)
START = re.compile(r"<!-- figures: (?P<what>\S+)(?: of (?P<group>.+?))? from (?P<path>\S+) -->")
END = "<!-- end of figures -->"
BLOCK = re.compile(START.pattern + rf"\n(?P<inside>.*?){re.escape(END)}", re.DOTALL)
COMPACT: dict[str, tables.Cell] = {
    "": tables.named_with_version,
    "time ({time})": tables.time_cell,
    "x products": tables.products_cell,
    "memory (MiB)": tables.memory_cell,
    "largest error": tables.error_cell,
}
GPU = COMPACT | {"spread": tables.HEAD["spread"]}
# From so many tokens on, a prediction should be within 5 %.
MANY = 4096
Times = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""By plan and shape, what is predicted."""


def figures(kind: str, group: str | None, path: Path) -> str:
    """The content of a block, without the link to its file."""
    match kind:
        case "loss" | "logprobs" | "divergence" | "distillation":
            return head_text(read(path), kind, group)
        case "over":
            return over_text(read(path), group or "")
        case "trainer":
            return trainer_text(read(path), group)
        case "machine":
            result = read(path)
            return f"Measured on {machine_text(result)}, on {day(result)} at commit `{commit(result)}`."
        case "gpu":
            return gpu_text(path, group)
        case "accuracy":
            return accuracy_text(json.loads(path.read_text()))
        case "beside_trl":
            return beside_trl.table(json.loads(path.read_text()))
        case "published_runs":
            return published_runs.text(json.loads(path.read_text()))
        case "simulated":
            return simulated_text(json.loads(path.read_text()))
        case "predictions":
            return predictions_text(json.loads(path.read_text()))
    want = "loss, logprobs, divergence, distillation, over, trainer, machine, gpu, accuracy, beside_trl, "
    want += "published_runs, simulated, predictions"
    raise DataError(f"got the figures {kind!r}, want {want}; fix: name one of these")


def head_text(result: Result, kind: str, name: str | None) -> str:
    """A compact table, and below it the implementations that were not measured."""
    group = headline(result, kind=kind, name=name)
    absent = ", ".join(group.absent)
    parts = [f"{group.name}:", tables.table(group, COMPACT), f"Not measured here: {absent}." if absent else ""]
    return "\n\n".join(part for part in parts if part)


def over_text(result: Result, name: str) -> str:
    """Seconds, and memory where it was counted, of the groups whose names have `name` in them, by N."""
    matching = [group for group in groups_of(result).values() if group.work is not None and name in group.name]
    matching.sort(key=lambda group: work_of(group)["tokens"])
    names = dict.fromkeys(row.implementation for group in reversed(matching) for row in group.rows)
    if not matching:
        raise DataError(f"got no group with {name!r} in its name; fix: name one of {list(groups_of(result))}")

    def cell(group: Group, implementation: str) -> str:
        row = next((row for row in group.rows if row.implementation == implementation), None)
        if row is None:
            return tables.MISSING
        seconds = tables.bold(number_text(row.median), not row.is_floor and row.median == group.best_time)
        return seconds if row.peak is None else f"{seconds} ({number_text(row.peak / 2**20)})"

    header = ["s (MiB)", *(f"N={work_of(group)['tokens']:,}" for group in matching)]
    return tables.markdown(header, [[name, *(cell(group, name) for group in matching)] for name in names])


def trainer_text(result: Result, name: str | None) -> str:
    trainers = [group for group in groups_of(result).values() if not tables.is_head(group)]
    chosen = [group for group in trainers if name is None or name in group.name]
    if not chosen:
        has = "; ".join(group.name for group in trainers) or "none"
        raise DataError(f"got no group of a trainer with {name!r} in its name, want one of: {has}; fix: name one")
    return "\n\n".join(f"{group.name}:\n\n{tables.other_table(group)}" for group in chosen)


def gpu_text(path: Path, section: str | None) -> str:
    if section in SECTIONS:
        return SECTIONS[section](read_lines(path))
    result = read(path)
    heads = [group for group in groups_of(result).values() if tables.is_head(group)]
    match section:
        case "promises":
            text = tables.promises_text(result, title="")
        case "peers":
            parts = [text for group in heads for text in (f"### {group.name}", tables.table(group, GPU))]
            text = "\n\n".join(text for text in (*parts, tables.absent_text(*heads)) if text)
        case "training":
            text = trainer_text(result, None) if len(heads) < len(groups_of(result)) else ""
        case _:
            want = ", ".join([*SECTIONS, "promises", "peers or training"])
            raise DataError(f"got the section {section!r} of a GPU, want {want}; fix: name one of these")
    return text or "Not measured yet."


def accuracy_text(content: Mapping[str, Any]) -> str:
    """A table for each problem, the setting of each implementation, and the machine."""
    problems, env = content["problems"], content["environment"]
    machine = f"{env['system']}, {env['cpu_count']} cores, torch threads: {content['torch_threads']}"
    dirty = " with uncommitted changes" if content["commit"]["dirty"] else ""
    measured = (
        f"Measured on {content['date']} on a CPU ({machine}; Python {env['python']}, torch {env['torch']}) at commit"
    )
    settings = "\n".join(setting_line(row) for row in problems[0]["results"])
    parts = [*map(accuracy_table, problems), "## How each was run", settings]
    return "\n\n".join([*parts, f"{measured} `{content['commit']['id'][:12]}`{dirty}."])


def accuracy_table(problem: Mapping[str, Any]) -> str:
    title = "## N={tokens} in {sequences} sequences, D={hidden}, V={vocab}, {dtype}".format(**problem)
    rows = [*problem["results"], {"name": "*exact, gradients rounded*", **problem["rounding"]}]
    header = ["", "log p, max", "mean", "RMS", "ratio", "dH", "worst token", "dW", "\\|dH\\|", "\\|dW\\|"]
    return f"{title}\n\n{tables.markdown(header, [[row['name'], *error_cells(row)] for row in rows])}"


def error_cells(row: Mapping[str, Any]) -> list[str]:
    if row.get("missing"):
        return ["not measured", *[""] * 8]
    logprobs, hidden, weight = row["logprobs"], row["hidden"], row["weight"]
    return [
        *(f"{error:.1e}" for error in (logprobs["max"], logprobs["mean"], logprobs["rms"], row["ratio"])),
        f"{hidden['relative']:.2e}",
        f"{hidden['worst_row']:.1e}",
        f"{weight['relative']:.2e}" if weight else tables.MISSING,
        f"{hidden['norm_ratio']:.4f}",
        f"{weight['norm_ratio']:.4f}" if weight else tables.MISSING,
    ]


def setting_line(row: Mapping[str, Any]) -> str:
    if row.get("missing"):
        return f"- {row['name']}: not measured: {row['missing']}"
    return f"- {row['name']}: {row['setting']} ({row['version']})"


def simulated_text(content: Mapping[str, Any]) -> str:
    """Predicted phases and steps, and what the steps took."""
    lines = []
    for mode in content["modes"]:
        predicted, taken = mode["predicted"], mode["steps"]
        mean = statistics.mean(taken)
        phases = [f"{predicted[name]:.2f}" for name in ("rollouts", "rewards", "training", "sync")]
        total, spread = predicted["seconds"], f"{mean:.2f} ({min(taken):.2f} to {max(taken):.2f})"
        lines.append([mode["mode"], *phases, f"{total:.2f}", spread, f"{total / mean - 1:+.1%}"])
    header = ["s", "rollouts", "rewards", "training", "sync", "step, predicted", "measured", "error"]
    return tables.markdown(header, lines)


def predictions_text(content: Mapping[str, Any]) -> str:
    """Rates, times, launches, memory and operations on the first machine, and times on the others."""
    name, *others = content["machines"]
    ((shape, operations),) = content["operations"][name].items()
    N, times = int(shape.rpartition("=")[2]), content["predicted"][name]
    predicted = {(machine, D): content["predicted"][machine] for machine in others for D in sizes_of(times)[0]}
    D, tokens = sizes_of(times)
    parts = [
        f"Vocabulary {content['vocab']:,}, {content['dtype']}, {content['sequences']} sequences. A GEMM in Triton is "
        f"assumed to reach {content['triton_gemm']:.0%} of the FLOP/s of the vendor's GEMMs.",
        machines_table(content["machines"]),
        "## Published",
        "Milliseconds; the ratio is that of what was published to what the model predicts at these rates. Here and "
        f"below it is bold where it is off by more than 5 %, and with fewer than {MANY:,} tokens by more than 25 %.",
        published_table(content["published"]),
        "## Measured",
        f"Milliseconds that were measured on an {name}, and in parentheses their ratio to the prediction.",
        measured_table(content["measured"], tokens),
        f"## {name}",
        "Milliseconds, and in parentheses the multiple of the bare GEMMs. A dash: memory runs out.",
        *(part for size in (D[0], D[-1]) for part in (f"### D={size}", size_table(times, size))),
        "### Launches, waits for the device, memory",
        f"{shape.replace(',', ', ')}; memory is the most bytes at a time beside the inputs, gradients included. The "
        f"last columns are of D={D[0]}, N={tokens[0]}, with the host and without it.",
        facts_table(times, shape, shape_of(D[0], tokens[0])),
        "### Where the time goes",
        f"{shape.replace(',', ', ')}, on the device; operations that take less than 5 % are added up.",
        operations_table(operations),
        "## Other machines",
        f"Milliseconds of the device alone, and in parentheses the multiple of the bare GEMMs, at N={N}.",
        tables.markdown(
            ["", *(f"{machine}, D={D}" for machine, D in predicted)],
            [[plan, *(time_cell(predicted[key], plan, shape_of(key[1], N)) for key in predicted)] for plan in times],
        ),
    ]
    return "\n\n".join(parts)


def sizes_of(times: Times) -> tuple[list[int], list[int]]:
    """Every D and every N."""
    shapes = [re.findall(r"\d+", shape) for shape in next(iter(times.values()))]
    D, N = (list(dict.fromkeys(int(sizes[place]) for sizes in shapes)) for place in (0, 1))
    return D, N


def machines_table(machines: Mapping[str, Any]) -> str:
    scales = {"memory": 2**30, "flops": 1e12, "bytes_per_s": 1e12, "instructions_per_s": 1e12}
    scales |= dict.fromkeys(("launch_s", "tile_s", "host_torch_s", "host_triton_s", "host_backward_s"), 1e-6)
    lines = [[name, *(f"{m[key] / scale:.4g}" for key, scale in scales.items())] for name, m in machines.items()]
    header = ["", "memory (GiB)", "TFLOP/s", "TB/s", "10^12 instructions/s", "launch (µs)", "tile (µs)"]
    return tables.markdown([*header, "host: torch (µs)", "Triton (µs)", "backward (µs)"], lines)


def published_table(points: Sequence[Mapping[str, Any]]) -> str:
    def cells(p: Mapping[str, Any]) -> list[str]:
        label, ratio = f"{p['what']}, {p['N']} x {p['D']} x {p['V']}", ratio_text(p)
        return [p["machine"], label, p["source"], number_text(p["ms"]), number_text(p["predicted"]), ratio]

    return tables.markdown(["", "what", "source", "ms", "predicted", "ratio"], [cells(p) for p in points])


def ratio_text(row: Mapping[str, Any]) -> str:
    """Of a measured time to the predicted one; bold beyond the bounds."""
    ratio = row["ms"] / row["predicted"]
    return tables.bold(f"{ratio:.2f}", abs(ratio - 1) > (0.05 if row["N"] >= MANY else 0.25))


def measured_table(rows: Sequence[Mapping[str, Any]], tokens: Sequence[int]) -> str:
    cells = {(row["plan"], row["D"], row["N"]): f"{number_text(row['ms'])} ({ratio_text(row)})" for row in rows}
    names = dict.fromkeys((plan, D) for plan, D, _ in cells)
    lines = [[f"{plan}, D={D}", *(cells.get((plan, D, N), tables.MISSING) for N in tokens)] for plan, D in names]
    return tables.markdown(["", *(f"N={N:,}" for N in tokens)], lines)


def size_table(times: Times, D: int) -> str:
    tokens = sizes_of(times)[1]
    lines = [[plan, *(time_cell(times, plan, shape_of(D, N)) for N in tokens)] for plan in times]
    return tables.markdown(["", *(f"N={N:,}" for N in tokens)], lines)


def time_cell(times: Times, plan: str, shape: str) -> str:
    """`42.4 (1.10)`."""
    implementation, _, work = plan.partition(": ")
    ms, floor = times[plan][shape]["ms"], times.get(f"{FLOOR}: {work}", {}).get(shape, {}).get("ms")
    if ms is None:
        return tables.MISSING
    return number_text(ms) if implementation == FLOOR or floor is None else f"{number_text(ms)} ({ms / floor:.2f})"


def facts_table(times: Times, shape: str, small: str) -> str:
    lines = []
    for plan, shapes in times.items():
        if not plan.startswith(FLOOR):
            many, few = shapes[shape], shapes[small]
            facts = [str(many["launches"]), str(many["waits"]), f"{many['peak'] / 2**30:.2f}", str(few["launches"])]
            lines += [[plan, *facts, number_text(few["ms"]), number_text(few["device_ms"])]]
    header = ["", "launches", "waits", "memory (GiB)", "launches, few tokens", "ms", "ms, device alone"]
    return tables.markdown(header, lines)


def operations_table(operations: Mapping[str, list[list[Any]]]) -> str:
    lines = []
    for plan, rows in operations.items():
        total = sum(ms for _, _, ms in rows)
        large = [row for row in rows if row[2] >= 0.05 * total]
        small = rows[len(large) :]
        shown = [[f"`{name}`", count, ms] for name, count, ms in large]
        shown += [["others", sum(count for _, count, _ in small), sum(ms for _, _, ms in small)]]
        lines += [[plan, name, str(count), number_text(ms), f"{ms / total:.1%}"] for name, count, ms in shown]
    return tables.markdown(["", "operation", "launches", "ms", "share"], lines, text=2)


def rewritten(text: str, folder: Path) -> str:
    """A page with the blocks of its files. `folder` is that of the page."""
    if not len(START.findall(text)) == len(BLOCK.findall(text)) == text.count(END):
        raise DataError(f"got a block of figures without its end, or an end without a block, want {END!r} after each")

    def block(match: re.Match[str]) -> str:
        kind, group, path = match["what"], match["group"], match["path"]
        inside = figures(kind, group, folder / path)
        return f"{match[0].partition(chr(10))[0]}\n{inside}\n\nRaw file: [{Path(path).name}]({path}).\n{END}"

    return BLOCK.sub(block, text)


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite pages, or check them; 2 if a page or its file cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m fused_grpo.bench.pages", description="Figures of Markdown pages.")
    parser.add_argument("pages", type=Path, nargs="*", metavar="PAGE")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a block is not current")
    options = parser.parse_args(argv)
    pages = options.pages or [page for page in map(Path, PAGES) if page.exists()]
    stale = []
    for page in pages:
        try:
            text = page.read_text()
            fresh = rewritten(text, page.parent)
        except (OSError, FusedGRPOError) as error:
            print(f"{page}: {error}", file=sys.stderr)
            return 2
        if fresh != text:
            stale.append(page)
            if not options.check:
                page.write_text(fresh)
    if options.check and stale:
        command = f"python -m fused_grpo.bench.pages {' '.join(map(str, stale))}"
        print(f"got figures that differ from their files in {', '.join(map(str, stale))}; fix: {command}")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
