"""Charts of a result file, an SVG each, drawn with matplotlib.

    time              a bar for each implementation of a group, and the time of the products alone as a line
    memory            the same of the most bytes beside the inputs, and the bytes of the gradients as a line
    overview          both beside each other
    pareto            error over time, the area of a point is its memory: down, left and small is better
    scaling-tokens    time and memory over N, where works differ in nothing else
    scaling-heads     the same over models, ordered by the size D x V of their heads

matplotlib is used without pyplot, and imported only when something is drawn. The same result makes the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fused_grpo.bench.report.results_file import (
    Group,
    Result,
    Row,
    bytes_text,
    commit,
    day,
    groups_of,
    headline,
    number_text,
    processor,
    rounds_text,
    seconds_text,
    version_of,
    work_of,
)
from fused_grpo.errors import UnavailableError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

OURS, PEERS, LINE = "#0072b2", "#bcc4cd", "#1f2328"
# The salt makes the ids of elements, which are random otherwise, the same in every run.
RC: Any = {"svg.hashsalt": "fused-grpo", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False}
RC |= {"axes.spines.right": False, "legend.frameon": False}
WIDTH = 8.8  # inches
LARGEST_POINT = 1200.0  # square points, of the largest memory

Text = Callable[[float], str]


def write(result: Result, folder: Path) -> list[Path]:
    """Every chart that the file has data for, of the head's group that `headline` selects.

    Raises:
        UnavailableError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
    except ImportError as error:
        raise UnavailableError("got no matplotlib; fix: pip install 'fused-grpo[bench]'") from error
    if not any(group.work is not None and group.implementations for group in groups_of(result).values()):
        return []
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with rc_context(RC):
        for name, figure in figures(result, headline(result)):
            written.append(folder / f"{name}.svg")
            figure.savefig(written[-1], metadata={"Date": None, "Creator": None})
    return written


def figures(result: Result, group: Group) -> Iterator[tuple[str, Figure]]:
    """(name, figure) of each chart."""
    caption = caption_of(result, [group])
    floor = None if group.floor is None else ("products alone", group.floor.median)
    times = {row: row.median for row in group.implementations}
    yield "time", bar_chart(times, seconds_text, floor, (f"Time of {subject(group)}", size(group), caption))
    measured = sorted((row for row in group.implementations if row.peak), key=lambda row: row.peak or 0)
    if measured:
        least = ("gradients alone", float(group.gradient_bytes)) if group.gradient_bytes else None
        words = (f"Memory of {subject(group)}, beside the inputs", size(group), caption)
        yield "memory", bar_chart({row: float(row.peak or 0) for row in measured}, bytes_text, least, words)
        yield "overview", overview(result, group)
    if sum(row.error is not None for row in measured) > 1:
        yield "pareto", pareto_chart(group, caption)
    for name, key in (("scaling-tokens", "tokens"), ("scaling-heads", "head")):
        series = series_of(result, group, key)
        if len(series) > 1:
            yield name, scaling_chart(series, key, caption_of(result, series))


def caption_of(result: Result, groups: Sequence[Group]) -> str:
    parts = [processor(result), f"torch {version_of(result, 'torch')}", f"median of {rounds_text(groups)}, interleaved"]
    parts += ["sizes of a trial run"] if result["machine_info"].get("tiny") else []
    return "  ·  ".join([*parts, day(result), f"commit {commit(result)}"])


def subject(group: Group) -> str:
    """What is computed, for a title."""
    work = work_of(group)
    what = {"loss": "the GRPO loss", "logprobs": "log-probs", "divergence": "a divergence"}
    what["distillation"] = "the GRPO loss with a divergence"
    return what[work["kind"]] + {"no_grad": "", "frozen": " and dH", "trainable": " and gradients"}[work["gradients"]]


def size(group: Group, *, without: str = "") -> str:
    """The sizes of the work, for a subtitle."""
    work = work_of(group)
    parts = [] if without == "head" else [f"{work['head']}'s head, D = {work['hidden']:,}, V = {work['vocab']:,}"]
    parts += [] if without == "tokens" else [f"{work['tokens']:,} tokens"]
    parts += [work["dtype"].replace("bfloat", "bf").replace("float", "fp")]
    parts += [f"mean entropy {work['entropy']:g}"] if work["entropy"] is not None else []
    parts += [f"{work['idle']:.0%} of sequences idle"] if work["idle"] else []
    parts += [f"{work['several']} targets per token"] if work.get("several") else []
    parts += [f"{work['kept']} tokens kept per row"] if work.get("kept") else []
    parts += [f"{work['centred']} tokens centred per row"] if work.get("centred") else []
    return ", ".join([*parts, "uneven lengths"] if work["uneven"] else parts)


def page(height: float, panels: int, words: tuple[str, str, str]) -> tuple[Figure, list[Axes]]:
    """A figure with a title, a subtitle and a caption, and its axes beside each other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    title, subtitle, caption = words
    figure.suptitle(f"{title}\n{subtitle}", fontsize=11)
    figure.supxlabel(caption, fontsize=7)
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def bar_chart(
    values: Mapping[Row, float], text: Text, floor: tuple[str, float] | None, words: tuple[str, str, str]
) -> Figure:
    """A bar for each row, and a line for the floor."""
    figure, (axes,) = page(1.4 + 0.33 * len(values), 1, words)
    draw_bars(axes, values, text, floor)
    if floor is not None:
        axes.legend(loc="lower right")
    return figure


def draw_bars(axes: Axes, values: Mapping[Row, float], text: Text, floor: tuple[str, float] | None) -> None:
    # Without the build that follows the "+" of a version.
    names = [f"{row.implementation} {(row.version or '').partition('+')[0]}".strip() for row in values]
    bars = axes.barh(names, list(values.values()), color=[OURS if row.ours else PEERS for row in values])
    labels = [text(value) + (f"  {number_text(value / floor[1])}×" if floor else "") for value in values.values()]
    axes.bar_label(bars, labels, padding=5)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_xticks([])
    if floor is not None:
        axes.axvline(floor[1], color=LINE, linestyle="--", label=f"{floor[0]} {text(floor[1])}")


def overview(result: Result, group: Group) -> Figure:
    """Time and memory beside each other, in the order of the times."""
    words = (f"Time and memory of {subject(group)}", size(group), caption_of(result, [group]))
    rows = group.implementations
    figure, (time, memory) = page(1.6 + 0.33 * len(rows), 2, words)
    floor = None if group.floor is None else ("products alone", group.floor.median)
    draw_bars(time, {row: row.median for row in rows}, seconds_text, floor)
    least = ("gradients", float(group.gradient_bytes)) if group.gradient_bytes else None
    draw_bars(memory, {row: float(row.peak or 0) for row in rows}, bytes_text, least)
    memory.set_yticks([])
    for axes, what, bound in ((time, "time", floor), (memory, "memory beside inputs", least)):
        dashed = "" if bound is None else f"   (dashed: {bound[0]})"
        axes.set_title(what + dashed, loc="left", fontsize=9)
        axes.margins(x=0.35)
    return figure


def pareto_chart(group: Group, caption: str) -> Figure:
    """A point for each row that has an error and a memory."""
    words = (f"Error, time and memory of {subject(group)}", size(group), caption)
    figure, (axes,) = page(5.0, 1, words)
    axes.set(xscale="log", xlabel="time (s)", yscale="log", ylabel="largest error")
    plain_numbers(axes.xaxis)
    most = max(row.peak or 0 for row in group.implementations)
    rows = [row for row in group.implementations if row.error and row.peak]
    for row, colour in zip(rows, colours(rows), strict=True):
        area = LARGEST_POINT * (row.peak or 0) / most
        label = f"{row.implementation}, {bytes_text(row.peak or 0)}"
        axes.scatter([row.median], [row.error or math.nan], s=area, color=colour, alpha=0.8, label=label)
    if group.floor is not None:
        axes.axvline(group.floor.median, color=LINE, linestyle="--", label="products alone")
    legend = figure.legend(loc="outside right upper", title="area: memory")
    for handle in legend.legend_handles[: len(rows)]:
        handle.set_sizes([40.0])  # type: ignore[union-attr]
    return figure


def plain_numbers(axis: Axis) -> None:
    """Ticks of a logarithmic axis without exponents: 200 and not 2 x 10^2."""
    from matplotlib.ticker import LogFormatter

    axis.set_major_formatter(LogFormatter())
    axis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))


def colours(rows: Sequence[Row]) -> list[Any]:
    """Ours in the one colour, every other row in a colour of its own."""
    from matplotlib import colormaps

    others = iter(colormaps["tab20"].colors[2:])  # type: ignore[attr-defined]
    return [OURS if row.ours else next(others, PEERS) for row in rows]


def series_of(result: Result, group: Group, key: str) -> list[Group]:
    """Groups whose works differ in `key` alone, in its order: those with `group` among them, else the longest series.

    A model's head is a shape as well: a series over heads is ordered by D x V.
    """
    ignored = {"flop", "tokens"} if key == "tokens" else {"flop", "head", "hidden", "vocab"}
    by_work: dict[tuple[Any, ...], list[Group]] = {}
    for other in groups_of(result).values():
        if other.work is not None and other.implementations and other.work["kind"] == work_of(group)["kind"]:
            shared = tuple((name, value) for name, value in other.work.items() if name not in ignored)
            by_work.setdefault(shared, []).append(other)

    def wanted(groups: list[Group]) -> tuple[bool, int]:
        return len(groups) > 1 and group.name in {other.name for other in groups}, len(groups)

    chosen: list[Group] = max(by_work.values(), key=wanted)
    return sorted(chosen, key=lambda other: float(work_of(other)["flop"]))


def scaling_chart(series: Sequence[Group], key: str, caption: str) -> Figure:
    """Time and memory beside each other, a line for each implementation."""
    title = f"Time and memory of {subject(series[0])}, over {'models' if key == 'head' else 'tokens'}"
    figure, (time, memory) = page(4.2, 2, (title, size(series[0], without=key), caption))
    relative = all(group.floor is not None for group in series)
    time.set_title("time, multiples of the products alone" if relative else "time (s)", loc="left", fontsize=9)
    memory.set_title("memory beside the inputs (MiB)", loc="left", fontsize=9)
    places = [float(i) if key == "head" else float(work_of(group)["tokens"]) for i, group in enumerate(series)]
    rows = {row.implementation: row for group in series for row in group.implementations}
    for (name, row), colour in zip(rows.items(), colours(list(rows.values())), strict=True):
        points = [next((row for row in group.implementations if row.implementation == name), None) for group in series]
        style: dict[str, Any] = {"color": colour, "marker": "o", "markersize": 4, "linewidth": 2.4 if row.ours else 1.4}
        time.plot(places, [time_of(x, g, relative) for x, g in zip(points, series, strict=True)], label=name, **style)
        memory.plot(places, [math.nan if x is None or not x.peak else x.peak / 2**20 for x in points], **style)
    for axes in (time, memory):
        axes.set_yscale("log")
        plain_numbers(axes.yaxis)
        if key == "tokens":
            axes.set_xscale("log", base=2)
            axes.set_xticks(places, [f"{place:,.0f}" for place in places])
            axes.set_xlabel("tokens")
        else:
            axes.set_xticks(places, [work_of(group)["head"] for group in series], rotation=30, ha="right")
    figure.legend(loc="outside right upper")
    return figure


def time_of(row: Row | None, group: Group, relative: bool) -> float:
    """NaN where an implementation was not measured, so that its line has a gap there."""
    if row is None:
        return math.nan
    return (group.times_products(row) or math.nan) if relative else row.median
