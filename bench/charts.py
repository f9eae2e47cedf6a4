"""A result file as charts: `python -m fused_grpo.bench.charts FILE --output DIR [--group TEXT]`.

    time              a bar for each contender of a group, and the products alone as a line
    memory            the same of the most bytes beside the inputs, and the gradients alone as a line
    front             error over time, the area of a point its memory: down, left and small is better
    scaling-tokens    time and memory over N, where works differ in nothing else
    scaling-heads     the same over models, by the size D x V of their heads

Each comes as NAME.svg and .png, and as NAME-dark.svg and .png for the `<picture>` of a README. Two variants, and not
one on a transparent page: greys that can be read on white and on black can be read well on neither. Each has the
background of GitHub's page, where it is not seen, and stays legible on a page that shows the wrong one of them.

Ours have the one colour, everyone else is grey; names stand at what they name. Text in an SVG is text, in the fonts of
who reads it. Files are the same byte for byte whenever they are made from the same result.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fused_grpo.bench import drawing
from fused_grpo.bench.drawing import BODY, MARGIN, SMALL, WIDTH, Theme, Write
from fused_grpo.bench.results_file import (
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
    read,
    rounds_text,
    seconds_text,
    version_of,
)
from fused_grpo.errors import FusedGRPOError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW = 0.33  # inches for a bar
MOST_DIAMETER = 42.0  # points, of the largest memory's point
# Beyond this factor between the least and the most, bars on a linear axis are all of one length or none at all.
LOG_FROM = 60.0


def write(result: Result, folder: Path, *, group: str | None = None) -> list[Path]:
    """Every chart that the file has data for. `group` is in the name of the group to show, else it is `headline`'s."""
    from matplotlib import rc_context

    folder.mkdir(parents=True, exist_ok=True)
    chosen, written = headline(result, name=group), []
    with rc_context(drawing.RC):
        for suffix, theme in drawing.THEMES.items():
            for name, figure in figures(result, chosen, theme):
                for kind, content in (("svg", drawing.svg(figure)), ("png", drawing.png(figure))):
                    written.append(folder / f"{name}{suffix}.{kind}")
                    written[-1].write_bytes(content)
    return written


def figures(result: Result, group: Group, theme: Theme) -> Iterator[tuple[str, Figure]]:
    """(name, figure) of each."""
    caption = caption_of(result, [group])
    yield "time", time_chart(group, theme, caption_of(result, [group], what="median, fastest and slowest"))
    if any(row.peak for row in group.contenders):
        yield "memory", memory_chart(group, theme, caption)
    if sum(on_front(row) for row in group.contenders) > 1:
        yield "front", front_chart(group, theme, caption)
    for name, key in (("scaling-tokens", "tokens"), ("scaling-heads", "head")):
        series = series_of(result, group, key)
        if len(series) > 1:
            yield name, scaling_chart(series, key, theme, caption_of(result, series))


def caption_of(result: Result, groups: Sequence[Group], *, what: str = "median") -> str:
    parts = [processor(result), f"torch {version_of(result, 'torch')}", f"{what} of {rounds_text(groups)} in turns"]
    parts += ["sizes of a trial run"] if result["machine_info"].get("tiny") else []
    return "  ·  ".join([*parts, day(result), f"commit {commit(result)}"])


def work_of(group: Group) -> Mapping[str, Any]:
    assert group.work is not None
    return group.work


def subject(group: Group) -> str:
    """What is done, for a title."""
    work = work_of(group)
    what = {"loss": "the GRPO loss", "logprobs": "log-probs"}[work["kind"]]
    return what + {"no_grad": "", "frozen": " and dH", "trainable": " and gradients"}[work["direction"]]


def size(work: Mapping[str, Any], *, without: str = "") -> str:
    """How large, for a subtitle."""
    parts = [] if without == "head" else [f"{work['head']}'s head, D = {work['hidden']:,}, V = {work['vocab']:,}"]
    parts += [] if without == "tokens" else [f"{work['tokens']:,} tokens"]
    parts += [work["dtype"].replace("bfloat", "bf").replace("float", "fp")]
    parts += [f"mean entropy {work['entropy']:g}"] if work["entropy"] is not None else []
    parts += [f"{work['idle']:.0%} of sequences idle"] if work["idle"] else []
    return ", ".join([*parts, "uneven lengths"] if work["uneven"] else parts)


def time_chart(group: Group, theme: Theme, caption: str) -> Figure:
    floor = None if group.floor is None else ("products alone", group.floor.median)
    values = {row: (row.median, row.fastest, row.slowest) for row in group.contenders}
    words = (f"Time of {subject(group)}", size(work_of(group)), caption)
    return bars(values, theme, floor=floor, write=seconds_text, words=words)


def memory_chart(group: Group, theme: Theme, caption: str) -> Figure:
    measured = sorted((row for row in group.contenders if row.peak), key=lambda row: (row.peak, row.median))
    floor = ("gradients alone", float(group.gradient_bytes)) if group.gradient_bytes else None
    values = {row: (float(row.peak or 0),) * 3 for row in measured}
    words = (f"Memory of {subject(group)}, beside the inputs", size(work_of(group)), caption)
    return bars(values, theme, floor=floor, write=bytes_text, words=words)


def bars(
    values: Mapping[Row, tuple[float, float, float]],
    theme: Theme,
    *,
    floor: tuple[str, float] | None,
    write: Write,
    words: tuple[str, str, str],
) -> Figure:
    """A bar for each (value, least, most); dots on a logarithmic axis where bars would show nothing."""
    height = 1.6 + ROW * len(values)
    numbers = [number for three in values.values() for number in three] + ([floor[1]] if floor else [])
    log = max(numbers) > LOG_FROM * min(numbers)
    subtitle = words[1] + ("  ·  logarithmic axis" if log else "")
    figure = drawing.page(theme, height=height, title=words[0], subtitle=subtitle, caption=words[2])
    names = max(drawing.width_of(row.contender, BODY, bold=row.ours) for row in values) / 72
    versions = max(drawing.width_of(row.version or "", SMALL) for row in values) / 72
    left = MARGIN + names + 0.12 + versions + 0.15
    width = WIDTH - left - 1.75
    axes = drawing.panel(figure, theme, (left, 0.5, width, ROW * len(values)))
    start = 0.5 * min(numbers) if log else 0.0
    axes.set(xscale="log" if log else "linear", xlim=(start, max(numbers)), ylim=(len(values) - 0.5, -0.5))
    axes.tick_params(labelbottom=False, labelleft=False, which="both", length=0)
    middle: dict[str, Any] = {"va": "center_baseline", "transform": axes.get_yaxis_transform()}
    for y, (row, (value, least, most)) in enumerate(values.items()):
        style = drawing.name_style(row, theme)
        axes.text((MARGIN - left) / width, y, row.contender, fontsize=BODY, **middle, **style)
        axes.text(-(versions + 0.15) / width, y, row.version or "", fontsize=SMALL, color=theme.muted, **middle)
        draw_bar(axes, y, (start, value), drawing.colour_of(row, theme), as_dot=log)
        axes.plot([least, most], [y, y], color=theme.text, linewidth=1.0, solid_capstyle="butt", clip_on=False)
        multiple = f"{number_text(value / floor[1])}×" if floor else ""
        drawing.label(axes, (most, y), (8.0 if log else 6.0, 0.0), row, (write(value), multiple), theme)
    if floor is not None:
        drawing.draw_floor(axes, floor[1], f"{floor[0]} {write(floor[1])}, 1×", theme)
    return figure


def draw_bar(axes: Axes, y: float, reach: tuple[float, float], colour: str, *, as_dot: bool) -> None:
    start, end = reach
    if as_dot:
        axes.plot([start, end], [y, y], color=colour, linewidth=1.2, linestyle=":")
        axes.plot([end], [y], "o", color=colour, markersize=8, clip_on=False)
    else:
        axes.barh(y, end, height=0.62, color=colour)


def on_front(row: Row) -> bool:
    """Whether there is all of it to draw: a logarithmic axis has no zero."""
    return bool(row.error and row.peak)


def front_chart(group: Group, theme: Theme, caption: str) -> Figure:
    rows, height = sorted(filter(on_front, group.contenders), key=lambda row: -(row.peak or 0)), 5.3
    title = f"Error, time and memory of {subject(group)}"
    figure = drawing.page(theme, height=height, title=title, subtitle=size(work_of(group)), caption=caption)
    axes = drawing.panel(figure, theme, (0.72, 0.85, WIDTH - 0.72 - MARGIN, height - 0.85 - 1.3))
    times, errors = [row.median for row in group.rows], [row.error or 0.0 for row in rows]
    axes.set(xscale="log", xlim=(min(times) / 1.1, max(times) * 1.4))
    axes.set(yscale="log", ylim=(min(errors) / 3, max(errors) * 4))
    axes.grid(color=theme.grid, linewidth=0.8)
    axes.set_xlabel("time (log)", color=theme.muted, fontsize=SMALL, loc="right")
    above: dict[str, Any] = {"y": 1 - 0.98 / height, "color": theme.muted, "fontsize": SMALL}
    figure.text(x=MARGIN / WIDTH, s="largest error (log)", **above)
    figure.text(x=1 - MARGIN / WIDTH, s="area: memory; down, left and small is better", ha="right", **above)
    drawing.label_ticks(axes, "x", seconds_text)
    drawing.label_ticks(axes, "y", drawing.power_text)
    most, points = max(row.peak or 0 for row in rows), []
    for row in rows:
        diameter = max(MOST_DIAMETER * math.sqrt((row.peak or 0) / most), 4.0)
        style: dict[str, Any] = {"color": drawing.colour_of(row, theme), "edgecolor": theme.background}
        axes.scatter([row.median], [row.error or 0.0], s=diameter**2, zorder=3, linewidth=1.0, **style)
        points.append((row, diameter / 2))
    walls = [group.floor.median] if group.floor is not None else []
    drawing.label_points(axes, points, lambda row: bytes_text(row.peak or 0), theme, walls=walls)
    if group.floor is not None:
        drawing.draw_floor(axes, group.floor.median, f"products alone {seconds_text(group.floor.median)}", theme)
    return figure


def series_of(result: Result, group: Group, key: str) -> list[Group]:
    """Groups whose works differ in `key` alone, in its order: with `group` among them, else the longest there is.

    The head of a model is its shape, too: a series over heads goes by D x V.
    """
    ignored = {"flop", "tokens"} if key == "tokens" else {"flop", "head", "hidden", "vocab"}
    found: dict[tuple[Any, ...], list[Group]] = {}
    for other in groups_of(result).values():
        if other.work is not None and other.contenders and other.work["kind"] == work_of(group)["kind"]:
            same = tuple((name, value) for name, value in other.work.items() if name not in ignored)
            found.setdefault(same, []).append(other)

    def wanted(groups: list[Group]) -> tuple[bool, int]:
        return len(groups) > 1 and group.name in {other.name for other in groups}, len(groups)

    chosen = max(found.values(), key=wanted)
    return sorted(chosen, key=lambda other: float(work_of(other)["flop"]))


def scaling_chart(series: Sequence[Group], key: str, theme: Theme, caption: str) -> Figure:
    """Time and memory: side by side over N, one above the other where the names of models need the room."""
    stacked = key == "head"
    height = 6.6 if stacked else 4.2
    title = f"Time and memory of {subject(series[0])}, over {'models' if stacked else 'tokens'}"
    subtitle = size(work_of(series[0]), without=key) + ("  ·  under a model: D × V of its head" if stacked else "")
    figure = drawing.page(theme, height=height, title=title, subtitle=subtitle, caption=caption)
    rows = [row for group in series for row in group.contenders]
    names = max(drawing.width_of(row.contender, SMALL, bold=row.ours) for row in rows) / 72 + 0.35
    half = (height - 1.1 - 2 * 0.8) / 2 if stacked else (WIDTH - MARGIN) / 2
    boxes = [(0.75, 0.75, half - 0.75 - names, height - 0.75 - 1.15)]
    boxes += [(half + 0.75, *boxes[0][1:])]
    if stacked:
        boxes = [(0.75, bottom, WIDTH - 0.75 - names - MARGIN, half) for bottom in (0.75 + half + 0.8, 0.75)]
    draw_curves(drawing.panel(figure, theme, boxes[0]), series, key, theme, "time")
    if any(row.peak for row in rows):
        draw_curves(drawing.panel(figure, theme, boxes[1]), series, key, theme, "memory")
    return figure


def draw_curves(axes: Axes, series: Sequence[Group], key: str, theme: Theme, what: str) -> None:
    """A line for each contender, and one for the floor. Times are multiples of it, or else all lines would be one."""
    at = [float(i) if key == "head" else float(work_of(group)["tokens"]) for i, group in enumerate(series)]
    relative = what == "time" and all(group.floor is not None for group in series)
    floors = [(1.0 if relative else 0.0) if what == "time" else float(group.gradient_bytes) for group in series]
    if all(floors):
        axes.plot(at, floors, color=theme.text, linewidth=1.0, linestyle=(0, (4, 3)), zorder=4)
    ends = []
    for name in dict.fromkeys(row.contender for group in series for row in group.contenders):
        found = [next((row for row in group.contenders if row.contender == name), None) for group in series]
        values = [height_of(row, group, what, relative) for row, group in zip(found, series, strict=True)]
        known = [(row, x, y) for row, x, y in zip(found, at, values, strict=True) if row is not None and y > 0]
        if known:
            row = known[0][0]
            style: dict[str, Any] = {"linewidth": 2.2, "zorder": 5} if row.ours else {"linewidth": 1.3, "zorder": 3}
            axes.plot(at, values, color=drawing.colour_of(row, theme), marker="o", markersize=3.5, **style)
            ends.append(known[-1])
    words = {"time": "time, multiples of the products alone (log)" if relative else "time (log)"}
    words["memory"] = "memory beside the inputs (log)" + (", dashed: gradients alone" if all(floors) else "")
    axes.set_title(words[what], loc="left", fontsize=SMALL, color=theme.muted, pad=8)
    axes.set_yscale("log")
    axes.margins(y=0.08)
    axes.grid(axis="y", color=theme.grid, linewidth=0.8)
    unit = (lambda x: f"{number_text(x)}×") if relative else seconds_text if what == "time" else bytes_text
    drawing.label_ticks(axes, "y", unit, binary=what == "memory")
    if key == "head":
        works = [work_of(group) for group in series]
        names = [f"{work['head']}\n{work['hidden']:,} × {work['vocab'] / 1000:.0f}k" for work in works]
        axes.set_xticks(at, names, linespacing=1.4)
    else:
        axes.set_xscale("log", base=2)
        axes.set_xticks(at, [f"{x / 1024:g}k" if x % 1024 == 0 else f"{x:g}" for x in at])
        axes.minorticks_off()
        axes.set_xlabel("tokens (log)", color=theme.muted, fontsize=SMALL, loc="right")
    drawing.label_ends(axes, ends, theme, column=18.0)


def height_of(row: Row | None, group: Group, what: str, relative: bool) -> float:
    """NaN where there is nothing, so that a line has a gap there."""
    if row is None:
        return math.nan
    if what == "memory":
        return float(row.peak or math.nan)
    return (group.times_products(row) or math.nan) if relative else row.median


def main(argv: Sequence[str] | None = None) -> int:
    """Write the charts of a file into a folder."""
    parser = argparse.ArgumentParser(prog="python -m fused_grpo.bench.charts", description="Charts of a result file.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--group", metavar="TEXT", help="show a group with this in its name")
    options = parser.parse_args(argv)
    try:
        written = write(read(options.file), options.output, group=options.group)
    except FusedGRPOError as error:
        print(error, file=sys.stderr)
        return 2
    print(*written, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
