"""A result file as Markdown: a table for each group, the floor first and then from fast to slow.

The fastest implementation and the least memory are bold, also where they are not ours. Below a table are the
implementations that were not measured, with the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fused_grpo.bench.predictions import predicted
from fused_grpo.bench.report.results_file import (
    Group,
    Result,
    Row,
    commit,
    day,
    groups_of,
    machine_text,
    number_text,
    rounds_text,
)

MISSING = "-"
LEGEND = """\
*time*: median of the interleaved rounds. *spread*: slowest round less fastest, over the median. *x products*: time over
that of the products alone, the bare matrix products that every implementation needs; they are a lower bound and no
implementation. *FLOP/s*: of those products. *memory*: the most bytes at a time beside the inputs, gradients included.
*largest error*: against fp64 at a small size; of log-probs in nats, of gradients relative to their norm.
The fastest implementation and the least memory are **bold**."""

PREDICTED = """\
*x predicted*: time over that which a roofline predicts for this GPU (bench/predictions/README.md)."""

Cell = Callable[[Row, Group], str]
# Entries of `Row.more` that have another name in a table.
NAMES = {"completion_tokens_per_second": "completion tokens/s"}


def render(result: Result) -> str:
    """All tables of a result file."""
    groups = groups_of(result)
    heads = [group for group in groups.values() if is_head(group)]
    others = [group for group in groups.values() if not is_head(group)]
    device = str(result["machine_info"].get("device", "cpu"))
    columns = [head_columns(group, device) for group in heads]
    legend = f"{LEGEND} {PREDICTED}" if any("x predicted" in names for names in columns) else LEGEND
    parts = [f"# Benchmarks: {result['machine_info'].get('name', 'unnamed')}", headline_text(result), legend]
    for group, names in zip(heads, columns, strict=True):
        parts += [f"## {group.name}", table(group, names), absent_text(group)]
    parts += [part for group in others for part in (f"## {group.name}", shared_text(group), other_table(group))]
    parts += [longest_text(result), promises_text(result), settings_text(groups.values())]
    return "\n\n".join(part for part in parts if part) + "\n"


def is_head(group: Group) -> bool:
    """Whether it is a group of the head by itself; else it is of trainers or generation, which are never absent."""
    return group.work is not None or not group.rows


def headline_text(result: Result) -> str:
    """Machine, device, versions, commit, date, rounds."""
    rounds = rounds_text(groups_of(result).values())
    text = f"Measured on {machine_text(result)}; commit `{commit(result)}`, {day(result)}, {rounds}."
    tiny = "**Made with `--tiny`: shows that everything runs, and nothing about speed or memory.**\n\n"
    return tiny + text if result["machine_info"].get("tiny") else text


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]], *, text: int = 1) -> str:
    """A table whose first `text` columns are text and whose others are figures."""
    rule = ["---"] * text + ["---:"] * (len(header) - text)
    return "\n".join(
        "| " + " | ".join(line) + " |" for line in (header, rule, *(map(escaped, cells) for cells in lines))
    )


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def table(group: Group, columns: Mapping[str, Cell]) -> str:
    """One line for each row. `{time}` and `{rate}` in headers are the group's units."""
    if not group.rows:
        return ""
    units = {"time": time_unit(group)[1], "rate": rate_unit(group)[1]}
    lines = [[cell(row, group) for cell in columns.values()] for row in group.rows]
    return markdown([header.format(**units) for header in columns], lines)


def bold(text: str, is_best: bool) -> str:
    return f"**{text}**" if is_best else text


def time_unit(group: Group) -> tuple[float, str]:
    """Seconds or milliseconds, by the fastest row, so that a column has one unit."""
    fastest = min((row.median for row in group.rows), default=1.0)
    return (1.0, "s") if fastest >= 0.5 else (1e-3, "ms")


def rate_unit(group: Group) -> tuple[float, str]:
    highest = max((row.rate or 0.0 for row in group.rows), default=0.0)
    return (1e12, "TFLOP/s") if highest >= 1e12 else (1e9, "GFLOP/s")


def named_with_version(row: Row, group: Group) -> str:
    """For a table without a column for the version."""
    return f"{row.implementation} {row.version}" if row.version and not row.is_floor else row.implementation


def time_cell(row: Row, group: Group) -> str:
    best = not row.is_floor and row.median == group.best_time
    return bold(number_text(row.median / time_unit(group)[0]), best)


def products_cell(row: Row, group: Group) -> str:
    times = group.times_products(row)
    return MISSING if times is None else f"{times:.2f}"


def rate_cell(row: Row, group: Group) -> str:
    return MISSING if row.rate is None else number_text(row.rate / rate_unit(group)[0])


def memory_cell(row: Row, group: Group) -> str:
    if row.peak is None:
        return MISSING
    return bold(number_text(row.peak / 2**20), not row.is_floor and row.peak == group.least_memory)


def error_cell(row: Row, group: Group) -> str:
    return MISSING if row.error is None else f"{row.error:.1e}"


HEAD: dict[str, Cell] = {
    "implementation": lambda row, group: row.implementation,
    "version": lambda row, group: row.version or MISSING,
    "time ({time})": time_cell,
    "spread": lambda row, group: f"{row.spread:.0%}",
    "x products": products_cell,
    "{rate}": rate_cell,
    "memory (MiB)": memory_cell,
    "largest error": error_cell,
}


def head_columns(group: Group, device: str) -> dict[str, Cell]:
    """The columns, with measured over predicted times where any row has a prediction."""

    def predicted_cell(row: Row, group: Group) -> str:
        seconds = None if row.work is None else predicted.seconds_of_work(row.implementation, row.work, device)
        return MISSING if seconds is None else f"{row.median / seconds:.2f}"

    has_predictions = any(predicted_cell(row, group) != MISSING for row in group.rows)
    return HEAD | ({"x predicted": predicted_cell} if has_predictions else {})


def other_table(group: Group) -> str:
    """A table of trainers or generation: time, and all figures in which the rows differ."""
    columns = {"": HEAD["implementation"], "time ({time})": time_cell, "spread": HEAD["spread"]}
    names = dict.fromkeys(name for row in group.rows for name in row.more)
    for name in names:
        values = [row.more.get(name) for row in group.rows]
        if any(value != values[0] for value in values):
            columns[NAMES.get(name, name.replace("_", " "))] = more_cell(name)
    if any(row.peak is not None for row in group.rows):
        columns["peak memory (MiB)"] = memory_cell
    return table(group, columns)


def more_cell(name: str) -> Cell:
    def cell(row: Row, group: Group) -> str:
        value = row.more.get(name)
        return number_text(value) if isinstance(value, int | float) else MISSING if value is None else str(value)

    return cell


def shared_text(group: Group) -> str:
    """The entries that are equal in all rows: the problem."""
    first, *rest = [row.more for row in group.rows]
    shared = {k: v for k, v in first.items() if all(more.get(k) == v for more in rest) and len(group.rows) > 1}
    return ", ".join(f"{name.replace('_', ' ')} {shared_value(value)}" for name, value in shared.items())


def shared_value(value: Any) -> str:
    """A value; of a list of figures the range and the mean."""
    if isinstance(value, list) and value and all(isinstance(x, int | float) for x in value):
        return f"{number_text(min(value))} to {number_text(max(value))} (mean {number_text(sum(value) / len(value))})"
    return number_text(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def absent_text(*groups: Group) -> str:
    """What was not measured in one of these groups or more, each reason once."""
    reasons = dict.fromkeys((name, why) for group in groups for name, why in group.absent.items())
    return "\n".join(f"- {name} was not measured: {escaped(why)}" for name, why in reasons)


def longest_text(result: Result) -> str:
    """The most tokens that fit into memory, a table for each head."""
    entries_by_work: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for entry in result.get("longest", []):
        work = entry["work"]
        entries_by_work.setdefault(tuple(work[key] for key in ("kind", "head", "dtype", "gradients")), []).append(entry)
    parts = []
    for asked, entries in entries_by_work.items():
        best = max(entry.get("tokens", 0) for entry in entries)
        ordered = sorted(entries, key=lambda entry: -entry.get("tokens", -1))
        lines = [[entry["implementation"], tokens_cell(entry, best)] for entry in ordered]
        parts += [f"## Most tokens before memory runs out: {', '.join(asked)}", "Powers of two were tried."]
        parts += [markdown(["implementation", "tokens"], lines)]
    return "\n\n".join(parts)


def tokens_cell(entry: Mapping[str, Any], best: int) -> str:
    if "tokens" not in entry:
        return f"{MISSING} ({entry.get('absent', entry.get('failed', 'not measured'))})"
    tokens = entry["tokens"]
    return bold(f"{tokens:,}", tokens == best) if tokens else "not even the first"


def promises_text(result: Result, title: str = "## Promises\n\n") -> str:
    promises = result.get("promises", [])
    outcome = {True: "met", False: "**NOT MET**"}
    # Four digits, so that a value that misses its bound does not look like it.
    lines = [[p["what"], p["group"], f"{p['value']:.4g}", p["bound"], outcome[bool(p["met"])]] for p in promises]
    header = ["what", "group", "measured", "promised", ""]
    return title + markdown(header, lines, text=2) if lines else ""


def settings_text(groups: Iterable[Group]) -> str:
    """The setting of each implementation, once for each setting that it was run in."""
    rows = [row for group in groups for row in group.rows if row.setting]
    settings = dict.fromkeys((row.implementation, row.version, row.setting) for row in rows)
    lines = [f"- {name}{f' {version}' if version else ''}: {escaped(setting)}" for name, version, setting in settings]
    return "\n".join(["## How each was run", "", *lines]) if lines else ""
