"""Does a run learn as well from batches of older weights? `python -m fused_grpo.bench.generate_ahead [--seeds 5]`.

The built-in task with the demo's options, at its learning rate and at a tenth of it, and `generate_ahead` of 0, 1 and
4. Transformers samples from a copy of the model in a thread while the model is trained. It writes
bench/results/<machine>/generate-ahead-<date>.json, with the held-out accuracy before and after and the mean reward of
each step, whose figures docs/trainer.md quotes, and prints means and standard deviations over the seeds. One process
takes a quarter of an hour.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import os
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from fused_grpo.bench.accuracy import ROOT, commit
from fused_grpo.env import environment
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.cli.options import RECIPES
from fused_grpo.trainer.engines.transformers_generate import TransformersEngine
from fused_grpo.trainer.recipes import arithmetic

RATES, COUNTS, LAST = (1e-3, 1e-4), (0, 1, 4), 10  # the third: steps of the mean at the end


class Beside(TransformersEngine):
    """Samples from a copy of the model, which takes the weights that it is given."""

    has_own_weights = samples_in_background = True

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._copy = copy.deepcopy(model)
        super().__init__(self._copy, tokenizer)

    def load_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._copy.load_state_dict(dict(named_weights))
        self.weight_version = version


def run(rate: float, k: int, seed: int) -> dict[str, Any]:
    """One run: held-out accuracy before and after, the rewards of its steps, and how old their rollouts were."""
    model, tokenizer = arithmetic.load_base_model()
    splits, demo = arithmetic.build_splits(), yaml.safe_load((RECIPES / "demo.yaml").read_text())
    with tempfile.TemporaryDirectory() as folder:
        demo |= {"output_dir": folder, "save_strategy": "no", "use_vllm": False, "eval_steps": None}
        demo |= {"generate_ahead": k, "learning_rate": rate, "seed": seed, "log_completions": False}
        own: dict[str, Any] = {"eval_dataset": splits.heldout, "processing_class": tokenizer}
        engine = Beside(model, tokenizer)
        args = GRPOConfig(**demo)
        trainer = GRPOTrainer(model, arithmetic.sum_reward, args, splits.train, **own, rollout_engine=engine)
        result = trainer.train()
        steps = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    assert result.eval_before is not None
    assert result.eval_after is not None
    trained = [step for step in steps if "off_policy_steps" in step]
    row: dict[str, Any] = {"learning rate": rate, "k": k, "seed": seed}
    row |= {"before": result.eval_before["reward"], "after": result.eval_after["reward"]}
    row |= {name: [step[name] for step in trained] for name in ("reward", "off_policy_steps")}
    print({name: value for name, value in row.items() if not isinstance(value, list)}, flush=True)
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    torch.set_num_threads(1)
    seeds = range(parser.parse_args(arguments).seeds)
    rows = [run(rate, k, seed) for seed in seeds for rate in RATES for k in COUNTS]
    today = datetime.date.today().isoformat()
    path = ROOT / "bench" / "results" / f"cpu-{os.cpu_count()}-cores" / f"generate-ahead-{today}.json"
    found: dict[str, Any] = {"made_by": "python -m fused_grpo.bench.generate_ahead", "date": today}
    found |= {"commit": commit(), "environment": environment(), "runs": rows}
    path.write_text(json.dumps(found, indent=None) + "\n")
    print(path)
    for rate in RATES:
        for k in COUNTS:
            runs = [row for row in rows if (row["learning rate"], row["k"]) == (rate, k)]
            figures = {"held-out": [row["after"] for row in runs]}
            figures["reward, last steps"] = [statistics.mean(row["reward"][-LAST:]) for row in runs]
            figures["reward, all steps"] = [statistics.mean(row["reward"]) for row in runs]
            for name, values in figures.items():
                spread = statistics.stdev(values) if len(values) > 1 else 0.0
                print(f"{rate=}, {k=}, {name}: {statistics.mean(values):.3f}, sd {spread:.3f}")


if __name__ == "__main__":
    main()
