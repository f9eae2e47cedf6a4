"""The report of a run: one HTML file to send to somebody, and the reward curve as a picture of its own.

It is made from the files of the run alone, so a run that was killed, or one from another machine, can be reported on
too. The page holds everything it shows: no script, no font, no request, and a content security policy that says so.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer.logging.charts import (
    DARK,
    EVAL_NAMES,
    LIGHT,
    Records,
    Theme,
    function_chart,
    function_series,
    panel_series,
    phase_chart,
    phase_series,
    reward_chart,
    series,
    small_multiples,
)
from fused_grpo.trainer.logging.formatting import MISSING, conversation, duration, percent, short_number
from fused_grpo.trainer.logging.markup import STYLE, Html, element, join
from fused_grpo.trainer.logging.metrics import (
    METRICS_FILE,
    ROLLOUTS_FILE,
    RUN_FILE,
    iterate_records,
    metric,
    read_metrics,
)

REPORT_FILE = "report.html"
REWARD_FILE = "reward.png"


def write_report(output_dir: Path) -> Path:
    """Write report.html and reward.png from what a run logged in `output_dir`.

    Returns:
        The path of report.html.

    Raises:
        CheckpointError: there is no metrics.jsonl with a record in it, or a log is damaged.
    """
    output_dir = Path(output_dir)
    records = _read_steps(output_dir)
    run = _read_run(output_dir / RUN_FILE)
    samples = first_and_last_rows(output_dir / ROLLOUTS_FILE)
    (output_dir / REWARD_FILE).write_bytes(reward_chart(records, LIGHT))
    path = output_dir / REPORT_FILE
    path.write_text(page(records, run, samples), encoding="utf-8")
    return path


def page(records: Records, run: Mapping[str, Any], samples: Mapping[int, Sequence[Mapping[str, object]]]) -> str:
    """The whole document."""
    title = f"{_fact(run, 'task', 'GRPO run')}: {_before_after(records)}"
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", Html(STYLE)),
    )
    sections = (_headline(title, records, run), _curves(records), _phases(records), _samples(samples), _facts(run))
    footer = element("footer", "Made by fused-grpo from metrics.jsonl, rollouts.jsonl and run.json beside this file.")
    return "<!doctype html>\n" + element("html", head, element("body", *sections, footer), lang="en") + "\n"


def first_and_last_rows(path: Path) -> dict[int, list[dict[str, Any]]]:
    """The completions of the first and of the last step in a rollouts.jsonl, by step; read a line at a time."""
    steps: dict[int, list[dict[str, Any]]] = {}
    for row in iterate_records(path) if path.is_file() else ():
        step = int(metric(row, "step") or 0)
        if step not in steps and len(steps) == 2:
            del steps[max(steps)]
        steps.setdefault(step, []).append(row)
    return steps


def pick_samples(rows: Sequence[Mapping[str, object]], seed: int) -> list[tuple[str, Mapping[str, object]]]:
    """The best, the worst and a random one of `rows`, each named so; fewer where there are fewer rows."""
    scored = sorted((row for row in rows if metric(row, "reward") is not None), key=_reward)
    if not scored:
        return []
    between = scored[1:-1]
    chosen = [("best", scored[-1]), ("worst", scored[0])][: len(scored)]
    return chosen + ([("random", random.Random(seed).choice(between))] if between else [])


def _reward(row: Mapping[str, object]) -> float:
    return metric(row, "reward") or 0.0


def _headline(title: str, records: Records, run: Mapping[str, Any]) -> Html:
    _, seconds = series(records, "step_time")
    _, tokens = series(records, "num_tokens")
    tiles = {
        "optimizer steps": str(int(max(series(records, "step")[0]))),
        "time in steps": duration(sum(seconds)) if seconds else MISSING,
        "completion tokens": short_number(sum(tokens)) if tokens else MISSING,
        "model": _fact(run, "model", MISSING),
        "engine": _fact(run, "engine", MISSING),
        "device": str(run.get("machine", {}).get("device", MISSING)),
    }
    boxes = (
        element("div", element("dt", name), element("dd", value), class_="wide tile" if len(value) > 16 else "tile")
        for name, value in tiles.items()
    )
    started = f"Started {_readable_time(run['started'])}. " if "started" in run else ""
    lead = element("p", f"{started}{_what_changed(records)}", class_="lead")
    return element("header", element("h1", title), lead, element("dl", *boxes, class_="tiles"))


def _curves(records: Records) -> Html:
    reward = _picture(lambda theme: reward_chart(records, theme), "Reward by optimizer step")
    parts = [element("h2", "Reward"), reward]
    if len(function_series(records)) > 1:
        parts.append(_picture(lambda theme: function_chart(records, theme), "Mean of each reward function by step"))
    if panel_series(records):
        small = _picture(lambda theme: small_multiples(records, theme), "Other metrics by optimizer step")
        parts += [element("h2", "What else moved"), small]
    return element("section", *parts)


def _phases(records: Records) -> Html:
    """Where the time went: shares by step, and the sums of the run."""
    seconds = {name: sum(values) for name, (_, values) in phase_series(records).items()}
    total = sum(seconds.values())
    if total <= 0:
        return Html()
    rows = {name: f"{duration(spent)} ({percent(spent / total)})" for name, spent in seconds.items()}
    parts = [element("h2", "Where the time went"), _table(rows)]
    if max(len(steps) for steps, _ in phase_series(records).values()) > 1:
        alt = "Seconds of each step, by phase"
        parts.insert(1, _picture(lambda theme: phase_chart(records, theme), alt))
    return element("section", *parts)


def _samples(samples: Mapping[int, Sequence[Mapping[str, object]]]) -> Html:
    if not samples:
        return Html()
    parts: list[Html] = [element("h2", "What the model wrote")]
    for step, rows in samples.items():
        parts.append(element("h3", f"Step {step}, {len(rows)} completions"))
        parts += [_sample(kind, row) for kind, row in pick_samples(rows, seed=step)]
    return element("section", *parts)


def _sample(kind: str, row: Mapping[str, object]) -> Html:
    rewards = row.get("rewards")
    numbers = {"reward": metric(row, "reward"), "advantage": metric(row, "advantage")}
    numbers |= {name: metric(rewards, name) for name in rewards} if isinstance(rewards, dict) else {}
    facts = [f"{name} {short_number(value)}" for name, value in numbers.items()]
    if row.get("finish_reason") == "length":
        facts.append("cut at the length limit")
    header = element("header", element("span", kind, class_=kind), *(element("span", fact) for fact in facts))
    texts = [
        join(element("div", label, class_="label"), element("pre", text, dir="auto"))
        for part in ("prompt", "completion")
        for label, text in conversation(row.get(part, ""), name=part)
    ]
    return element("article", header, *texts, class_="sample")


def _facts(run: Mapping[str, Any]) -> Html:
    """What the run was, folded away: nobody reads it, until somebody has to."""
    parts: list[Html] = []
    for title, name in (("Configuration", "config"), ("Versions", "versions"), ("Machine", "machine")):
        values = run.get(name)
        if isinstance(values, dict) and values:
            table = _table({key: _exact(value) for key, value in values.items()})
            parts.append(element("details", element("summary", title), table))
    return element("section", element("h2", "What ran"), *parts) if parts else Html()


def _table(rows: Mapping[str, str]) -> Html:
    lines = (element("tr", element("th", name, scope="row"), element("td", value)) for name, value in rows.items())
    return element("table", *lines)


def _picture(draw: Callable[[Theme], bytes], alt: str) -> Html:
    """A chart in both themes; the browser takes the one that its reader prefers."""
    light, dark = (f"data:image/png;base64,{base64.b64encode(draw(theme)).decode()}" for theme in (LIGHT, DARK))
    source = element("source", srcset=dark, media="(prefers-color-scheme: dark)")
    return element("picture", source, element("img", src=light, alt=alt))


def _readable_time(started: object) -> str:
    """`2026-11-21T17:27:37Z` as `2026-11-21 17:27 UTC`."""
    date, _, clock = str(started).partition("T")
    return f"{date} {clock[:5]} UTC" if clock else date


def _exact(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _fact(run: Mapping[str, Any], name: str, default: str) -> str:
    config = run.get("config")
    return str(run.get(name) or (config.get(name) if isinstance(config, dict) else None) or default)


def _endpoints(records: Records) -> tuple[str, float | None, float | None]:
    """What is compared, before and after: on held-out prompts where there are any, else the reward of the first and the
    last tenth of the steps."""
    for name in EVAL_NAMES:
        _, values = series(records, name)
        if len(values) > 1:
            return f"held-out {name.removeprefix('eval/')}", values[0], values[-1]
    _, rewards = series(records, "reward")
    if not rewards:
        return "training reward", None, None
    count = max(len(rewards) // 10, 1)
    return "training reward", sum(rewards[:count]) / count, sum(rewards[-count:]) / count


def _before_after(records: Records) -> str:
    name, before, after = _endpoints(records)
    return f"{name} {short_number(before)} → {short_number(after)}"


def _what_changed(records: Records) -> str:
    name, _, _ = _endpoints(records)
    if name.startswith("held-out"):
        return "Measured on prompts that were not trained on, before the first and after the last step."
    return "No held-out prompts were given: these are means over the first and the last tenth of the training steps."


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
