"""The charts of a report: their data, and where it is on the picture that `templates/chart.svg` draws.

They are SVG inside the page: lines and text, without a font, script or library. Lines that share a chart differ in
colour, and beyond five in dashes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fused_grpo.trainer.logging.formatting import short_number
from fused_grpo.trainer.logging.run_log import metric

Records = Sequence[Mapping[str, object]]
Series = tuple[list[float], list[float]]  # steps, values; only where the value is finite

# Also of an eval set with a name: eval/hard_reward.
HELD_OUT = r"eval/((?:.+_)?(?:accuracy|reward))"
# time/reward/accuracy is a part of time/reward.
REWARD_FUNCTION, PHASE = r"rewards/(.+)/mean", r"time/([^/]+)"
SMOOTH_FROM = 40  # steps
# Beyond this factor between its least and greatest value, a panel has a logarithmic axis.
LOG_FROM = 100.0

# Small charts: the title, and the metrics with a label where there are several.
PANELS: dict[str, dict[str, str]] = {
    "standard deviation of rewards": {"batch": "reward_std", "within groups": "reward_std_within_groups"},
    "completion length (tokens)": {"": "completion_length"},
    "completions cut at the limit (share)": {"": "completions/clipped_ratio"},
    "groups with equal rewards (share)": {"": "groups_with_equal_rewards"},
    "entropy (nats per token)": {"": "entropy"},
    "KL to the reference (nats per token)": {"": "kl"},
    "divergence from the teacher (nats per token)": {"": "distillation"},
    "clipped tokens (share)": {
        "low": "clip_ratio/low_mean",
        "high": "clip_ratio/high_mean",
        "cispo": "cispo_clip_ratio",
    },
    "gradient norm": {"": "grad_norm"},
    "learning rate": {"": "learning_rate"},
    "sampler against trainer (|Δ log p|)": {"": "sampling/sampling_logp_difference/mean"},
}


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Lines over optimizer steps, by their labels, and their places in the picture, in pixels."""

    title: str
    lines: Mapping[str, Series]
    height: int
    width: int = 920
    is_log: bool = False
    left: int = 52

    @property
    def right(self) -> int:
        return self.width - 16

    @property
    def labels(self) -> list[str]:
        """The legend; a line of its own has none."""
        return [label for label in self.lines if label]

    @property
    def top(self) -> int:
        """Below the title and the legend, five labels a row."""
        return 26 + 16 * math.ceil(len(self.labels) / 5)

    @property
    def bottom(self) -> int:
        return self.height - 26

    @cached_property
    def step_range(self) -> tuple[float, float]:
        return _padded([step for steps, _ in self.lines.values() for step in steps])

    @cached_property
    def value_range(self) -> tuple[float, float]:
        """Of the logarithms, where the axis is logarithmic."""
        values = [value for _, line in self.lines.values() for value in line]
        return _padded([math.log10(value) for value in values] if self.is_log else values)

    def x(self, step: float) -> float:
        low, high = self.step_range
        return round(self.left + (self.right - self.left) * (step - low) / (high - low), 1)

    def y(self, value: float) -> float:
        low, high = self.value_range
        share = ((math.log10(value) if self.is_log else value) - low) / (high - low)
        return round(self.bottom - (self.bottom - self.top) * share, 1)

    @property
    def step_ticks(self) -> list[float]:
        return [step for step in round_numbers(*self.step_range, most=self.width // 90) if step == int(step)]

    @property
    def value_ticks(self) -> list[tuple[float, str]]:
        """Values with a grid line, and their text."""
        ticks = round_numbers(*self.value_range, most=self.height // 45)
        values = [10.0**tick for tick in ticks if tick == int(tick)] if self.is_log else ticks
        return [(value, short_number(value)) for value in values]


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
    """Mean reward of each step, also smoothed where there are many, and the held-out rewards."""
    steps, rewards = series(records, "reward")
    lines = {"mean reward of the step": (steps, rewards)}
    if window := _window(rewards):
        lines[f"mean of {2 * window + 1} steps"] = steps, moving_mean(rewards, window)
    lines |= {f"held-out {name}": line for name, line in named_series(records, HELD_OUT).items() if line[0]}
    return Chart(title="Reward by optimizer step", lines=lines, height=390)


def function_chart(records: Records) -> Chart | None:
    """The mean of each reward function, smoothed as the reward is; None where there are not several."""
    functions = named_series(records, REWARD_FUNCTION)
    lines = {name: (steps, moving_mean(values, _window(values))) for name, (steps, values) in functions.items()}
    return Chart(title="Mean of each reward function by step", lines=lines, height=280) if len(lines) > 1 else None


def phase_chart(records: Records) -> Chart | None:
    """Seconds of each phase; None where there are not several steps."""
    phases = {name: line for name, line in named_series(records, PHASE).items() if len(line[0]) > 1}
    return Chart(title="Seconds of each step, by phase", lines=phases, height=260) if phases else None


def panel_charts(records: Records) -> list[Chart]:
    """A small chart of each of `PANELS` that the run measured and that was not always zero."""
    charts = list[Chart]()
    for title, metrics in PANELS.items():
        lines = {label: series(records, name) for label, name in metrics.items()}
        values = [value for _, line in lines.values() for value in line]
        if any(values):
            is_log = min(values) > 0 and max(values) > LOG_FROM * min(values)
            charts.append(Chart(title=title, lines=lines, height=190, width=300, is_log=is_log))
    return charts


def _window(values: Sequence[float]) -> int:
    return len(values) // 20 if len(values) >= SMOOTH_FROM else 0
