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
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fused_grpo.bench import peers
from fused_grpo.bench.accuracy_page import PAGE, ROOT, render
from fused_grpo.bench.contenders import Contender, Result, exact, full_logits, ours, ours_logprobs, peer
from fused_grpo.bench.gate import Errors
from fused_grpo.bench.work import Batch, Work
from fused_grpo.env import environment

WORKS = (
    Work(kind="logprobs", head="GPT-2", tokens=512, dtype="bfloat16"),
    Work(kind="logprobs", head="Qwen3-0.6B", tokens=128, dtype="bfloat16"),
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
    found = [measure_one(work, seed, contenders()) for seed, work in enumerate(WORKS)]
    return {
        "commit": commit(),
        "environment": environment(),
        "torch_threads": torch.get_num_threads(),
        "problems": [{**work.described(), "seed": seed, **found[seed]} for seed, work in enumerate(WORKS)],
    }


def commit() -> dict[str, Any]:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    return {"id": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}


def contenders() -> list[Contender]:
    """Everyone who gives log-probs, and three who are measured here alone."""
    known = {contender.name: contender for contender in peers.everyone() if not contender.floor}
    mine, full = known.pop("fused-grpo"), known.pop("full logits")
    others = [contender for contender in known.values() if contender.logprobs is not None or contender.missing]
    return [mine, frozen(), full, full_fp32(), *others, liger_grpo()]


def frozen() -> Contender:
    """Another plan than the trainable head's: the gradient is taken in the forward pass."""

    def logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, work: Work) -> Tensor:
        return ours_logprobs(hidden, weight.detach(), targets, work)

    setting = "weight without gradient"
    return replace(ours()[0], name="fused-grpo, frozen head", setting=setting, logprobs=logprobs)


def full_fp32() -> Contender:
    def logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, work: Work) -> Tensor:
        return full_logits(hidden.float(), weight.float(), targets, work)

    return Contender(name="full logits, fp32", version=torch.__version__, setting="inputs upcast", logprobs=logprobs)


def liger_grpo() -> Contender:
    """The log-probs inside Liger's GRPO loss, whose gradients those of the loss are but for a factor per token."""

    def load() -> dict[str, Any]:
        from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase

        def logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, work: Work) -> Tensor:
            found: Tensor = LigerFusedLinearPPOBase.chunk_forward(hidden[None], weight, targets[None])[0]
            return found

        return {"logprobs": logprobs}

    return peer("Liger GRPO", peers.LIGER, "the log-probs inside LigerFusedLinearGRPOLoss, one chunk", load)


def measure_one(work: Work, seed: int, everyone: list[Contender]) -> dict[str, Any]:
    batch = problem(work, seed)
    right = exact(batch, work)
    assert right.d_hidden is not None
    assert right.d_weight is not None
    chances = right.value.exp()
    results = [measured(contender, batch, work, right) for contender in everyone]
    rounded = errors(Result(right.value.float(), right.d_hidden.bfloat16(), right.d_weight.bfloat16()), right)
    return {
        "logprob_mean": right.value.mean().item(),
        "tokens_above_99_percent": int((chances > 0.99).sum()),
        "results": results,
        "rounding": rounded,
    }


def measured(contender: Contender, batch: Batch, work: Work, right: Result) -> dict[str, Any]:
    """A row of the page; one who is wrong, and not only rounds, has been called wrongly."""
    row = {"name": contender.name, "setting": contender.setting, "version": contender.version}
    why_not = contender.why_not(work, "cpu")
    print(f"V={work.shape.vocab}  {contender.name}", why_not or "", flush=True)
    if why_not is not None:
        return {**row, "missing": why_not}
    found = errors(contender.run(batch, work), right)
    gradients = [found[name] and found[name]["relative"] for name in ("hidden", "weight")]
    assert not Errors(found["logprobs"]["max"], *gradients).too_large(work), f"got {found} from {contender.name}"
    return {**row, **found}


def problem(work: Work, seed: int) -> Batch:
    """Hidden states and head in bf16; nothing is masked."""
    generator, (hidden, vocab, _), tokens = torch.Generator().manual_seed(seed), work.shape, work.tokens
    states = torch.randn(tokens, hidden, generator=generator)
    weight = torch.randn(vocab, hidden, generator=generator) * (LOGIT_STD / hidden**0.5)
    sure, sampled = torch.arange(tokens) % 2 == 0, torch.empty(tokens, dtype=torch.int64)
    for rows in torch.arange(tokens).split(64):
        sampled[rows] = torch.multinomial((states[rows] @ weight.t()).softmax(-1), 1, generator=generator)[:, 0]
    # The others' log-sum-exp is about ln V + std^2 / 2; a sure token's logit is put -2 to 18 from it.
    others, margin = torch.tensor(vocab).log() + LOGIT_STD**2 / 2, 20 * torch.rand(tokens, generator=generator) - 2
    direction = weight[sampled] / weight[sampled].square().sum(-1, keepdim=True)
    raised = states + (others + margin - (states * weight[sampled]).sum(-1))[:, None] * direction
    states = torch.where(sure[:, None], raised, states).bfloat16().view(work.sequences, -1, hidden)
    advantages = torch.randn(work.sequences, generator=generator)
    targets = sampled.view(work.sequences, -1)
    upstream = (advantages[:, None] / tokens).expand(targets.shape)
    leaves = (states.requires_grad_(), weight.bfloat16().requires_grad_())
    return Batch(*leaves, targets, torch.ones_like(targets), advantages, torch.zeros(targets.shape), upstream)


def errors(result: Result, right: Result) -> dict[str, Any]:
    """Of log-probs in nats; of ratios, as if their other log-prob were exact; of gradients relative to exact ones."""
    off = result.value.double() - right.value
    return {
        "logprobs": {"max": off.abs().max().item(), "mean": off.abs().mean().item(), "rms": rms(off)},
        "ratio": torch.expm1(off).abs().max().item(),
        "hidden": gradient_errors(result.d_hidden, right.d_hidden),
        "weight": gradient_errors(result.d_weight, right.d_weight),
    }


def gradient_errors(gradient: Tensor | None, right: Tensor | None) -> dict[str, float] | None:
    """`worst_row`: of a gradient of hidden states, the token whose own gradient is relatively furthest off."""
    if gradient is None or right is None:
        return None
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
