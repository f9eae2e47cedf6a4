"""Log-probs, forward and backward, on the CPU in fp32: against the bare GEMMs and against TRL's op, taking turns.

    pytest bench/test_logprobs_cpu.py --benchmark-json FILE

The GEMMs are full-size `torch.mm` into memory that is there already: what the plan cannot do without, and nothing
between them. Ours and TRL are checked against fp64 before anything is timed, and against each other at full size. TRL
runs the torch path it has for devices without Triton: what comes out says nothing of a GPU. With `--benchmark-disable`
all of this runs once, at a small size, and nothing is timed.

On a machine with other work the two threads wait for each other: look at `spread` before believing a ratio.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import peers
import pytest
import torch
from torch import Tensor
from turns import summary, take_turns

SHAPE = {"sequences": 8, "tokens": 2048, "hidden": 768, "vocab": 50304}
SMALL = {"sequences": 2, "tokens": 32, "hidden": 16, "vocab": 1000}
ROUNDS, WARMUPS = 9, 2
MOST_OVER_GEMMS, LEAST_OVER_TRL = 1.15, 1.8


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
def test_logprobs_and_backward(benchmark, frozen):
    trl = peers.trl()
    assert trl.run is not None, f"TRL is missing: {trl.missing}"
    runs = {"ours": peers.ours, "trl": trl.run}
    for run in runs.values():
        peers.check(run, frozen=frozen)
    shape = SMALL if benchmark.disabled else SHAPE
    inputs = problem(**shape, frozen=frozen)
    check_at_full_size(runs, inputs)
    contenders = {"gemms": bare_gemms(*inputs[:2])}
    contenders |= {name: (lambda run=run: run(*inputs)) for name, run in runs.items()}
    for contender in list(contenders.values()) * WARMUPS:
        contender()
    if benchmark.disabled:
        benchmark(contenders["ours"])
        return
    seconds = take_turns(benchmark, contenders, timed="ours", rounds=ROUNDS)
    figures = summary(seconds)
    median = figures["median_seconds"]
    ratios = {"ours/gemms": median["ours"] / median["gemms"], "trl/ours": median["trl"] / median["ours"]}
    benchmark.extra_info |= {**shape, "dtype": "float32", "gemms": 2 if frozen else 4, "trl": trl.version}
    benchmark.extra_info |= {"omp_num_threads": os.environ.get("OMP_NUM_THREADS"), "threads": torch.get_num_threads()}
    benchmark.extra_info |= {**ratios, **figures, "seconds": seconds}
    print("", ratios, figures, sep="\n")
    assert ratios["ours/gemms"] <= MOST_OVER_GEMMS, f"got {ratios}, want ours/gemms <= {MOST_OVER_GEMMS}: {figures}"
    assert ratios["trl/ours"] >= LEAST_OVER_TRL, f"got {ratios}, want trl/ours >= {LEAST_OVER_TRL}: {figures}"


def problem(sequences: int, tokens: int, hidden: int, vocab: int, *, frozen: bool) -> tuple[Tensor, ...]:
    """hidden [B, T, D], weight [V, D], targets [B, T], upstream [B, T]; logits have a standard deviation of 2.5."""
    generator, length = torch.Generator().manual_seed(0), tokens // sequences
    weight = torch.randn(vocab, hidden, generator=generator).mul_(2.5 / hidden**0.5)
    return (
        torch.randn(sequences, length, hidden, generator=generator),
        weight.requires_grad_(not frozen),
        torch.randint(0, vocab, (sequences, length), generator=generator),
        (torch.randn(sequences, 1, generator=generator) / tokens).expand(sequences, length),
    )


def bare_gemms(hidden: Tensor, weight: Tensor) -> Callable[[], None]:
    """Frozen: logits, dH. Trainable: logits, and in the backward pass logits again, dH, dW."""
    rows, frozen, weight = hidden.flatten(0, 1), not weight.requires_grad, weight.detach()
    logits, d_hidden, d_weight = (
        rows.new_empty(len(rows), len(weight)),
        torch.empty_like(rows),
        torch.empty_like(weight),
    )

    def run() -> None:
        for _ in range(1 if frozen else 2):
            torch.mm(rows, weight.t(), out=logits)
        torch.mm(logits, weight, out=d_hidden)
        if not frozen:
            torch.mm(logits.t(), rows, out=d_weight)

    return run


def check_at_full_size(runs: dict[str, peers.Run], inputs: tuple[Tensor, ...]) -> None:
    one, other = (run(*inputs) for run in runs.values())
    for mine, theirs in zip(one, other, strict=True):
        if mine is None or theirs is None:
            assert mine is theirs
            continue
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4 * theirs.abs().max().item())
