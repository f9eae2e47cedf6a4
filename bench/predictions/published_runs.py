"""What others published about their runs, beside what trainer/throughput.py predicts: the tables of measured.md.

published_runs.json has the sizes of the models, and of every run the batch, the GPUs and the published seconds of a
step. `fitted` names the rate that was chosen with that run; `why` is the reason for an error of more than 20 %.

    NeMo RL    docs/about/performance-summary.md at v0.5.0 and v0.6.0, and the recipes there: the newest table that has
               the run, bf16. Prompts have 102 tokens, and Llama's 127: tokens per second times seconds, less the
               completions. That the sync of weights reaches 1 GB/s for each GPU is an assumption.
    prime-rl   benchmarks/baselines at commit 559b44772e47: trainers alone, with made-up data. The seconds of a step are
               its 16 sequences over the published tokens per second: training, and weights written to files.
    verl       docs/perf/dpsk.md with examples/grpo_trainer/run_deepseek671b_math_megatron_96gb.sh, and
               docs/advance/one_step_off.md, at commit b178a3cd56f5. That prompts have 200 tokens is an assumption.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fused_grpo.bench.report import tables
from fused_grpo.trainer.throughput import ModelSize, Run, Step

BOUND = 0.2


def predicted(row: Mapping[str, Any], sizes: Mapping[str, Any]) -> Step:
    """The step of a published run. Without GPUs for rollouts it is that of a trainer alone."""
    run = Run(size=ModelSize(**sizes[row["model"]]), **row["run"])
    return Step(run, row["rollout_gpus"], row["train_gpus"], row["tensor_parallel"], colocate=row["colocate"])


def seconds(row: Mapping[str, Any], sizes: Mapping[str, Any]) -> float:
    step = predicted(row, sizes)
    return step.seconds if row["rollout_gpus"] else step.phases["training"] + step.phases["sync"]


def error(row: Mapping[str, Any], sizes: Mapping[str, Any]) -> float:
    """Of the prediction, relative to what was published."""
    return seconds(row, sizes) / float(row["published"]) - 1


def text(content: Mapping[str, Any]) -> str:
    """Both tables, and how many of the runs without a fitted rate are within the bound."""
    rows, sizes = content["steps"], content["sizes"]
    tested = [row for row in rows if "fitted" not in row]
    close = [row for row in tested if abs(error(row, sizes)) <= BOUND]
    total = f"{len(close)} of the {len(tested)} runs that nothing was fitted to are within {BOUND:.0%}."
    header = ["source", "model", "GPUs", "", "", "published (s)", "predicted (s)", "error"]
    lines = [cells(row, sizes) for row in rows]
    return "\n\n".join([total, tables.markdown(header, lines, text=5), composed(content["phases"])])


def cells(row: Mapping[str, Any], sizes: Mapping[str, Any]) -> list[str]:
    off, gpu = error(row, sizes), row["run"].get("gpu", "h100").upper()
    gpus = f"{row['train_gpus']} {gpu}" if row["colocate"] or not row["rollout_gpus"] else ""
    gpus = gpus or f"{row['rollout_gpus']} + {row['train_gpus']} {gpu}"
    note = f"fitted: `{row['fitted']}`" if "fitted" in row else row.get("why", "")
    shown = [f"{row['published']:.4g}", f"{seconds(row, sizes):.4g}", tables.bold(f"{off:+.0%}", abs(off) > BOUND)]
    return [row["source"], row["model"], gpus, row["how"], note, *shown]


def composed(rows: Sequence[Mapping[str, Any]]) -> str:
    """Steps from the phases that were published, as the model adds them up."""
    lines = []
    for row in rows:
        rollouts, *learning = row["phases"]
        total = max(rollouts, sum(learning)) if row["prefetched"] else sum(row["phases"])
        phases = " + ".join(map(str, row["phases"]))
        lines.append([row["how"], phases, str(row["published"]), str(total), f"{total / row['published'] - 1:+.0%}"])
    header = ["verl", "rollouts + old log-probs + update (s)", "step (s)", "from the phases", "error"]
    return tables.markdown(header, lines, text=2)
