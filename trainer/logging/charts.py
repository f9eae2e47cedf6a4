"""The charts of a report: their data, and where it is on the picture that `templates/chart.svg` draws.

They are SVG inside the page: lines, areas and text, without a font, script or library. Lines that share a chart differ
in colour, and beyond five in dashes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fused_grpo.trainer.logging.formatting import short_number
from fused_grpo.trainer.logging.metrics import metric

Records = Sequence[Mapping[str, object]]
Series = tuple[list[float], list[float]]  # steps, values; only where the value is finite

EVAL_NAMES = ("eval/accuracy", "eval/reward")
SMOOTH_FROM = 40  # steps
# Beyond this factor between its least and greatest value, a panel has a logarithmic axis.
LOG_FROM = 100.0
COLOURS, DASHES = 5, 3
# time/reward/accuracy is a part of time/reward.
REWARD_FUNCTION, PHASE = r"rewards/(.+)/mean", r"time/([^/]+)"

# Small charts: the title, and the metrics with a label where there are several.
PANELS: dict[str, dict[str, str]] = {
    "completion length (tokens)": {"": "completion_length"},
    "completions cut at the limit (share)": {"": "completions/clipped_ratio"},
    "groups with equal rewards (share)": {"": "frac_reward_zero_std"},
    "entropy (nats per token)": {"": "entropy"},
    "KL to the reference (nats per token)": {"": "kl"},
    "clipped tokens (share)": {"low": "clip_ratio/low_mean", "high": "clip_ratio/high_mean"},
    "gradient norm": {"": "grad_norm"},
    "learning rate": {"": "learning_rate"},
    "sampler against trainer (|Δ log p|)": {"": "sampling/sampling_logp_difference/mean"},
}


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A line, or the area between it and `floor`. `number` decides its colour and dashes, `css` the rest."""

    label: str
    points: Series
    number: int = 0
    css: str = "line"
    floor: Sequence[float] = ()
    is_marked: bool = False

    @property
    def colour(self) -> str:
        return f"c{self.number % COLOURS} dash{self.number // COLOURS % DASHES}"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Traces over optimizer steps, and their places in the picture."""

    title: str
    traces: Sequence[Trace]
    height: int
    width: int = 920
    is_log: bool = False
    limits: tuple[float, float] | None = None  # of the values; None: a little more than they have

    @property
    def box(self) -> tuple[int, int, int, int]:
        """Pixels of the axes: left, right, top, bottom."""
        return 52, self.width - 16, 26 + 16 * len(self.legend), self.height - 26

    @property
    def legend(self) -> list[list[Trace]]:
        """The traces that have a label, in rows."""
        labelled = [trace for trace in self.traces if trace.label]
        return [labelled[i : i + 5] for i in range(0, len(labelled), 5)]

    @cached_property
    def steps(self) -> tuple[float, float]:
        return _padded([step for trace in self.traces for step in trace.points[0]])

    @cached_property
    def values(self) -> tuple[float, float]:
        """Limits of the values' axis; of their logarithms where it is logarithmic."""
        values = [value for trace in self.traces for value in (*trace.points[1], *trace.floor)]
        return self.limits or _padded([math.log10(value) for value in values] if self.is_log else values)

    def x(self, step: float) -> float:
        (low, high), (left, right, _, _) = self.steps, self.box
        return round(left + (right - left) * (step - low) / (high - low), 1)

    def y(self, value: float) -> float:
        (low, high), (_, _, top, bottom) = self.values, self.box
        share = ((math.log10(value) if self.is_log else value) - low) / (high - low)
        return round(bottom - (bottom - top) * min(share, 1.0), 1)

    def corners(self, trace: Trace) -> list[tuple[float, float]]:
        """Of the line, or of the area: along the values and back along the floor."""
        steps, values = trace.points
        there, back = zip(steps, values, strict=True), zip(reversed(steps), reversed(trace.floor), strict=False)
        return [(self.x(step), self.y(value)) for step, value in (*there, *back)]

    @property
    def value_ticks(self) -> list[tuple[float, str]]:
        if self.is_log:
            low, high = map(math.ceil, self.values)
            ticks = [10.0**power for power in range(low, high, (high - low) // 6 + 1)]
        else:
            ticks = round_numbers(*self.values, most=self.height // 45)
        return [(self.y(value), short_number(value)) for value in ticks]

    @property
    def step_ticks(self) -> list[tuple[float, str]]:
        steps = round_numbers(*self.steps, most=self.width // 90)
        return [(self.x(step), f"{step:.0f}") for step in steps if step == int(step)]


def _padded(values: list[float]) -> tuple[float, float]:
    # Within bounds whose difference is finite.
    low, high = max(min(values, default=0.0), -1e300), min(max(values, default=1.0), 1e300)
    pad = 0.04 * (high - low) or 0.1 * abs(high) or 0.5
    return low - pad, high + pad


def round_numbers(low: float, high: float, most: int) -> list[float]:
    """About `most` multiples of 1, 2 or 5 times a power of ten, from low to high."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    unit = next((factor * power for factor in (1, 2, 5) if factor * power >= rough), 10 * power)
    return [count * unit for count in range(math.ceil(low / unit), math.floor(high / unit) + 1)]


def series(records: Records, name: str) -> Series:
    """Steps and values of a metric, where it was measured and finite. Of a step that was repeated, the last counts."""
    points = [(metric(record, "step"), metric(record, name)) for record in records]
    known = {step: value for step, value in points if step is not None and value is not None}
    return sorted(known), [known[step] for step in sorted(known)]


def named_series(records: Records, pattern: str) -> dict[str, Series]:
    """The metrics whose names match a pattern, by its group, in the order in which they first appear."""
    names = dict.fromkeys(name for record in records for name in record)
    return {match[1]: series(records, name) for name in names if (match := re.fullmatch(pattern, name))}


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Centred mean over `2 * window + 1` values, fewer at the ends."""
    slices = (values[max(i - window, 0) : i + window + 1] for i in range(len(values)))
    return [sum(part) / len(part) for part in slices]


def reward_chart(records: Records) -> Chart:
    """Mean reward of each step, a band of one standard deviation, and the held-out points."""
    steps, rewards = series(records, "reward")
    window = _window(rewards)
    traces = [Trace(label="mean reward of the step", points=(steps, rewards), css="line thin" if window else "line")]
    if window:
        smooth = steps, moving_mean(rewards, window)
        traces.append(Trace(label=f"mean of {2 * window + 1} steps", points=smooth))
    spread = dict(zip(*series(records, "reward_std"), strict=True))
    means = {step: reward for step, reward in zip(steps, rewards, strict=True) if step in spread}
    if len(means) > 1:
        high, low = ([mean + sign * spread[step] for step, mean in means.items()] for sign in (1, -1))
        band = Trace(label="± one standard deviation", points=(list(means), high), css="band", floor=low)
        traces.insert(0, band)
    for number, name in enumerate(EVAL_NAMES, start=1):
        if (points := series(records, name))[0]:
            label = f"held-out {name.removeprefix('eval/')}"
            traces.append(Trace(label=label, points=points, number=number, is_marked=True))
    return Chart(title="Reward by optimizer step", traces=traces, height=390)


def function_chart(records: Records) -> Chart | None:
    """The mean of each reward function, smoothed as the reward is; None where there are not several."""
    functions = named_series(records, REWARD_FUNCTION)
    traces = [
        Trace(label=name, points=(steps, moving_mean(values, _window(values))), number=number)
        for number, (name, (steps, values)) in enumerate(functions.items())
    ]
    title = "Mean of each reward function by step"
    return Chart(title=title, traces=traces, height=280) if len(traces) > 1 else None


def phase_chart(records: Records) -> Chart | None:
    """Seconds of each step, stacked by phase; None where there are not several steps."""
    phases = {name: dict(zip(*points, strict=True)) for name, points in named_series(records, PHASE).items()}
    steps = sorted(set().union(*phases.values()))
    if len(steps) < 2:
        return None
    traces, floor = list[Trace](), [0.0] * len(steps)
    for number, (name, seconds) in enumerate(phases.items()):
        total = [below + seconds.get(step, 0.0) for step, below in zip(steps, floor, strict=True)]
        traces.append(Trace(label=name, points=(steps, total), number=number, css="area", floor=floor))
        floor = total
    # Compilation and cold caches make the first step many times as long as the others, which should be visible.
    usual = sorted(floor)[int(0.95 * (len(floor) - 1))]
    limits = 0.0, min(max(floor), 1.5 * usual) * 1.05 or 1.0
    return Chart(title="Seconds of each step, by phase", traces=traces, height=260, limits=limits)


def panel_charts(records: Records) -> list[Chart]:
    """A small chart of each of `PANELS` that the run measured and that was not always zero."""
    charts = list[Chart]()
    for title, metrics in PANELS.items():
        lines = {label: series(records, name) for label, name in metrics.items()}
        values = [value for _, line in lines.values() for value in line]
        traces = [Trace(label=label, points=points, number=i) for i, (label, points) in enumerate(lines.items())]
        if any(values):
            is_log = min(values) > 0 and max(values) > LOG_FROM * min(values)
            charts.append(Chart(title=title, traces=traces, height=190, width=300, is_log=is_log))
    return charts


def _window(values: Sequence[float]) -> int:
    return len(values) // 20 if len(values) >= SMOOTH_FROM else 0
