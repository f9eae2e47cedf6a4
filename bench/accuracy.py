"""Errors of log-probs and gradients against fp64 from the same bf16 inputs: `python -m fused_grpo.bench.accuracy`.

It writes bench/results/<machine>/accuracy-<date>.json, which docs/accuracy.md names and `bench.pages` renders.

Half of the tokens are drawn from the model's own distribution, whose logits have a standard deviation of 2.5. For the
other half the model is more or less certain, up to 1 - p = 1e-8, as for most tokens of a fine-tuned model. The upstream
gradient is that of GRPO on policy: the advantage of each sequence over the number of tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fused_grpo.bench.heads import peers
from fused_grpo.bench.heads.correctness import Errors
from fused_grpo.bench.heads.implementations import (
    Implementation,
    Result,
    exact,
    full_logits,
    ours,
    ours_logprobs,
    peer,
)
from fused_grpo.bench.heads.work import Batch, Work
from fused_grpo.bench.raw_file import raw_file, write

WORKS = (
    Work(kind="logprobs", head="GPT-2", tokens=512, dtype="bfloat16"),
    Work(kind="logprobs", head="Qwen3-0.6B", tokens=128, dtype="bfloat16"),
)
LOGIT_STD = 2.5


def main() -> None:
    threads = torch.get_num_threads()
    path, entries = raw_file("accuracy", "python -m fused_grpo.bench.accuracy", torch_threads=threads)
    entries["problems"] = [
        {**work.described(), "seed": seed, **measure_one(work, seed, implementations())}
        for seed, work in enumerate(WORKS)
    ]
    write(path, entries)
    print(f"{path}; name it in docs/accuracy.md, and run python -m fused_grpo.bench.pages")


def implementations() -> list[Implementation]:
    """All implementations of log-probs, and three that are measured only here."""
    by_name = {implementation.name: implementation for implementation in peers.everyone() if not implementation.floor}
    fused, full = by_name.pop("fused-grpo"), by_name.pop("full logits")
    others = [
        implementation
        for implementation in by_name.values()
        if implementation.logprobs is not None or implementation.missing
    ]
    return [fused, frozen(), full, full_fp32(), *others, liger_grpo()]


def frozen() -> Implementation:
    """The plan of a frozen head, which computes the gradient in the forward pass."""

    def logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, work: Work) -> Tensor:
        return ours_logprobs(hidden, weight.detach(), targets, work)

    setting = "weight without gradient"
    return replace(ours()[0], name="fused-grpo, frozen head", setting=setting, logprobs=logprobs)


def full_fp32() -> Implementation:
    def logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, work: Work) -> Tensor:
        return full_logits(hidden.float(), weight.float(), targets, work)

    return Implementation(
        name="full logits, fp32", version=torch.__version__, setting="inputs upcast", logprobs=logprobs
    )


def liger_grpo() -> Implementation:
    """The log-probs inside Liger's GRPO loss; gradients of the loss differ from theirs by a factor per token."""

    def load() -> dict[str, Any]:
        from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase

        def logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, work: Work) -> Tensor:
            values: Tensor = LigerFusedLinearPPOBase.chunk_forward(hidden[None], weight, targets[None])[0]
            return values

        return {"logprobs": logprobs}

    return peer("Liger GRPO", peers.LIGER, "the log-probs inside LigerFusedLinearGRPOLoss, one chunk", load)


def measure_one(work: Work, seed: int, everyone: list[Implementation]) -> dict[str, Any]:
    batch = problem(work, seed)
    right = exact(batch, work)
    assert right.d_hidden is not None
    assert right.d_weight is not None
    chances = right.value.exp()
    results = [measured(implementation, batch, work, right) for implementation in everyone]
    rounded = errors(Result(right.value.float(), right.d_hidden.bfloat16(), right.d_weight.bfloat16()), right)
    return {
        "logprob_mean": right.value.mean().item(),
        "tokens_above_99_percent": int((chances > 0.99).sum()),
        "results": results,
        "rounding": rounded,
    }


def measured(implementation: Implementation, batch: Batch, work: Work, right: Result) -> dict[str, Any]:
    """A row of the page. An error that exceeds rounding means that the implementation is called incorrectly."""
    row = {"name": implementation.name, "setting": implementation.setting, "version": implementation.version}
    why_not = implementation.why_not(work, "cpu")
    print(f"V={work.shape.vocab}  {implementation.name}", why_not or "", flush=True)
    if why_not is not None:
        return {**row, "missing": why_not}
    error = errors(implementation.run(batch, work), right)
    gradients = [error[name] and error[name]["relative"] for name in ("hidden", "weight")]
    assert not Errors(error["logprobs"]["max"], *gradients).too_large(work), f"got {error} from {implementation.name}"
    return {**row, **error}


def problem(work: Work, seed: int) -> Batch:
    """Hidden states and head in bf16; nothing is masked."""
    generator, (hidden, vocab, _), tokens = torch.Generator().manual_seed(seed), work.shape, work.tokens
    states = torch.randn(tokens, hidden, generator=generator)
    weight = torch.randn(vocab, hidden, generator=generator) * (LOGIT_STD / hidden**0.5)
    certain, sampled = torch.arange(tokens) % 2 == 0, torch.empty(tokens, dtype=torch.int64)
    for rows in torch.arange(tokens).split(64):
        sampled[rows] = torch.multinomial((states[rows] @ weight.t()).softmax(-1), 1, generator=generator)[:, 0]
    # The log-sum-exp of the others is about ln V + std^2 / 2; the logit of a certain token is put -2 to 18 from it.
    others, margin = torch.tensor(vocab).log() + LOGIT_STD**2 / 2, 20 * torch.rand(tokens, generator=generator) - 2
    gradients = weight[sampled] / weight[sampled].square().sum(-1, keepdim=True)
    raised = states + (others + margin - (states * weight[sampled]).sum(-1))[:, None] * gradients
    states = torch.where(certain[:, None], raised, states).bfloat16().view(work.sequences, -1, hidden)
    advantages = torch.randn(work.sequences, generator=generator)
    targets = sampled.view(work.sequences, -1)
    upstream = (advantages[:, None] / tokens).expand(targets.shape)
    leaves = (states.requires_grad_(), weight.bfloat16().requires_grad_())
    return Batch(*leaves, targets, torch.ones_like(targets), advantages, torch.zeros(targets.shape), upstream)


def errors(result: Result, right: Result) -> dict[str, Any]:
    """Errors of log-probs in nats, of ratios whose other log-prob is exact, and of gradients relative to exact ones."""
    off = result.value.double() - right.value
    return {
        "logprobs": {
            "max": off.abs().max().item(),
            "mean": off.abs().mean().item(),
            "rms": off.square().mean().sqrt().item(),
        },
        "ratio": torch.expm1(off).abs().max().item(),
        "hidden": gradient_errors(result.d_hidden, right.d_hidden),
        "weight": gradient_errors(result.d_weight, right.d_weight),
    }


def gradient_errors(gradient: Tensor | None, right: Tensor | None) -> dict[str, float] | None:
    """Errors of a gradient; `worst_row` is the largest relative error of a row, which is a token for hidden states."""
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


if __name__ == "__main__":
    main()
