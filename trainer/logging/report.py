"""The report of a run: one HTML file that can be shared, and the reward curve as a picture of its own.

It is made from the files of the run alone, also of a killed run, or of one from another machine. The page needs no
other file, which its content security policy forbids. Charts are SVG, whose points say their value under a pointer.
Every value in HTML and SVG is escaped, and `visible` shows its control characters as escape sequences.
"""

from __future__ import annotations

import json
import math
import random
import re
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from fused_grpo.errors import CheckpointError, visible
from fused_grpo.trainer.common import file_names as files
from fused_grpo.trainer.common.formatting import MISSING, conversation, duration, percent, short_number
from fused_grpo.trainer.logging.run_log import iterate_records, metric, write

Series = tuple[list[float], list[float]]  # steps, values; only where the value is finite
# Of each metric its steps and values, as they were logged: records of a long run would take several times as much.
Columns = Mapping[str, tuple["array[float]", "array[float]"]]

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
    "completion length (tokens)": {"": "completions/mean_length"},
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
    "turns of an episode": {"": "tools/turns"},
    "tool calls per completion, share that failed": {
        "calls": "tools/call_frequency",
        "failed": "tools/failure_frequency",
    },
}


def write_report(output_dir: Path) -> Path:
    """Write report.html and reward.svg from what a run logged in `output_dir`. Returns the path of report.html.

    CheckpointError where there is no metrics.jsonl with a record in it, or a log or run.json is damaged.
    """
    history, described = _read_steps(output_dir), output_dir / files.RUN_FILE
    try:
        run = json.loads(described.read_bytes()) if described.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"got {described}, which is not JSON; want what the run wrote; fix: remove it") from error
    samples = first_and_last_rows(output_dir / files.OLD_ROLLOUTS_FILE, output_dir / files.ROLLOUTS_FILE)
    path = output_dir / files.REPORT_FILE
    write(path, page(history, run if isinstance(run, dict) else {}, samples))
    write(output_dir / files.REWARD_FILE, render("chart.svg", chart=reward_chart(history)))
    return path


def page(history: Columns, run: Mapping[str, Any], samples: Mapping[int, Sequence[Mapping[str, object]]]) -> str:
    (name, (before, after)), *others = _endpoints(history).items()
    date, _, clock = str(run.get("started", "")).partition("T")  # 2026-11-21T17:27:37Z
    started = f"Started {date}{f' {clock[:5]} UTC' if clock else ''}. " if date else ""
    tenths = "these are means over the first and the last tenth of the training steps."
    if name.startswith("held-out"):
        measured = "Measured on prompts that were not trained on, at the first and at the last evaluation."
    elif named_series(history, HELD_OUT):
        measured = f"Held-out prompts were evaluated only once (see the chart): {tenths}"
    else:
        measured = f"There were no held-out prompts: {tenths}"
    return render(
        "report.html",
        title=f"{run.get('task') or 'GRPO run'}: {name} {short_number(before)} → {short_number(after)}",
        lead=started + measured,
        tiles={name: f"{short_number(first)} → {short_number(last)}" for name, (first, last) in others}
        | _tiles(history, run),
        rewards=[chart for chart in (reward_chart(history), function_chart(history)) if chart is not None],
        panels=panel_charts(history),
        phases=phase_chart(history),
        seconds=_seconds(history),
        samples={step: (len(rows), _samples(rows, seed=step)) for step, rows in samples.items()},
        facts=_facts(run),
    )


def first_and_last_rows(*paths: Path) -> dict[int, list[dict[str, Any]]]:
    """The completions of the first and of the last step in logs of rollouts, by step; read a line at a time."""
    steps: dict[int, list[dict[str, Any]]] = {}
    for row in chain.from_iterable(iterate_records(path) for path in paths if path.is_file()):
        step = int(metric(row, "step") or 0)
        if step not in steps and len(steps) == 2:
            del steps[max(steps)]
        steps.setdefault(step, []).append(row)
    return steps


def pick_samples(rows: Sequence[Mapping[str, object]], seed: int) -> list[tuple[str, Mapping[str, object]]]:
    """The best, the worst and a random one of `rows`, each named so; fewer where there are fewer rows."""
    rewarded = (row for row in rows if metric(row, "reward") is not None)
    scored = sorted(rewarded, key=lambda row: metric(row, "reward") or 0.0)
    if not scored:
        return []
    between = scored[1:-1]
    chosen = [("best", scored[-1]), ("worst", scored[0])][: len(scored)]
    return chosen + ([("random", random.Random(seed).choice(between))] if between else [])


def _tiles(history: Columns, run: Mapping[str, Any]) -> dict[str, str]:
    _, seconds = series(history, "step_time")
    _, tokens = series(history, "completion_tokens")
    return {
        "optimizer steps": str(int(max(series(history, "step")[0]))),
        "time in steps": duration(sum(seconds)) if seconds else MISSING,
        "completion tokens": short_number(sum(tokens)) if tokens else MISSING,
        "model": str(run.get("model", MISSING)),
        "engine": str(run.get("engine", MISSING)),
        "device": _facts(run).get("Machine", {}).get("device", MISSING),
    }


def _seconds(history: Columns) -> dict[str, str]:
    """The whole time of each phase; empty where no time was measured."""
    seconds = {name: sum(values) for name, (_, values) in named_series(history, PHASE).items()}
    total = sum(seconds.values())
    return {name: f"{duration(spent)} ({percent(spent / total)})" for name, spent in seconds.items() if total > 0}


def _samples(rows: Sequence[Mapping[str, object]], seed: int) -> list[dict[str, Any]]:
    samples = []
    for kind, row in pick_samples(rows, seed):
        rewards = row.get("rewards")
        numbers = {"reward": metric(row, "reward"), "advantage": metric(row, "advantage")}
        numbers |= {name: metric(rewards, name) for name in rewards} if isinstance(rewards, dict) else {}
        facts = [f"{name} {short_number(value)}" for name, value in numbers.items()]
        facts += ["cut at the length limit"] if row.get("finish_reason") == "length" else []
        facts += [f"{row['turns']} turns, ended: {row['ended']}"] if row.keys() >= {"turns", "ended"} else []
        sides = {"prompt": row.get("prompt", ""), "completion": row.get("messages", row.get("completion", ""))}
        parts = [part for side, said in sides.items() for part in conversation(said, name=side)]
        samples.append({"kind": kind, "facts": facts, "parts": parts})
    return samples


def _facts(run: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The run in a line each, configuration, versions and machine, as far as they are known."""
    tables = {
        "Run": {name: value for name, value in run.items() if isinstance(value, str)},
        "Configuration": run.get("config"),
        "Versions": run.get("versions"),
        "Machine": run.get("machine"),
    }
    facts = dict[str, dict[str, str]]()
    for title, values in tables.items():
        for name, value in values.items() if isinstance(values, dict) else ():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            facts.setdefault(title, {})[name] = text
    return facts


def _endpoints(history: Columns) -> dict[str, tuple[float | None, float | None]]:
    """What is compared, before and after: held-out means, accuracy first, or the reward of the first and last tenth."""
    held_out = {name: values for name, (_, values) in named_series(history, HELD_OUT).items() if len(values) > 1}
    if held_out:
        names = sorted(held_out, key=lambda name: not name.endswith("accuracy"))
        return {f"held-out {name}": (held_out[name][0], held_out[name][-1]) for name in names}
    _, rewards = series(history, "reward")
    return {"training reward": _first_and_last_tenth(rewards) if rewards else (None, None)}


def _first_and_last_tenth(values: Sequence[float]) -> tuple[float, float]:
    count = max(len(values) // 10, 1)
    return sum(values[:count]) / count, sum(values[-count:]) / count


def parts_text(output_dir: Path) -> str:
    """One line: the mean of each of several reward functions, from the first tenth of the steps to the last."""
    functions = named_series(_read_steps(output_dir), REWARD_FUNCTION)
    ends = {name: _first_and_last_tenth(values) for name, (_, values) in functions.items() if values}
    parts = (f"{name} {short_number(first)} -> {short_number(last)}" for name, (first, last) in ends.items())
    return f"training rewards: {', '.join(parts)}" if len(ends) > 1 else ""


def _read_steps(output_dir: Path) -> Columns:
    path = output_dir / files.METRICS_FILE
    history = columns(iterate_records(path) if path.is_file() else ())
    if "step" not in history:
        raise CheckpointError(
            f"got {output_dir}, which has no {files.METRICS_FILE} with a step in it; want the output directory of a "
            "run that has begun; fix: pass that directory"
        )
    return history


class Chart:
    """Lines over optimizer steps, by their labels, and their places in the picture, in pixels."""

    def __init__(
        self, *, title: str, lines: Mapping[str, Series], height: int, width: int = 920, is_log: bool = False
    ) -> None:
        self.title, self.lines, self.height, self.width, self.is_log = title, lines, height, width, is_log
        self.left, self.right, self.bottom = 52, width - 16, height - 26
        self.labels = [label for label in lines if label]  # the legend; a line of its own has none
        self.top = 26 + 16 * math.ceil(len(self.labels) / 5)  # below the title and the legend, five labels a row
        values = [value for _, line in lines.values() for value in line]
        # Of the logarithms, where the axis is logarithmic.
        self.value_range = _padded([math.log10(value) for value in values] if is_log else values)
        self.step_range = _padded([step for steps, _ in lines.values() for step in steps])
        ticks = round_numbers(*self.value_range, most=height // 45)
        marked = [10.0**tick for tick in ticks if tick == int(tick)] if is_log else ticks
        self.value_ticks = [(value, short_number(value)) for value in marked]  # values with a grid line, and their text
        self.step_ticks = [step for step in round_numbers(*self.step_range, most=width // 90) if step == int(step)]

    def x(self, step: float) -> float:
        low, high = self.step_range
        return round(self.left + (self.right - self.left) * (step - low) / (high - low), 1)

    def y(self, value: float) -> float:
        low, high = self.value_range
        share = ((math.log10(value) if self.is_log else value) - low) / (high - low)
        return round(self.bottom - (self.bottom - self.top) * share, 1)

    def path(self, label: str) -> list[tuple[float, float]]:
        """A line's points; where there are several for each pixel of the width, the lowest and the highest of these."""
        steps, values = self.lines[label]
        apart = math.ceil(len(steps) / self.width) or 1
        parts = (range(start, min(start + apart, len(steps))) for start in range(0, len(steps), apart))
        ends = (sorted({min(part, key=values.__getitem__), max(part, key=values.__getitem__)}) for part in parts)
        return [(steps[place], values[place]) for place in chain.from_iterable(ends)]

    def points(self, label: str) -> list[tuple[float, float, str]]:
        """Points of a line and what a pointer over them shows: the last, and evenly spaced ones before it."""
        steps, values = self.lines[label]
        apart = math.ceil(len(steps) / (self.width // 8)) or 1
        name = f"{label}: " if label else ""
        points = list(zip(steps, values, strict=True))[::-apart]
        return [(step, value, f"step {step:.0f}: {name}{short_number(value)}") for step, value in points]


def _padded(values: list[float]) -> tuple[float, float]:
    # Within bounds whose difference is finite.
    ends = min(values, default=0.0), max(values, default=1.0)
    low, high = (min(max(end, -1e300), 1e300) for end in ends)
    pad = 0.04 * (high - low) or 0.1 * abs(high) or 0.5
    return low - pad, high + pad


def round_numbers(low: float, high: float, most: int) -> list[float]:
    """About `most` multiples of 1, 2 or 5 times a power of ten, from low to high."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    unit = next((factor * power for factor in (1, 2, 5) if factor * power >= rough), 10 * power)
    return [count * unit for count in range(math.ceil(low / unit), math.floor(high / unit) + 1)]


def columns(records: Iterable[Mapping[str, object]]) -> Columns:
    """The metrics of records that have a step, in the order in which they first appear."""
    history: dict[str, tuple[array[float], array[float]]] = defaultdict(lambda: (array("d"), array("d")))
    for record in records:
        if (step := metric(record, "step")) is None:
            continue
        for name in record:
            value, (steps, values) = metric(record, name), history[name]
            if value is not None:
                steps.append(step)
                values.append(value)
    return dict(history)


def series(history: Columns, name: str) -> Series:
    """Steps and values of a metric, where it was measured and finite. Of a step that was repeated, the last counts."""
    by_step = dict(zip(*history.get(name, ((), ())), strict=True))
    return sorted(by_step), [by_step[step] for step in sorted(by_step)]


def named_series(history: Columns, pattern: str) -> dict[str, Series]:
    """The metrics whose names match a pattern, by its group, in the order in which they first appear."""
    return {match[1]: series(history, name) for name in history if (match := re.fullmatch(pattern, name))}


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Centred mean over `2 * window + 1` values, fewer at the ends."""
    sums = list(accumulate(map(Fraction, values), initial=Fraction()))  # exact, so that differences are
    ends = ((max(i - window, 0), min(i + window + 1, len(values))) for i in range(len(values)))
    return [float((sums[end] - sums[start]) / (end - start)) for start, end in ends]


def reward_chart(history: Columns) -> Chart:
    """Mean reward of each step, also smoothed where there are many, and the held-out rewards."""
    steps, rewards = series(history, "reward")
    lines = {"mean reward of the step": (steps, rewards)}
    if window := _window(rewards):
        lines[f"mean of {2 * window + 1} steps"] = steps, moving_mean(rewards, window)
    lines |= {f"held-out {name}": line for name, line in named_series(history, HELD_OUT).items() if line[0]}
    return Chart(title="Reward by optimizer step", lines=lines, height=390)


def function_chart(history: Columns) -> Chart | None:
    """The mean of each reward function, smoothed as the reward is; None where there are not several."""
    functions = named_series(history, REWARD_FUNCTION)
    lines = {name: (steps, moving_mean(values, _window(values))) for name, (steps, values) in functions.items()}
    return Chart(title="Mean of each reward function by step", lines=lines, height=280) if len(lines) > 1 else None


def phase_chart(history: Columns) -> Chart | None:
    """Seconds of each phase; None where there are not several steps."""
    phases = {name: line for name, line in named_series(history, PHASE).items() if len(line[0]) > 1}
    return Chart(title="Seconds of each step, by phase", lines=phases, height=260) if phases else None


def panel_charts(history: Columns) -> list[Chart]:
    """A small chart of each of `PANELS` that the run measured and that was not always zero."""
    charts = list[Chart]()
    for title, metrics in PANELS.items():
        lines = {label: series(history, name) for label, name in metrics.items()}
        values = [value for _, line in lines.values() for value in line]
        if any(values):
            is_log = min(values) > 0 and max(values) > LOG_FROM * min(values)
            charts.append(Chart(title=title, lines=lines, height=190, width=300, is_log=is_log))
    return charts


def _window(values: Sequence[float]) -> int:
    return len(values) // 20 if len(values) >= SMOOTH_FROM else 0


ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=select_autoescape(("html", "svg")),
    # Markup, which is a str too, is the output of a macro.
    finalize=lambda value: visible(value, keep="\n\t") if type(value) is str else value,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def render(template: str, **values: Any) -> str:
    return ENVIRONMENT.get_template(template).render(values)
