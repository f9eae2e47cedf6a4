"""What outputs beside log-probs, squared gradients and score centering cost: `python -m fused_grpo.bench.outputs`.

GPT-2's head and 2,048 tokens in fp32: log-probs with and without all `outputs=`, and the loss with and without
`squared_gradients=` and score centering of 128 tokens, in interleaved rounds. It writes
bench/results/<machine>/outputs-cost-<date>.json and prints the ratio of the medians, and the quartiles of the
rounds' ratios.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch

from fused_grpo import GRPOLossConfig, fused_linear_grpo_loss, linear_logprobs
from fused_grpo.bench.interleaved import interleaved_seconds, quotient
from fused_grpo.bench.raw_file import raw_file, write
from fused_grpo.logprobs import OUTPUTS

N, D, V, K = 2048, 768, 50304, 128


def calls() -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """By name: the call without, and with."""
    hidden, weight = torch.randn(N, D, requires_grad=True), (0.02 * torch.randn(V, D)).requires_grad_()
    targets, out = torch.randint(V, (N,)), torch.empty(N)
    loss: dict[str, Any] = {"advantages": torch.randn(8), "cu_seqlens": torch.arange(0, N + 1, N // 8)}

    sampler = (hidden.detach() @ weight.detach().t()).log_softmax(1)
    loss["sampling_logprobs"] = sampler.gather(1, targets[:, None])[:, 0]
    top = sampler.topk(K)
    centred = {"config": GRPOLossConfig(score_centering="topk"), "sampling_topk_ids": top.indices.clone()}
    centred["sampling_topk_logprobs"] = top.values.clone()
    del sampler

    def trained(logprobs: torch.Tensor) -> None:
        torch.autograd.grad(logprobs.sum(), (hidden, weight))

    def measured(**options: Any) -> None:
        with torch.no_grad():
            linear_logprobs(hidden, weight, targets, **options)

    def learned(**options: Any) -> None:
        torch.autograd.grad(fused_linear_grpo_loss(hidden, weight, targets, **loss, **options).loss, (hidden, weight))

    return {
        "trainable log-probs, all outputs": (
            lambda: trained(linear_logprobs(hidden, weight, targets)),
            lambda: trained(linear_logprobs(hidden, weight, targets, outputs=OUTPUTS).logprobs),
        ),
        "log-probs without a gradient, all outputs": (measured, lambda: measured(outputs=OUTPUTS)),
        "loss, squared gradients": (learned, lambda: learned(squared_gradients=out)),
        "loss, score centering with K = 128": (learned, lambda: learned(**centred)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=48, help="GEMMs differ by 2 %% from call to call")
    rounds = parser.parse_args().rounds
    if rounds < 2:
        parser.error(f"got --rounds {rounds}, want 2 or more, which have quartiles")
    path, entries = raw_file("outputs-cost", f"python -m fused_grpo.bench.outputs --rounds {rounds}")
    torch.manual_seed(0)
    pairs = calls()
    for pair in pairs.values():  # warm up
        for call in pair:
            call()
    seconds = {
        name: interleaved_seconds(dict(zip(("without", "with"), pair, strict=True)), rounds=rounds)
        for name, pair in pairs.items()
    }
    write(path, entries | {"shape": {"N": N, "D": D, "V": V}, "seconds": seconds})
    print(path)
    for name, runs in seconds.items():
        ratios = [b / a for a, b in zip(runs["without"], runs["with"], strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        print(f"{name}: medians {quotient(runs, 'with', 'without'):.4f}, of rounds {median:.4f} ({low:.4f}-{high:.4f})")


if __name__ == "__main__":
    main()
