"""The charts of a report, as PNG bytes, each in a light and a dark theme.

matplotlib's figures without pyplot: no global state, no display, no backend to choose, so a training process can draw
at its end whatever else runs in it. Colours are Okabe and Ito's, which stay apart for colour-blind readers; lines that
share an axis differ in shape too. matplotlib is imported only here, and only when a chart is drawn.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fused_grpo.trainer.formatting import short_number
from fused_grpo.trainer.metrics import metric

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Records = Sequence[Mapping[str, object]]
Series = tuple[list[float], list[float]]  # steps, values; only where the value is finite

EVAL_NAMES = ("eval/accuracy", "eval/reward")
DPI = 160
SMOOTH_FROM = 40


@dataclass(frozen=True, kw_only=True)
class Theme:
    """Colours of a chart and of the page it sits on."""

    name: str
    background: str
    text: str
    muted: str
    grid: str
    line: str
    accent: str
    phases: tuple[str, ...]


LIGHT = Theme(
    name="light",
    background="#ffffff",
    text="#1f2328",
    muted="#59636e",
    grid="#e3e7eb",
    line="#0072b2",
    accent="#b84a00",
    phases=("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#7f7f7f"),
)
DARK = Theme(
    name="dark",
    background="#12161c",
    text="#e6edf3",
    muted="#9aa5b1",
    grid="#2a313a",
    line="#56b4e9",
    accent="#f0a030",
    phases=("#56b4e9", "#e69f00", "#2bb98f", "#dd93bd", "#9a9a9a"),
)

# title, metric, what one unit of it is
SMALL_MULTIPLES = (
    ("completion length", "completion_length", "tokens"),
    ("completions cut at the limit", "completions/clipped_ratio", "share"),
    ("tokens at the clip bound", "clip_ratio", "share"),
    ("entropy", "entropy", "nats per token"),
    ("KL to the reference", "kl", "nats per token"),
    ("gradient norm", "grad_norm", ""),
)


def series(records: Records, name: str) -> Series:
    """Steps and values of a metric, where it was measured and finite. Of a step that was repeated, the last counts."""
    points = [(metric(record, "step"), metric(record, name)) for record in records]
    known = {step: value for step, value in points if step is not None and value is not None}
    return sorted(known), [known[step] for step in sorted(known)]


def phase_series(records: Records) -> dict[str, Series]:
    """Seconds of each `time/<phase>`, in the order in which the phases first appear."""
    names = dict.fromkeys(name for record in records for name in record if name.startswith("time/"))
    return {name.removeprefix("time/"): series(records, name) for name in names}


def reward_chart(records: Records, theme: Theme) -> bytes:
    """Mean reward of each step, a band of one standard deviation, and the held-out points."""
    figure, axes = _figure(theme, width=9.2, height=3.9)
    _draw_band(axes, records, theme)
    _draw_mean(axes, series(records, "reward"), theme)
    for name, marker in zip(EVAL_NAMES, "sD", strict=True):
        label = f"held-out {name.removeprefix('eval/')}"
        _draw_held_out(axes, series(records, name), theme, marker=marker, label=label)
    _finish(axes, theme, ylabel="reward")
    _legend(axes, theme)
    return _png(figure)


def phase_chart(records: Records, theme: Theme) -> bytes:
    """How the time of each step divides into its phases, in percent. Takes two steps to show anything."""
    figure, axes = _figure(theme, width=9.2, height=2.5)
    phases = {name: dict(zip(*points, strict=True)) for name, points in phase_series(records).items()}
    steps = sorted(set().union(*phases.values()))
    totals = {step: sum(seconds.get(step, 0.0) for seconds in phases.values()) or 1.0 for step in steps}
    shares = [[100 * seconds.get(step, 0.0) / totals[step] for step in steps] for seconds in phases.values()]
    colours = [theme.phases[i % len(theme.phases)] for i in range(len(phases))]
    axes.stackplot(
        steps, shares, labels=list(phases), colors=colours, step="mid", edgecolor=theme.background, linewidth=0.3
    )
    axes.set_ylim(0, 100)
    _finish(axes, theme, ylabel="% of the step")
    axes.margins(x=0.0)
    _legend(axes, theme)
    return _png(figure)


def small_series(records: Records) -> list[tuple[str, str, Series]]:
    """Title, unit and points of those `SMALL_MULTIPLES` that the run measured."""
    found = [(title, unit, series(records, name)) for title, name, unit in SMALL_MULTIPLES]
    return [(title, unit, points) for title, unit, points in found if points[0]]


def small_multiples(records: Records, theme: Theme) -> bytes:
    """One small chart for each of `small_series(records)`, of which there must be one at least."""
    measured = small_series(records)
    rows = -(-len(measured) // 3)
    figure = _blank(theme, width=9.2, height=2.1 * rows)
    for index, (title, unit, (steps, values)) in enumerate(measured):
        axes = figure.add_subplot(rows, 3, index + 1)
        axes.plot(steps, values, color=theme.line, linewidth=1.2, marker="o" if len(steps) == 1 else "")
        axes.set_title(f"{title} ({unit})" if unit else title, loc="left", fontsize=9, color=theme.text)
        _finish(axes, theme, ylabel="", xlabel="")
        axes.tick_params(labelsize=8)
    return _png(figure)


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Centred mean over `2 * window + 1` values, fewer at the ends."""
    slices = (values[max(i - window, 0) : i + window + 1] for i in range(len(values)))
    return [sum(part) / len(part) for part in slices]


def _draw_mean(axes: Axes, points: Series, theme: Theme) -> None:
    steps, rewards = points
    window = len(rewards) // 20 if len(rewards) >= SMOOTH_FROM else 0
    thin: dict[str, Any] = {"linewidth": 1.0, "alpha": 0.45} if window else {"linewidth": 2.0}
    marker = "o" if len(steps) == 1 else ""
    axes.plot(steps, rewards, color=theme.line, marker=marker, label="mean reward of the step", **thin)
    if window:
        label = f"mean of {2 * window + 1} steps"
        axes.plot(steps, moving_mean(rewards, window), color=theme.line, linewidth=2.2, label=label)


def _draw_band(axes: Axes, records: Records, theme: Theme) -> None:
    complete = [record for record in records if None not in (metric(record, "reward"), metric(record, "reward_std"))]
    steps, means = series(complete, "reward")
    _, spreads = series(complete, "reward_std")
    if len(steps) < 2:
        return
    low = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
    high = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
    axes.fill_between(steps, low, high, color=theme.line, alpha=0.14, linewidth=0, label="± one standard deviation")


def _draw_held_out(axes: Axes, points: Series, theme: Theme, *, marker: str, label: str) -> None:
    steps, values = points
    if not steps:
        return
    axes.plot(
        steps,
        values,
        color=theme.accent,
        marker=marker,
        markersize=5.5,
        linewidth=1.3,
        linestyle=":",
        label=label,
        markeredgecolor=theme.background,
        markeredgewidth=0.8,
        zorder=4,
        clip_on=False,
    )
    for i in sorted({0, len(steps) - 1}):
        _label(axes, steps[i], values[i], theme)


def _label(axes: Axes, step: float, value: float, theme: Theme) -> None:
    """The value above its point, with a rim in the colour of the page so that lines do not strike it through."""
    from matplotlib.patheffects import withStroke

    axes.annotate(
        short_number(value),
        (step, value),
        textcoords="offset points",
        xytext=(0, 9),
        ha="center",
        fontsize=9.5,
        fontweight="bold",
        color=theme.accent,
        zorder=5,
        path_effects=[withStroke(linewidth=3, foreground=theme.background)],
    )


def _figure(theme: Theme, *, width: float, height: float) -> tuple[Figure, Axes]:
    figure = _blank(theme, width=width, height=height)
    return figure, figure.add_subplot()


def _blank(theme: Theme, *, width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=DPI, facecolor=theme.background, layout="constrained")


def _finish(axes: Axes, theme: Theme, *, ylabel: str, xlabel: str = "optimizer step") -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_facecolor(theme.background)
    axes.grid(axis="y", color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.03)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(theme.muted)
    axes.tick_params(colors=theme.muted, labelsize=9, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.set_ylabel(ylabel, color=theme.muted, fontsize=9)
    axes.set_xlabel(xlabel, color=theme.muted, fontsize=9)


def _legend(axes: Axes, theme: Theme) -> None:
    """Above the axes, where it hides no data."""
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        borderaxespad=0.2,
        ncols=5,
        frameon=False,
        labelcolor=theme.text,
        fontsize=9,
        handlelength=1.4,
    )


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
