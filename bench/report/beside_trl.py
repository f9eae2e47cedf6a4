"""The table, the line and the picture of a result of trainers/beside_trl.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import mean, median
from typing import Any

from fused_grpo.bench.report.charts import OURS, RC, page
from fused_grpo.bench.report.results_file import number_text
from fused_grpo.bench.report.tables import markdown

TRAINERS = ("TRL", "ours, transformers", "ours, vLLM")
COLOURS = dict(zip(TRAINERS, ("#d55e00", "#56b4e9", OURS), strict=True))
SMOOTHED = 8  # steps
Run = Mapping[str, Any]


def step_seconds(run: Run, key: str = "seconds") -> float:
    """The median of the steps but the first two, which compile, allocate and warm caches."""
    return float(median(run[key][2:]))


def last_reward(run: Run) -> float:
    return float(mean(run["reward"][-SMOOTHED:]))


def summary(run: Run) -> str:
    """One line."""
    times = f"{step_seconds(run):.2f} s a step, of it {step_seconds(run, 'generate'):.2f} s generating"
    learned = "reward {:.3f} -> {:.3f}, held out {:.3f} -> {:.3f}".format(
        mean(run["reward"][:SMOOTHED]), last_reward(run), *run["held_out"]
    )
    return f"{run['trainer']}, seed {run['seed']}: {times}; {learned}; {run['memory'] / 1e9:.2f} GB"


COSTS: dict[str, Callable[[Run], float]] = {
    "s per step": step_seconds,
    "of it generating": partial(step_seconds, key="generate"),
    "memory (GB)": lambda run: float(run["memory"]) / 1e9,
}


def table(content: Mapping[str, Any]) -> str:
    """A row for each trainer: the mean of its seeds beside TRL's, and what each seed learned.

    A run with a reason under "disturbed" counts for what it learned, and not for what it cost.
    """
    made = {name: [run for run in content["runs"] if run["trainer"] == name] for name in TRAINERS}
    quiet = {name: [run for run in runs if "disturbed" not in run] for name, runs in made.items()}
    trl_costs = {label: mean(map(cost, quiet["TRL"])) for label, cost in COSTS.items()}
    lines = []
    for name, runs in made.items():
        costs = {label: mean(map(cost, quiet[name])) for label, cost in COSTS.items()}
        cells = [f"{number_text(cost)} ({cost / trl_costs[label]:.2f}×)" for label, cost in costs.items()]
        held_out = ", ".join(f"{run['held_out'][1]:.3f}" for run in runs)
        lines.append([name, *cells, held_out, ", ".join(f"{last_reward(run):.3f}" for run in runs)])
    work, env = content["work"], content["environment"]
    reasons = {run["seed"]: run["disturbed"] for run in content["runs"] if "disturbed" in run}
    left_out = "".join(f"The costs of seed {seed} are left out: {reason}. " for seed, reason in reasons.items())
    if "accumulation of TRL" in work:
        left_out = f"TRL has gradient_accumulation_steps={work['accumulation of TRL']}. {left_out}"
    header = ["", *COSTS, "held out, each seed", f"last {SMOOTHED} rewards, each seed"]
    return (
        f"{markdown(header, lines)}\n\n{work['steps']} steps of {work['completions']} completions, {work['dtype']}; "
        f"held out before: {content['runs'][0]['held_out'][0]:.3f} of {work['held_out_sums']} sums. "
        f"Ours has micro-batches of {work.get('micro_batch_tokens', 1024):,} tokens. {left_out}"
        f"{env['cpu_count']} CPU cores, torch {env['torch']}, transformers {env['transformers']}, {content['date']}."
    )


def draw(content: Mapping[str, Any], path: Path) -> None:
    """The mean reward over the steps and over the minutes, a line for each seed."""
    from matplotlib import rc_context

    work = content["work"]
    words = (
        "SmolLM2-135M learns sums: ours beside TRL on the same work",
        f"{work['completions']} completions a step, {work['dtype']}, {content['environment']['cpu_count']} CPU cores",
        f"mean reward of the last {SMOOTHED} steps, a line for each seed  ·  {content['date']}",
    )
    with rc_context(RC):
        figure, panels = page(3.6, 2, words)
        for number, run in enumerate(content["runs"]):
            rewards = smoothed(run["reward"])
            minutes = [seconds / 60 for seconds in accumulate(run["seconds"])]
            label = run["trainer"] if number >= len(content["runs"]) - len(TRAINERS) else None
            places_of = (range(1, len(rewards) + 1), minutes)
            for axes, places in list(zip(panels, places_of, strict=True))[: 1 if "disturbed" in run else 2]:
                axes.plot(places, rewards, color=COLOURS[run["trainer"]], linewidth=1.4, alpha=0.8, label=label)
        for axes, unit in zip(panels, ("step", "minutes"), strict=True):
            axes.set(xlabel=unit, ylim=(0, None))
        panels[0].set_ylabel("reward")
        panels[1].legend(loc="lower right")
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def smoothed(values: Sequence[float]) -> list[float]:
    return [mean(values[max(0, stop - SMOOTHED) : stop]) for stop in range(1, len(values) + 1)]
