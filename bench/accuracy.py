"""How far everyone's log-probs and gradients are from fp64, from the same bf16 inputs.

    python bench/accuracy.py                    measure, write bench/results/<machine>/accuracy-<date>.json, render it
    python bench/accuracy.py --render FILE      only write docs/accuracy.md again, from FILE

Half of the tokens are drawn from the model's own distribution, whose logits have a standard deviation of 2.5; the other
half are ones it is more or less sure of, up to 1 - p = 1e-8, as most tokens of a fine-tuned model are. The upstream
gradient is GRPO's on policy: each sequence's advantage over the number of tokens.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import peers
import torch
from accuracy_page import PAGE, ROOT, render
from peers import Contender, Result
from torch import Tensor

from fused_grpo.env import environment

SHAPES = (
    {"sequences": 8, "tokens": 512, "hidden": 512, "vocab": 32000, "seed": 0},
    {"sequences": 8, "tokens": 128, "hidden": 896, "vocab": 151936, "seed": 1},
)
LOGIT_STD = 2.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", type=Path, metavar="FILE")
    path = parser.parse_args().render
    if path is None:
        today = datetime.date.today().isoformat()
        path = ROOT / "bench" / "results" / f"cpu-{os.cpu_count()}-cores" / f"accuracy-{today}.json"
        results = {"made_by": "bench/accuracy.py", "date": today, **measure()}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(render(path))
    print(f"{PAGE.relative_to(ROOT)} from {path}")


def measure() -> dict[str, Any]:
    contenders = peers.contenders()
    for contender in contenders:
        if contender.run is None:
            print(f"{contender.name} is missing: {contender.missing}")
        else:
            peers.check(contender.run)
    return {
        "commit": commit(),
        "environment": environment(),
        "torch_threads": torch.get_num_threads(),
        "problems": [{**shape, "dtype": "bfloat16", **measure_one(shape, contenders)} for shape in SHAPES],
    }


def commit() -> dict[str, Any]:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    return {"id": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}


def measure_one(shape: dict[str, int], contenders: list[Contender]) -> dict[str, Any]:
    inputs = problem(**shape)
    right = peers.exact(*inputs)
    chances = right.logprobs.exp()
    rows = [{"name": c.name, "setting": c.setting, "version": c.version} for c in contenders]
    for row, contender in zip(rows, contenders, strict=True):
        measured = {"missing": contender.missing} if contender.run is None else errors(contender.run(*inputs), right)
        row.update(measured)
        print(f"V={shape['vocab']}  {contender.name}: {contender.missing or measured['logprobs']}", flush=True)
    rounded = errors(Result(right.logprobs.float(), right.hidden.bfloat16(), right.weight.bfloat16()), right)
    return {
        "logprob_mean": right.logprobs.mean().item(),
        "tokens_above_99_percent": int((chances > 0.99).sum()),
        "results": rows,
        "rounding": rounded,
    }


def problem(sequences: int, tokens: int, hidden: int, vocab: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden [B, T, D], weight [V, D], both in bf16, targets [B, T] and upstream [B, T]."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(tokens, hidden, generator=generator)
    weight = torch.randn(vocab, hidden, generator=generator) * (LOGIT_STD / hidden**0.5)
    sure, sampled = torch.arange(tokens) % 2 == 0, torch.empty(tokens, dtype=torch.int64)
    for rows in torch.arange(tokens).split(64):
        sampled[rows] = torch.multinomial((states[rows] @ weight.t()).softmax(-1), 1, generator=generator)[:, 0]
    # The others' log-sum-exp is about ln V + std^2 / 2; a sure token's logit is put -2 to 18 from it.
    others, margin = torch.tensor(vocab).log() + LOGIT_STD**2 / 2, 20 * torch.rand(tokens, generator=generator) - 2
    direction = weight[sampled] / weight[sampled].square().sum(-1, keepdim=True)
    raised = states + (others + margin - (states * weight[sampled]).sum(-1))[:, None] * direction
    states = torch.where(sure[:, None], raised, states).bfloat16().view(sequences, -1, hidden)
    advantages = torch.randn(sequences, 1, generator=generator)
    upstream = (advantages / tokens).expand(sequences, tokens // sequences)
    return states, weight.bfloat16().requires_grad_(), sampled.view(sequences, -1), upstream


def errors(result: Result, right: Result) -> dict[str, Any]:
    """Of log-probs in nats; of ratios, as if their other log-prob were exact; of gradients relative to exact ones."""
    off = result.logprobs.double() - right.logprobs
    return {
        "logprobs": {"max": off.abs().max().item(), "mean": off.abs().mean().item(), "rms": rms(off)},
        "ratio": torch.expm1(off).abs().max().item(),
        "hidden": gradient_errors(result.hidden, right.hidden),
        "weight": None if result.weight is None else gradient_errors(result.weight, right.weight),
    }


def gradient_errors(gradient: Tensor, right: Tensor) -> dict[str, float]:
    """`worst_row`: of a gradient of hidden states, the token whose own gradient is relatively furthest off."""
    gradient = gradient.double().flatten(0, -2)
    right = right.flatten(0, -2)
    off = gradient - right
    return {
        "relative": (off.norm() / right.norm()).item(),
        "worst_row": (off.norm(dim=-1) / right.norm(dim=-1)).max().item(),
        "norm_ratio": (gradient.norm() / right.norm()).item(),
    }


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


if __name__ == "__main__":
    main()
