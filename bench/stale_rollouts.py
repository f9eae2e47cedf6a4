"""Does score centering learn better? `python -m fused_grpo.bench.stale_rollouts [--seeds 8]`.

The built-in task, sampled by transformers with the demo's options, where a copy of the model samples and gets new
weights each few steps alone: rollouts are up to that many steps old. Conditions are old weights, and older ones with
nucleus sampling; arms are the four combinations of importance weights and centering. It writes
bench/results/<machine>/stale-rollouts-<date>.json, whose figures docs/score-centering.md quotes, and prints them.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Iterable, Sequence
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

STEPS = 24
# (steps that the sampler's weights are kept, further options, the kind of centering)
CONDITIONS: dict[str, tuple[int, dict[str, Any], str]] = {
    "up to 3 steps old": (4, {}, "topk"),
    "up to 7 steps old": (8, {}, "topk"),
    "up to 3 steps old, top_p=0.9": (4, {"top_p": 0.9, "sampling_support": "require"}, "kept"),
}
ARMS = [(weights, centred) for weights in (False, True) for centred in (False, True)]


class Behind(TransformersEngine):
    """Samples from a copy of the model, which takes new weights in every `age`-th step."""

    has_own_weights = True

    def __init__(self, model: Any, tokenizer: Any, age: int) -> None:
        self._copy, self._age = copy.deepcopy(model), age
        super().__init__(self._copy, tokenizer)

    def load_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        if version % self._age == 0:
            self._copy.load_state_dict(dict(named_weights))
        self.weight_version = version


def run(case: tuple[str, bool, bool, int]) -> dict[str, Any]:
    """One run: held-out accuracy before and after."""
    condition, weights, centred, seed = case
    torch.set_num_threads(1)
    age, options, kind = CONDITIONS[condition]
    model, tokenizer = arithmetic.load_base_model()
    splits, demo = arithmetic.build_splits(), yaml.safe_load((RECIPES / "demo.yaml").read_text())
    with tempfile.TemporaryDirectory() as folder:
        demo |= {"output_dir": folder, "max_steps": STEPS, "save_strategy": "no", "use_vllm": False, "seed": seed}
        demo |= {"vllm_importance_sampling_correction": weights, "score_centering": kind if centred else "off"}
        args = GRPOConfig(**{**demo, **options, "log_completions": False, "logprob_mismatch": "warn"})
        own: dict[str, Any] = {"eval_dataset": splits.heldout, "processing_class": tokenizer}
        engine = Behind(model, tokenizer, age)
        trainer = GRPOTrainer(model, arithmetic.sum_reward, args, splits.train, **own, rollout_engine=engine)
        result = trainer.train()
    assert result.eval_before is not None
    assert result.eval_after is not None
    row = {"condition": condition, "importance weights": weights, "centred": centred, "seed": seed}
    row |= {"before": result.eval_before["reward"], "after": result.eval_after["reward"]}
    row |= {name: value for name, value in result.metrics.items() if name.startswith("centering")}
    print(row, flush=True)
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    seeds = range(parser.parse_args(arguments).seeds)
    cases = [(condition, *arm, seed) for seed in seeds for condition in CONDITIONS for arm in ARMS]
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        rows = pool.map(run, cases, chunksize=1)
    today = datetime.date.today().isoformat()
    path = ROOT / "bench" / "results" / f"cpu-{os.cpu_count()}-cores" / f"stale-rollouts-{today}.json"
    found: dict[str, Any] = {"made_by": "python -m fused_grpo.bench.stale_rollouts", "date": today, "steps": STEPS}
    found |= {"commit": commit(), "environment": environment(), "runs": rows}
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(path)
    for condition in CONDITIONS:
        for weights, centred in ARMS:
            arm = {"condition": condition, "importance weights": weights, "centred": centred}
            gains = [row["after"] for row in rows if arm.items() <= row.items()]
            spread = statistics.stdev(gains) if len(gains) > 1 else 0.0
            print(f"{condition}, {weights=}, {centred=}: {statistics.mean(gains):.3f}, sd {spread:.3f}")


if __name__ == "__main__":
    main()
