"""The report of a run: one HTML file that can be shared, and the reward curve as a picture of its own.

It is made from the files of the run alone, so the report of a killed run, or of one from another machine, can be made
too. The page needs no other file: no script, font or request, and its content security policy forbids them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer.config.file_names import (
    METRICS_FILE,
    OLD_ROLLOUTS_FILE,
    REPORT_FILE,
    REWARD_FILE,
    ROLLOUTS_FILE,
    RUN_FILE,
)
from fused_grpo.trainer.logging.charts import (
    HELD_OUT,
    PHASE,
    Records,
    function_chart,
    named_series,
    panel_charts,
    phase_chart,
    reward_chart,
    series,
)
from fused_grpo.trainer.logging.formatting import MISSING, conversation, duration, percent, short_number
from fused_grpo.trainer.logging.render import render
from fused_grpo.trainer.logging.run_log import iterate_records, metric, read_metrics


def write_report(output_dir: Path) -> Path:
    """Write report.html and reward.svg from what a run logged in `output_dir`.

    Returns:
        The path of report.html.

    Raises:
        CheckpointError: there is no metrics.jsonl with a record in it, or a log is damaged.
    """
    output_dir = Path(output_dir)
    records = _read_steps(output_dir)
    run = _read_run(output_dir / RUN_FILE)
    samples = first_and_last_rows(output_dir / OLD_ROLLOUTS_FILE, output_dir / ROLLOUTS_FILE)
    path = output_dir / REPORT_FILE
    path.write_text(page(records, run, samples), encoding="utf-8")
    (output_dir / REWARD_FILE).write_text(render("chart.svg", chart=reward_chart(records)), encoding="utf-8")
    return path


def page(records: Records, run: Mapping[str, Any], samples: Mapping[int, Sequence[Mapping[str, object]]]) -> str:
    """The whole document."""
    ends = _endpoints(records)
    (name, (before, after)), *others = ends.items()
    started = f"Started {_readable_time(run['started'])}. " if "started" in run else ""
    tenths = "these are means over the first and the last tenth of the training steps."
    if name.startswith("held-out"):
        measured = "Measured on prompts that were not trained on, at the first and at the last evaluation."
    elif named_series(records, HELD_OUT):
        measured = f"Held-out prompts were evaluated only once (see the chart): {tenths}"
    else:
        measured = f"There were no held-out prompts: {tenths}"
    return render(
        "report.html",
        title=f"{_fact(run, 'task', 'GRPO run')}: {name} {short_number(before)} → {short_number(after)}",
        lead=started + measured,
        tiles={name: f"{short_number(first)} → {short_number(last)}" for name, (first, last) in others}
        | _tiles(records, run),
        rewards=[chart for chart in (reward_chart(records), function_chart(records)) if chart is not None],
        panels=panel_charts(records),
        phases=phase_chart(records),
        seconds=_seconds(records),
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


def _tiles(records: Records, run: Mapping[str, Any]) -> dict[str, str]:
    _, seconds = series(records, "step_time")
    _, tokens = series(records, "completion_tokens")
    return {
        "optimizer steps": str(int(max(series(records, "step")[0]))),
        "time in steps": duration(sum(seconds)) if seconds else MISSING,
        "completion tokens": short_number(sum(tokens)) if tokens else MISSING,
        "model": _fact(run, "model", MISSING),
        "engine": _fact(run, "engine", MISSING),
        "device": str(run.get("machine", {}).get("device", MISSING)),
    }


def _seconds(records: Records) -> dict[str, str]:
    """The whole time of each phase; empty where no time was measured."""
    seconds = {name: sum(values) for name, (_, values) in named_series(records, PHASE).items()}
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
        parts = [part for side in ("prompt", "completion") for part in conversation(row.get(side, ""), name=side)]
        samples.append({"kind": kind, "facts": facts, "parts": parts})
    return samples


def _facts(run: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Configuration, versions and machine, as far as they are known."""
    tables = {"Configuration": run.get("config"), "Versions": run.get("versions"), "Machine": run.get("machine")}
    return {
        title: {
            name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for name, value in values.items()
        }
        for title, values in tables.items()
        if isinstance(values, dict) and values
    }


def _readable_time(started: object) -> str:
    """`2026-11-21T17:27:37Z` as `2026-11-21 17:27 UTC`."""
    date, _, clock = str(started).partition("T")
    return f"{date} {clock[:5]} UTC" if clock else date


def _fact(run: Mapping[str, Any], name: str, default: str) -> str:
    config = run.get("config")
    return str(run.get(name) or (config.get(name) if isinstance(config, dict) else None) or default)


def _endpoints(records: Records) -> dict[str, tuple[float | None, float | None]]:
    """What is compared, before and after: on each set of held-out prompts, accuracy first, or without one the reward of
    the first and the last tenth of the steps."""
    held_out = {name: values for name, (_, values) in named_series(records, HELD_OUT).items() if len(values) > 1}
    if held_out:
        names = sorted(held_out, key=lambda name: not name.endswith("accuracy"))
        return {f"held-out {name}": (held_out[name][0], held_out[name][-1]) for name in names}
    _, rewards = series(records, "reward")
    if not rewards:
        return {"training reward": (None, None)}
    count = max(len(rewards) // 10, 1)
    return {"training reward": (sum(rewards[:count]) / count, sum(rewards[-count:]) / count)}


def _read_steps(output_dir: Path) -> Records:
    path = output_dir / METRICS_FILE
    records = read_metrics(path) if path.is_file() else []
    if not series(records, "step")[0]:
        raise CheckpointError(
            f"got {output_dir}, which has no {METRICS_FILE} with a step in it; want the output directory of a run that "
            "has begun; fix: pass that directory"
        )
    return records


def _read_run(path: Path) -> dict[str, Any]:
    run = json.loads(path.read_bytes()) if path.is_file() else {}
    return run if isinstance(run, dict) else {}
