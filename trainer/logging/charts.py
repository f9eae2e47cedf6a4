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

from fused_grpo.trainer.logging.formatting import short_number
from fused_grpo.trainer.logging.metrics import metric

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Records = Sequence[Mapping[str, object]]
Series = tuple[list[float], list[float]]  # steps, values; only where the value is finite

EVAL_NAMES = ("eval/accuracy", "eval/reward")
DPI = 160
SMOOTH_FROM = 40
LINE_STYLES = ("-", "--", ":")


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

# Beyond this factor between its least and greatest value, a metric is drawn on a logarithmic axis.
LOG_FROM = 100.0


@dataclass(frozen=True)
class Panel:
    """One small chart: a title, what one unit is, and its metrics, each with a label where there are several."""

    title: str
    unit: str
    metrics: Mapping[str, str]


PANELS = (
    Panel("completion length", "tokens", {"": "completion_length"}),
    Panel("completions cut at the limit", "share", {"": "completions/clipped_ratio"}),
    Panel("groups with equal rewards", "share", {"": "frac_reward_zero_std"}),
    Panel("entropy", "nats per token", {"": "entropy"}),
    Panel("KL to the reference", "nats per token", {"": "kl"}),
    Panel("clipped tokens", "share", {"low": "clip_ratio/low_mean", "high": "clip_ratio/high_mean"}),
    Panel("gradient norm", "", {"": "grad_norm"}),
    Panel("learning rate", "", {"": "learning_rate"}),
    Panel("sampler against trainer", "|Δ log p|", {"": "sampling/sampling_logp_difference/mean"}),
)


def series(records: Records, name: str) -> Series:
    """Steps and values of a metric, where it was measured and finite. Of a step that was repeated, the last counts."""
    points = [(metric(record, "step"), metric(record, name)) for record in records]
    known = {step: value for step, value in points if step is not None and value is not None}
    return sorted(known), [known[step] for step in sorted(known)]


def phase_series(records: Records) -> dict[str, Series]:
    """Seconds of each `time/<phase>`, in the order in which they first appear; not those of parts of a phase."""
    timed = (name for record in records for name in record if name.startswith("time/"))
    names = dict.fromkeys(name for name in timed if name.count("/") == 1)
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


def function_series(records: Records) -> dict[str, Series]:
    """The mean of each reward function, by its name."""
    names = dict.fromkeys(name for record in records for name in record)
    means = [name for name in names if name.startswith("rewards/") and name.endswith("/mean")]
    return {name.removeprefix("rewards/").removesuffix("/mean"): series(records, name) for name in means}


def function_chart(records: Records, theme: Theme) -> bytes:
    """The mean of each reward function, smoothed as the reward is."""
    figure, axes = _figure(theme, width=9.2, height=2.8)
    for index, (name, (steps, values)) in enumerate(function_series(records).items()):
        smooth = moving_mean(values, _window(values))
        style: dict[str, Any] = {
            "color": _colour(theme, index),
            "linestyle": LINE_STYLES[index // len(theme.phases) % len(LINE_STYLES)],
        }
        axes.plot(steps, smooth, label=name, linewidth=1.8, marker="o" if len(steps) == 1 else "", **style)
    _finish(axes, theme, ylabel="mean of each function")
    _legend(axes, theme)
    return _png(figure)


def phase_chart(records: Records, theme: Theme) -> bytes:
    """Seconds of each step, stacked by phase. Takes two steps to show anything."""
    figure, axes = _figure(theme, width=9.2, height=2.6)
    phases = {name: dict(zip(*points, strict=True)) for name, points in phase_series(records).items()}
    steps = sorted(set().union(*phases.values()))
    stacked = [[seconds.get(step, 0.0) for step in steps] for seconds in phases.values()]
    colours = [_colour(theme, index) for index in range(len(phases))]
    axes.stackplot(
        steps, stacked, labels=list(phases), colors=colours, step="mid", edgecolor=theme.background, linewidth=0.3
    )
    # The first step pays for warming up; where that is many times the rest, the rest is what should be seen.
    totals = sorted(map(sum, zip(*stacked, strict=True)))
    usual = totals[int(0.95 * (len(totals) - 1))]
    axes.set_ylim(0, min(totals[-1], 1.5 * usual) * 1.05 or 1.0)
    _finish(axes, theme, ylabel="seconds")
    axes.margins(x=0.0)
    _legend(axes, theme)
    return _png(figure)


def panel_series(records: Records) -> list[tuple[Panel, dict[str, Series]]]:
    """Those of `PANELS` that the run measured, with the points of each line; what never left zero is left out."""
    found = [(panel, {label: series(records, name) for label, name in panel.metrics.items()}) for panel in PANELS]
    return [(panel, lines) for panel, lines in found if any(any(values) for _, values in lines.values())]


def small_multiples(records: Records, theme: Theme) -> bytes:
    """One small chart for each of `panel_series(records)`, of which there must be one at least."""
    measured = panel_series(records)
    rows = -(-len(measured) // 3)
    figure = _blank(theme, width=9.2, height=2.3 * rows)
    for index, (panel, lines) in enumerate(measured):
        axes = figure.add_subplot(rows, 3, index + 1)
        for colour, (label, (steps, values)) in zip((theme.line, theme.accent), lines.items(), strict=False):
            marker = "o" if len(steps) == 1 else ""
            axes.plot(steps, values, color=colour, linewidth=1.2, marker=marker, label=label)
        values = [value for _, points in lines.values() for value in points]
        if min(values) > 0 and max(values) > LOG_FROM * min(values):
            axes.set_yscale("log")
        else:
            axes.yaxis.set_major_formatter(lambda value, _: short_number(value))
        title = f"{panel.title} ({panel.unit})" if panel.unit else panel.title
        axes.set_title(title, loc="left", fontsize=9, color=theme.text)
        _finish(axes, theme, ylabel="", xlabel="optimizer step" if index >= len(measured) - 3 else "")
        axes.tick_params(labelsize=8)
        axes.margins(y=0.12)
        if len(lines) > 1:
            axes.legend(loc="upper right", ncols=2, frameon=False, labelcolor=theme.text, fontsize=8, handlelength=1.2)
    return _png(figure)


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Centred mean over `2 * window + 1` values, fewer at the ends."""
    slices = (values[max(i - window, 0) : i + window + 1] for i in range(len(values)))
    return [sum(part) / len(part) for part in slices]


def _window(values: Sequence[float]) -> int:
    return len(values) // 20 if len(values) >= SMOOTH_FROM else 0


def _colour(theme: Theme, index: int) -> str:
    return theme.phases[index % len(theme.phases)]


def _draw_mean(axes: Axes, points: Series, theme: Theme) -> None:
    steps, rewards = points
    window = _window(rewards)
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
    axes.minorticks_off()
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
