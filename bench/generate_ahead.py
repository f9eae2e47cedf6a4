"""Does a run learn as well from batches of older weights? `python -m fused_grpo.bench.generate_ahead [--seeds 5]`.

And with `--seconds`: how long are its steps, beside an engine that takes a while to answer, as a server does?

The built-in task with the demo's options, at its learning rate and at lower ones, and `generate_ahead` of 0, 1 and 4;
batches in flight with each of `CORRECTIONS`, of which the first is the default, and 4 of them also with a limit to how
far they may be from the policy.
Transformers samples from a copy of the model in a thread while the model is trained. It writes
bench/results/<machine>/generate-ahead-<date>.json, with the held-out accuracy before and after and the mean reward of
each step, whose figures docs/trainer.md quotes, and prints means and standard deviations over the seeds, and how far
the mean curve of the reward is from those of k = 0. One process takes about an hour.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import yaml
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from fused_grpo.bench.raw_file import raw_file, write
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.batching.micro_batch_metrics import DIFFERENCE, MISMATCH
from fused_grpo.trainer.cli.options import RECIPES
from fused_grpo.trainer.engines import RolloutEngine
from fused_grpo.trainer.engines.transformers_generate import TransformersEngine
from fused_grpo.trainer.recipes import arithmetic
from fused_grpo.trainer.types import Rollouts, SamplingParams

Array = npt.NDArray[np.float64]
RATES, COUNTS, LAST = (1e-3, 3e-4, 1e-4), (0, 1, 4), 10  # the third: steps of a mean of the reward
MASK, PACED = {"off_policy_mask_threshold": 0.05}, {"generate_ahead_max_kl": 0.001}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "weights": {},
    "weights and mask": MASK,
    "mask": {**MASK, "vllm_importance_sampling_correction": False},
}
CORRECTIONS |= {f"{name}, paced": CORRECTIONS[name] | PACED for name in ("weights and mask", "mask")}
# On policy there is nothing to correct, and one batch in flight is the fewest.
KINDS = [(k, name) for k in COUNTS for name in CORRECTIONS if name == "weights" or k > ("paced" in name)]
MEASURED = ("reward", "off_policy_steps", f"{DIFFERENCE}/mean", MISMATCH)

# Seconds that batches take, one after the other, and values of the option; steps that are timed, after a few others.
LATENCIES, TIMED, BEFORE = ((1.0,), (0.3, 1.7)), (0, 1, 2), 3


class Beside(TransformersEngine):
    """Samples from a copy of the model, which takes the weights that it is given."""

    has_own_weights = samples_in_background = True

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._copy = copy.deepcopy(model)
        super().__init__(self._copy, tokenizer)

    def load_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._copy.load_state_dict(dict(named_weights))
        self.weight_version = version


def run(rate: float, k: int, correction: str, seed: int) -> dict[str, Any]:
    """One run: held-out accuracy before and after, the rewards of its steps, and how old their rollouts were."""
    model, tokenizer = arithmetic.load_base_model()
    splits, demo = arithmetic.build_splits(), yaml.safe_load((RECIPES / "demo.yaml").read_text())
    with tempfile.TemporaryDirectory() as folder:
        demo |= {"output_dir": folder, "save_strategy": "no", "use_vllm": False, "eval_steps": None}
        demo |= {"generate_ahead": k, "learning_rate": rate, "seed": seed, "log_completions": False}
        demo |= CORRECTIONS[correction]
        data: dict[str, Any] = {"eval_dataset": splits.heldout, "processing_class": tokenizer}
        engine = Beside(model, tokenizer)
        args = GRPOConfig(**demo)
        trainer = GRPOTrainer(model, arithmetic.sum_reward, args, splits.train, **data, rollout_engine=engine)
        result = trainer.train()
        steps = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    assert result.eval_before is not None
    assert result.eval_after is not None
    trained = [step for step in steps if "off_policy_steps" in step]
    row: dict[str, Any] = {"learning rate": rate, "k": k, "correction": correction, "seed": seed}
    row |= {"before": result.eval_before["reward"], "after": result.eval_after["reward"]}
    row |= {name: [step[name] for step in trained] for name in MEASURED}
    print({name: value for name, value in row.items() if not isinstance(value, list)}, flush=True)
    return row


def rewards_by_version(row: dict[str, Any]) -> Array:
    """The mean reward of what each of the first weight versions samples, the same ones for every k."""
    versions = np.arange(len(row["reward"])) - row["off_policy_steps"]
    sampled = np.unique(versions)  # by several batches, or by none, where the number in flight changes
    means = [np.mean(row["reward"], where=versions == version) for version in sampled]
    rewards: Array = np.interp(np.arange(len(versions) - max(COUNTS)), sampled, means)
    return rewards


class Remote(RolloutEngine):
    """Answers after a while, with completions that depend on the seed alone."""

    name, weight_version, samples_in_background = "remote", 0, True

    def __init__(self, latencies: Sequence[float]) -> None:
        self._latencies = itertools.cycle(latencies)

    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: SamplingParams) -> Rollouts:
        time.sleep(next(self._latencies))
        count, generator = len(prompt_ids) * sampling.n, torch.Generator().manual_seed(sampling.seed or 0)
        return Rollouts(
            prompt_ids=[list(ids) for ids in prompt_ids],
            completion_ids=torch.randint(2, 14, (count, sampling.max_tokens), generator=generator).tolist(),
            sampling_logprobs=[[-2.5] * sampling.max_tokens] * count,
            finish_reasons=["length"] * count,
            num_generations=sampling.n,
            weight_version=self.weight_version,
        )

    def load_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.weight_version = version

    def close(self) -> None:
        """Do nothing."""


def seconds(latencies: Sequence[float], k: int, steps: int) -> dict[str, Any]:
    """Seconds of the steps of one run, and the parts of them in which the trainer waits, learns and copies weights."""
    sizes: dict[str, Any] = {
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=14, num_key_value_heads=4, tie_word_embeddings=False, **sizes))
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"logprob_mismatch": "warn", "save_strategy": "no", "gradient_checkpointing": False}
        options |= {"per_device_train_batch_size": 32, "num_generations": 4, "max_completion_length": 6}
        args = GRPOConfig(folder, generate_ahead=k, max_steps=BEFORE + steps, **options)
        rows, tokenizer = [{"prompt": f"{a}+1="} for a in range(8)], arithmetic.build_tokenizer()
        engine, reward = Remote(latencies), lambda completion_ids, **_: [float(ids[-1]) for ids in completion_ids]
        GRPOTrainer(model, reward, args, rows, processing_class=tokenizer, rollout_engine=engine).train()
        lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    timed = [line for line in lines if "step_time" in line][BEFORE:]
    row: dict[str, Any] = {"latencies": list(latencies), "k": k, "step": [line["step_time"] for line in timed]}
    row |= {part: [line.get(f"time/{part}", 0.0) for line in timed] for part in ("generate", "train", "sync")}
    means = {name: round(statistics.mean(row[name]), 2) for name in ("step", "generate", "train", "sync")}
    print({"latencies": latencies, "k": k, **means}, flush=True)
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", action="store_true")
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(1)
    name, module = "generate-ahead" + "-seconds" * parsed.seconds, "python -m fused_grpo.bench.generate_ahead"
    path, entries = raw_file(name, module + " --seconds" * parsed.seconds)
    print(path)
    if parsed.seconds:
        write(path, entries | {"runs": [seconds(latencies, k, 20) for latencies in LATENCIES for k in TIMED]})
        return
    cases = list(itertools.product(range(parsed.seeds), RATES, KINDS))
    rows = [run(rate, *kind, seed) for seed, rate, kind in cases]
    write(path, entries | {"runs": rows})
    for rate in RATES:
        on_policy = np.array([])
        for kind in KINDS:
            runs = [row for row, case in zip(rows, cases, strict=True) if case[1:] == (rate, kind)]
            curves = np.array([rewards_by_version(row) for row in runs])
            figures = {"held-out": [row["after"] for row in runs], "reward of the same weights": curves.mean(1)}
            figures["rollouts are steps old"] = [statistics.mean(row["off_policy_steps"]) for row in runs]
            for name, values in figures.items():
                spread = statistics.stdev(values) if len(values) > 1 else 0.0
                print(f"{rate=}, {kind}, {name}: {statistics.mean(values):.3f}, sd {spread:.3f}")
            means = np.apply_along_axis(np.convolve, 1, curves, np.full(LAST, 1 / LAST), "valid")
            on_policy = on_policy if len(on_policy) else means
            below, lacks = means.mean(0) < on_policy.min(0), on_policy.mean(0) - means.mean(0)
            count, most = f"{below.sum()} of {below.size}", lacks.max()
            print(f"{rate=}, {kind}, below every k = 0 in {count} steps, by {most:.3f} at most")


if __name__ == "__main__":
    main()
