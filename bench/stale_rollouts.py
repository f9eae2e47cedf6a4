"""Does score centering learn better? `python -m fused_grpo.bench.stale_rollouts [--seeds 8] [--model smollm2]`.

The built-in task with the demo's options, or SmolLM2-135M that learns sums with its recipe's. Transformers samples from
a copy of the model, which gets new weights each few steps alone: rollouts are up to that many steps old. Conditions are
old weights, older ones, nucleus sampling, and batches in flight (`--only` a part of one's name); arms are the four
combinations of importance weights and centering, of which SmolLM2 has the two with weights. It writes
bench/results/<machine>/stale-<model>-<date>.json, whose figures docs/score-centering.md quotes, and prints them; a file
of the same day and commit is gone on with. SmolLM2 takes 4 minutes a run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM

from fused_grpo.bench.generate_ahead import Beside
from fused_grpo.bench.raw_file import begun, raw_file, write
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.cli.options import RECIPES, parse_train_options
from fused_grpo.trainer.cli.train import load_start
from fused_grpo.trainer.recipes import arithmetic

STEPS = 24
NUCLEUS = {"top_p": 0.9, "sampling_support": "require"}
# (steps that the sampler's weights are kept, further options, the kind of centering)
CONDITIONS: dict[str, tuple[int, dict[str, Any], str]] = {
    "up to 3 steps old": (4, {}, "topk"),
    "up to 7 steps old": (8, {}, "topk"),
    "up to 3 steps old, top_p=0.9": (4, NUCLEUS, "kept"),
    "generate_ahead=4": (1, {"generate_ahead": 4}, "topk"),
}
# (importance weights, centering)
ARMS = {
    "built-in": [(weights, centred) for weights in (False, True) for centred in (False, True)],
    "smollm2": [(True, False), (True, True)],
}
CONDITIONS_OF = {"built-in": [*CONDITIONS], "smollm2": [*CONDITIONS][1:3]}
SMOLLM2 = {"per_device_train_batch_size": 32, "lr_scheduler_type": "constant"}  # half of the recipe's prompts


class Behind(Beside):
    """Takes new weights in every `age`-th step alone."""

    def __init__(self, model: Any, tokenizer: Any, age: int) -> None:
        self._age = age
        super().__init__(model, tokenizer)

    def load_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        if version % self._age == 0:
            super().load_weights(named_weights, version)
        self.weight_version = version


def built_in(options: dict[str, Any]) -> tuple[Any, ...]:
    """The model, its tokenizer, rewards, rows to train on and held-out ones, and the demo's options."""
    model, tokenizer = arithmetic.load_base_model()
    splits, demo = arithmetic.build_splits(), yaml.safe_load((RECIPES / "demo.yaml").read_text())
    return model, tokenizer, arithmetic.sum_reward, splits.train, splits.heldout, GRPOConfig(**{**demo, **options})


def real(options: dict[str, Any]) -> tuple[Any, ...]:
    """The same of the recipe smollm2."""
    changes = [f"--{name.replace('_', '-')}={value}" for name, value in (SMOLLM2 | options).items()]
    recipe = parse_train_options(["--config=smollm2", "--eval-limit=100", *changes])
    start, _ = load_start(recipe)
    model = AutoModelForCausalLM.from_pretrained(start.model)
    tokenizer, rewards = start.processing_class, start.reward_funcs
    return model, tokenizer, rewards, start.train_dataset, start.eval_dataset, start.args


def run(case: tuple[str, str, bool, bool, int]) -> dict[str, Any]:
    """One run: held-out accuracy before and after."""
    name, condition, weights, centred, seed = case
    torch.set_num_threads(1)
    age, options, kind = CONDITIONS[condition]
    with tempfile.TemporaryDirectory() as folder:
        shared = {"output_dir": folder, "max_steps": STEPS, "save_strategy": "no", "use_vllm": False}
        shared |= {"vllm_importance_sampling_correction": weights, "score_centering": kind if centred else "off"}
        shared |= {"seed": seed, "log_completions": False, "logprob_mismatch": "warn", "eval_steps": STEPS}
        model, tokenizer, rewards, train, heldout, args = (built_in if name == "built-in" else real)(shared | options)
        data: dict[str, Any] = {"eval_dataset": heldout, "processing_class": tokenizer}
        engine = Behind(model, tokenizer, age)
        result = GRPOTrainer(model, rewards, args, train, **data, rollout_engine=engine).train()
    assert result.eval_before is not None
    assert result.eval_after is not None
    row = {"condition": condition, "importance weights": weights, "centred": centred, "seed": seed}
    row |= {"before": result.eval_before["reward"], "after": result.eval_after["reward"]}
    kept = ("centering", "sampling_difference", "reward")
    row |= {metric: value for metric, value in result.metrics.items() if metric.startswith(kept)}
    print(row, flush=True)
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--model", choices=[*ARMS], default="built-in")
    parser.add_argument("--only", default="")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    given = parser.parse_args(arguments)
    conditions, arms = [name for name in CONDITIONS_OF[given.model] if given.only in name], ARMS[given.model]
    cases = [(given.model, name, *arm, seed) for name in conditions for seed in range(given.seeds) for arm in arms]
    made_by = f"python -m fused_grpo.bench.stale_rollouts --model {given.model}"
    path, entries = raw_file(f"stale-{given.model}", made_by, steps=STEPS, runs=[])
    entries = begun(path, entries, same=("commit", "environment", "steps"), fix="move it away")
    rows: list[dict[str, Any]] = entries["runs"]
    measured = [[row[key] for key in ("condition", "importance weights", "centred", "seed")] for row in rows]
    cases = [case for case in cases if [*case[1:]] not in measured]
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        for row in pool.imap(run, cases):
            rows.append(row)
            write(path, entries)
    print(path)
    for condition in conditions:
        for weights, centred in arms:
            arm = {"condition": condition, "importance weights": weights, "centred": centred}
            gains = [row["after"] for row in rows if arm.items() <= row.items()]
            spread = statistics.stdev(gains) if len(gains) > 1 else 0.0
            print(f"{condition}, {weights=}, {centred=}: {statistics.mean(gains):.3f}, sd {spread:.3f}")


if __name__ == "__main__":
    main()
