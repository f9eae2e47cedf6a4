"""What the charts of `charts.py` are drawn with: a page with its words, axes, names beside what they name.

Everything is laid out by hand, in inches and in points of a typesetter, by the widths of DejaVu Sans: it comes with
matplotlib, so a chart looks the same wherever it is made, and it is wider than the fonts that an SVG is shown in.
matplotlib is used without pyplot, and imported only when something is drawn.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from fused_grpo.bench.results_file import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Theme:
    """Colours of a chart."""

    name: str
    background: str
    text: str
    muted: str
    grid: str
    line: str


THEMES = {
    "": Theme(name="light", background="#ffffff", text="#1f2328", muted="#59636e", grid="#e3e7eb", line="#0072b2"),
    "-dark": Theme(name="dark", background="#0d1117", text="#e6edf3", muted="#9aa5b1", grid="#2a313a", line="#56b4e9"),
}
PEERS = {"light": "#bcc4cd", "dark": "#4b5663"}
FONT = "DejaVu Sans"
FONTS = f"-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, '{FONT}', sans-serif"
RC: Any = {"font.family": [FONT], "svg.fonttype": "none", "svg.hashsalt": "fused-grpo"}
TITLE, BODY, SMALL = 13.0, 9.5, 8.0  # points
WIDTH, MARGIN = 8.8, 0.25  # inches
GAP = 7.0
# Where a name may stand: degrees around its point, and points away from its rim.
ANGLES, AWAY = (0, 180, 90, 270, 20, -20, 160, 200, 40, -40, 140, 220, 65, -65, 115, 245), (4.0, 9.0, 15.0, 22.0)

Write = Callable[[float], str]
Box = tuple[float, float, float, float]  # left, bottom, right, top


def page(theme: Theme, *, height: float, title: str, subtitle: str, caption: str) -> Figure:
    """A figure with its words: 0.75 inches of them above, 0.35 below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), facecolor=theme.background)
    FigureCanvasAgg(figure)
    x = MARGIN / WIDTH
    figure.text(x, 1 - 0.36 / height, title, fontsize=TITLE, fontweight="bold", color=theme.text)
    figure.text(x, 1 - 0.61 / height, subtitle, fontsize=BODY, color=theme.muted)
    figure.text(x, 0.17 / height, caption, fontsize=SMALL, color=theme.muted)
    return figure


def svg(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue().decode().replace(f"'{FONT}'", FONTS).encode()


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=200, metadata={"Software": None})
    return buffer.getvalue()


def panel(figure: Figure, theme: Theme, box: Sequence[float]) -> Axes:
    """Axes at (left, bottom, width, height) inches."""
    width, height = figure.get_size_inches()
    axes = figure.add_axes((box[0] / width, box[1] / height, box[2] / width, box[3] / height))
    axes.set_facecolor("none")
    axes.spines[:].set_visible(False)
    axes.tick_params(colors=theme.muted, labelsize=SMALL, length=0)
    axes.set_axisbelow(True)
    return axes


def colour_of(row: Row, theme: Theme) -> str:
    return theme.line if row.ours else PEERS[theme.name]


def name_style(row: Row, theme: Theme) -> dict[str, Any]:
    return {"fontweight": "bold", "color": theme.line} if row.ours else {"color": theme.text}


def width_of(text: str, fontsize: float, *, bold: bool = False) -> float:
    """Points, in the font that everything is laid out by."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family=[FONT], size=fontsize, weight="bold" if bold else "normal")
    width: float = text_to_path.get_text_width_height_descent(text, font, False)[0]
    return width


def label(
    axes: Axes, point: tuple[float, float], offset: tuple[float, float], row: Row, words: tuple[str, str], theme: Theme
) -> None:
    """Two words at so many points from a place in the data; the first is a row's, the second in a quieter colour."""
    style: dict[str, Any] = {"textcoords": "offset points", "va": "center_baseline", "fontsize": BODY, "zorder": 5}
    style["annotation_clip"] = False
    axes.annotate(words[0], point, xytext=offset, **style, **name_style(row, theme))
    behind = offset[0] + width_of(words[0], BODY, bold=row.ours) + GAP
    axes.annotate(words[1], point, xytext=(behind, offset[1]), color=theme.muted, **style)


def draw_floor(axes: Axes, x: float, text: str, theme: Theme) -> None:
    """A line across, named above."""
    axes.axvline(x, color=theme.text, linewidth=1.0, linestyle=(0, (4, 3)), zorder=4)
    across = axes.get_xaxis_transform()
    style: dict[str, Any] = {"fontsize": SMALL, "color": theme.text, "va": "bottom", "annotation_clip": False}
    axes.annotate(text, (x, 1.0), xycoords=across, xytext=(-2, 4), textcoords="offset points", **style)


def label_points(
    axes: Axes,
    points: Sequence[tuple[Row, float]],
    write: Callable[[Row], str],
    theme: Theme,
    *,
    walls: Sequence[float],
) -> None:
    """A name at each (row, radius), at (median, error): the nearest place around it that is free, as good as can be.

    `walls` are the x of lines across, which no name should have in it.
    """
    scale = 72 / axes.figure.dpi
    spots = {row: axes.transData.transform((row.median, row.error or 0.0)) * scale for row, _ in points}
    rims: list[Box] = [(*(spots[row] - 0.9 * radius), *(spots[row] + 0.9 * radius)) for row, radius in points]
    taken = list(rims)
    left, bottom, right, top = (pixel * scale for pixel in axes.bbox.extents)
    for wall in walls:
        x = axes.transData.transform((wall, 1.0))[0] * scale
        taken.append((x - 2.0, bottom, x + 2.0, top))
    height = 1.4 * BODY
    for row, radius in sorted(points, key=lambda point: (not point[0].ours, -point[1])):
        (x, y), words = spots[row], (row.contender, write(row))
        width = width_of(words[0], BODY, bold=row.ours) + GAP + width_of(words[1], BODY)
        costs: dict[Box, float] = {}
        for rank, (away, angle) in enumerate(product(AWAY, ANGLES)):
            dx, dy = math.cos(math.radians(angle)), math.sin(math.radians(angle))
            cx, cy = x + dx * (radius + away + width / 2), y + dy * (radius + away + height / 2)
            box = (cx - width / 2 - 2.0, cy - height / 2, cx + width / 2 + 2.0, cy + height / 2)
            outside = box[0] < left or box[1] < bottom or box[2] > right or box[3] > top
            costs[box] = 1e4 * outside + sum(overlap(box, other) for other in taken) + away + 0.2 * rank
        box = min(costs, key=lambda box: costs[box])
        near = (box[0] - 5.0, box[1] - 5.0, box[2] + 5.0, box[3] + 5.0)
        if sum(overlap(near, other) > 0 for other in rims) > 1:  # it could be the name of another
            end = (min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3]))
            draw_path(axes.figure, [(x / scale, y / scale), (end[0] / scale, end[1] / scale)], theme.text)
        taken.append(box)
        place = (box[0] + 2.0 - x, (box[1] + box[3]) / 2 - y)
        label(axes, (row.median, row.error or 0.0), place, row, words, theme)


def overlap(one: Box, other: Box) -> float:
    """Area that two boxes share."""
    width, height = (min(one[i + 2], other[i + 2]) - max(one[i], other[i]) for i in (0, 1))
    return max(width, 0.0) * max(height, 0.0)


def label_ends(axes: Axes, ends: Sequence[tuple[Row, float, float]], theme: Theme, *, column: float) -> None:
    """A name at the end (x, y) of each line, in a column `column` points right of the axes, none upon another."""
    scale = 72 / axes.figure.dpi
    _, bottom, right, top = (pixel * scale for pixel in axes.bbox.extents)
    spots = [(row, *(axes.transData.transform((x, y)) * scale)) for row, x, y in ends]
    spots.sort(key=lambda spot: spot[2])
    heights = apart([spot[2] for spot in spots], 1.3 * SMALL, (bottom, top))
    for (row, x, y), height in zip(spots, heights, strict=True):
        start, turn, end = x + 4.0, right + 0.35 * column, right + column - 3.0
        pixels = [(start, y), (max(start, turn), y), (end, height)]
        draw_path(axes.figure, [(px / scale, py / scale) for px, py in pixels], colour_of(row, theme))
        place = axes.figure.transFigure.inverted().transform(((right + column) / scale, height / scale))
        style: dict[str, Any] = {"fontsize": SMALL, "va": "center_baseline", **name_style(row, theme)}
        axes.figure.text(place[0], place[1], row.contender, **style)


def draw_path(figure: Any, pixels: Sequence[tuple[float, float]], colour: str) -> None:
    """A thin line from a thing to its name, above everything."""
    from matplotlib.lines import Line2D

    xs, ys = zip(*figure.transFigure.inverted().transform(pixels), strict=True)
    figure.add_artist(Line2D(xs, ys, color=colour, linewidth=0.7, alpha=0.8))


def apart(wanted: Sequence[float], gap: float, limits: tuple[float, float]) -> list[float]:
    """Ascending heights, at least `gap` from each other and as near to those `wanted` as may be (least squares)."""
    blocks: list[list[float]] = []
    for i, height in enumerate(wanted):
        blocks.append([height - i * gap])
        while len(blocks) > 1 and mean(blocks[-2]) > mean(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    low, high = limits[0], limits[1] - (len(wanted) - 1) * gap
    levels = [max(low, min(high, mean(block))) for block in blocks for _ in block]
    return [level + i * gap for i, level in enumerate(levels)]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def label_ticks(axes: Axes, side: str, write: Write, *, binary: bool = False) -> None:
    """Round values of a logarithmic axis: the densest grid that has at most six."""
    low, high = getattr(axes, f"get_{side}lim")()
    powers = range(-40, 41)
    if binary:
        grids = [[2.0 ** (step * k) for k in powers] for step in (1, 2, 3, 4, 5)]
    else:
        steps = ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 5), (1, 3), (1,))
        grids = [[m * 10.0**k for k in powers for m in step] for step in (steps[3:] if write is power_text else steps)]
    found = [[x for x in grid if low <= x <= high] for grid in grids]
    values = next((values for values in found if len(values) <= 6), found[-1])
    getattr(axes, f"set_{side}ticks")(values, [re.sub(r"\.(\d*?)0+(?!\d)", decimals, write(x)) for x in values])
    axes.minorticks_off()


def decimals(match: re.Match[str]) -> str:
    """Those that are not zeros at the end, with their point if there are any."""
    return f".{match[1]}" if match[1] else ""


def power_text(value: float) -> str:
    """`10⁻⁶`."""
    return "10" + str(round(math.log10(value))).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
