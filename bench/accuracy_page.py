"""docs/accuracy.md from the raw figures of bench/accuracy.py, and from nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "accuracy.md"

TEMPLATE = """\
<!-- Made by bench/accuracy.py from {raw}; do not edit. -->

# Accuracy

How far log-probs and their gradients are from fp64, everyone starting from the same bf16 hidden states and head. Half
of the tokens are drawn from the model's distribution (logits with a standard deviation of 2.5), half are ones it is
more or less sure of, up to 1 - p = 1e-8. Upstream gradients are those of GRPO on policy.

- **Log-probs.** With logits rounded to bf16 a log-prob is off by up to {full:.2g} nats, which alone makes an importance
  ratio wrong by {full_ratio:.2g} %, beside a clip range of 20 %. `fused-grpo` keeps logits in fp32: {ours:.1e} nats
  at most, {ours_ratio:.1g} %.
- **Gradients.** They come back in bf16, and to round exact ones to bf16 costs what the last row of a table says. The
  *worst token* is the one whose row of dH is relatively furthest off: one the model is so sure of that 1 - p is lost
  when it is taken as a difference. That row is off by {ours_worst:.2g} % with `fused-grpo`, {full_worst:.3g} % with
  full logits; it is a short one, so all of dH hardly shows it.
- **Upcasting** hidden states and head to fp32 mends the log-probs, at the price of a head and GEMMs in fp32; the worst
  token stays wrong ({fp32_worst:.3g} % with full logits).

{tables}

`log p`: absolute error in nats. `ratio`: the largest |exp(error) - 1|. `dH`, `dW`: length of the error over length of
the exact gradient, all tokens together. `|dH|`, `|dW|`: length of the gradient over that of the exact one.

## How each was run

{settings}

Measured on {date} on a CPU ({system}, {cpus} cores, torch threads: {threads}; Python {python}, torch {torch}) at commit
`{commit}`{dirty}.
`python bench/accuracy.py` makes this page and its raw figures (versions, shapes, seeds) again:
[{name}](../{raw}).
"""

COLUMNS = ("", "log p, max", "mean", "RMS", "ratio", "dH", "worst token", "dW", "\\|dH\\|", "\\|dW\\|")


def render(path: Path) -> str:
    """The page, from a file that `bench/accuracy.py` wrote somewhere in this repository."""
    results, raw = json.loads(path.read_text()), path.resolve().relative_to(ROOT).as_posix()
    problems, environment = results["problems"], results["environment"]
    return TEMPLATE.format(
        raw=raw,
        name=path.name,
        tables="\n\n".join(table(problem) for problem in problems),
        settings="\n".join(setting(row) for row in problems[0]["results"]),
        full=worst(problems, "full logits", "logprobs", "max"),
        full_ratio=100 * worst(problems, "full logits", "ratio"),
        full_worst=100 * worst(problems, "full logits", "hidden", "worst_row"),
        fp32_worst=100 * worst(problems, "full logits, fp32", "hidden", "worst_row"),
        ours=worst(problems, "fused-grpo", "logprobs", "max"),
        ours_ratio=100 * worst(problems, "fused-grpo", "ratio"),
        ours_worst=100 * worst(problems, "fused-grpo", "hidden", "worst_row"),
        date=results["date"],
        threads=results["torch_threads"],
        system=environment["system"],
        cpus=environment["cpu_count"],
        python=environment["python"],
        torch=environment["torch"],
        commit=results["commit"]["id"][:12],
        dirty=" with uncommitted changes" if results["commit"]["dirty"] else "",
    )


def worst(problems: list[dict[str, Any]], name: str, *keys: str) -> float:
    """The largest of a contender's figures over the problems."""
    figures = [row for problem in problems for row in problem["results"] if row["name"] == name]
    for key in keys:
        figures = [figure[key] for figure in figures]
    return float(max(figures))


def table(problem: dict[str, Any]) -> str:
    title = "## N={tokens} in {sequences} sequences, D={hidden}, V={vocab}, {dtype}".format(**problem)
    rows = [line(row["name"], row) for row in problem["results"]]
    rows.append(line("*exact, gradients rounded*", problem["rounding"]))
    return "\n".join([title, "", cells(*COLUMNS), "|---" + "|---:" * (len(COLUMNS) - 1) + "|", *rows])


def line(name: str, row: dict[str, Any]) -> str:
    if row.get("missing"):
        return cells(name, "not measured", *("",) * (len(COLUMNS) - 2))
    logprobs, hidden, weight = row["logprobs"], row["hidden"], row["weight"]
    return cells(
        name,
        *(f"{logprobs[key]:.1e}" for key in ("max", "mean", "rms")),
        f"{row['ratio']:.1e}",
        f"{hidden['relative']:.2e}",
        f"{hidden['worst_row']:.1e}",
        f"{weight['relative']:.2e}" if weight else "-",
        f"{hidden['norm_ratio']:.4f}",
        f"{weight['norm_ratio']:.4f}" if weight else "-",
    )


def cells(*texts: str) -> str:
    return "| " + " | ".join(texts) + " |"


def setting(row: dict[str, Any]) -> str:
    if row.get("missing"):
        return f"- {row['name']}: not measured: {row['missing']}"
    return f"- {row['name']}: {row['setting']} ({row['version']})"
