"""The GRPO loss, forward and backward, on the CPU in fp32: against the bare GEMMs and against its peers, taking turns.

    pytest bench/test_loss_cpu.py --benchmark-json FILE

The GEMMs are full-size `torch.mm` into memory that is there already: logits, dH and dW, each once. Everyone is checked
against fp64 before anything is timed, and against each other at full size. TRL runs the torch path it has for devices
without Triton: what comes out says nothing of a GPU. The last test counts bytes, not seconds. With
`--benchmark-disable` all of this runs once, at a small size, and nothing is timed.

On a machine with other work the two threads wait for each other: look at `spread` before believing a ratio.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loss_peers
import torch
from loss_peers import Batch, Result, Run
from turns import summary, take_turns

SHAPE = {"sequences": 8, "tokens": 2048, "hidden": 768, "vocab": 50304}
SMALL = {"sequences": 2, "tokens": 32, "hidden": 16, "vocab": 1000}
ROUNDS, WARMUPS = 9, 2
MOST = {"ours/gemms": 1.12}
LEAST = {"trl/ours": 2.3, "liger/ours": 1.4, "full logits/ours": 1.3}
MOST_WITH_HALF_AT_ZERO = {"needed/none at zero": 0.65}
LEAST_BYTES = {"full logits/ours": 10.0}


def test_loss_and_backward(benchmark):
    contenders = {"trl": loss_peers.trl(), "liger": loss_peers.liger()}
    for contender in contenders.values():
        assert contender.run is not None, f"{contender.name} is missing: {contender.missing}"
    runs = {"ours": loss_peers.ours(), **{name: contender.run for name, contender in contenders.items()}}
    for run in (*runs.values(), loss_peers.full_logits):
        loss_peers.check(run, small_batch())
    shape = SMALL if benchmark.disabled else SHAPE
    batch = loss_peers.batch_of(**shape)
    clipped = check_against_full_logits(runs, batch)
    turns = {"gemms": loss_peers.bare_gemms(batch), **on(batch, {**runs, "full logits": loss_peers.full_logits})}
    versions = {name: contender.version for name, contender in contenders.items()}
    settings = {f"{name} setting": contender.setting for name, contender in contenders.items()}
    benchmark.extra_info |= {**shape, "dtype": "float32", "clipped": clipped, "gemms": 3, **versions, **settings}
    check_ratios(timed(benchmark, turns, "ours", [*MOST, *LEAST]), most=MOST, least=LEAST)


def test_sequences_without_an_advantage_cost_next_to_nothing(benchmark):
    """Every second sequence has an advantage of zero, as where all of a group's rewards are the same."""
    runs = {score: loss_peers.ours(score=score) for score in ("needed", "all")}
    loss_peers.check(loss_peers.ours(), small_batch())
    for run in runs.values():
        loss_peers.check(run, loss_peers.every_second_at_zero(small_batch()))
    shape = SMALL if benchmark.disabled else SHAPE
    none_at_zero = loss_peers.batch_of(**shape)
    half = loss_peers.every_second_at_zero(none_at_zero)
    apart = check_that_skipping_changes_nothing(runs, half)
    turns = {"none at zero": functools.partial(loss_peers.ours(), none_at_zero), **on(half, runs)}
    benchmark.extra_info |= {**shape, "dtype": "float32", "at_zero": 0.5, "needed_from_all": apart}
    names = [*MOST_WITH_HALF_AT_ZERO, "all/none at zero"]
    check_ratios(timed(benchmark, turns, "needed", names), most=MOST_WITH_HALF_AT_ZERO)


def test_peak_memory_beside_the_gradients(benchmark):
    """What is held at a time that the caller neither gave nor gets; a narrow D changes little of it."""
    shape = {**SHAPE, "hidden": SMALL["hidden"]} if benchmark.disabled else SHAPE
    runs, extra = {"ours": loss_peers.ours(), "full logits": loss_peers.full_logits}, {}

    def measure() -> None:
        for name, run in runs.items():
            extra[name] = peak_beside_gradients(run, loss_peers.batch_of(**shape))

    benchmark.pedantic(measure, rounds=1)
    ratios = {name: quotient(extra, name) for name in LEAST_BYTES}
    benchmark.extra_info |= {**shape, "dtype": "float32", "peak_bytes_beside_gradients": extra, **ratios}
    benchmark.extra_info["note"] = "the time is that of counting allocations: no measure of speed"
    print("", ratios, extra, sep="\n")
    check_ratios(ratios, least=LEAST_BYTES)


@functools.cache
def small_batch() -> Batch:
    """Several of anyone's tiles, and some padding."""
    return loss_peers.batch_of(sequences=3, tokens=96, hidden=32, vocab=40000, padding=5)


def on(batch: Batch, runs: dict[str, Run]) -> dict[str, Callable[[], Any]]:
    return {name: functools.partial(run, batch) for name, run in runs.items()}


def check_against_full_logits(runs: dict[str, Run], batch: Batch) -> float:
    """The share of tokens that clip: without a gradient, though each has an advantage."""
    theirs = loss_peers.full_logits(batch)
    for name, run in runs.items():
        mine = run(batch)
        assert abs(mine.loss - theirs.loss) <= 1e-5, f"got {mine.loss} by {name}, want {theirs.loss} of full logits"
        for gradient in ("hidden", "weight"):
            apart = loss_peers.apart(getattr(mine, gradient), getattr(theirs, gradient))
            assert apart <= 1e-5, f"got a gradient of {gradient} by {name} that is {apart:.1e} from that of full logits"
    clipped = (theirs.hidden == 0).all(-1).double().mean().item()
    assert 0 < clipped < 0.05, f"got {clipped} of all tokens clipped, want some and not many"
    return clipped


def check_that_skipping_changes_nothing(runs: dict[str, Run], batch: Batch) -> dict[str, float]:
    """How far the gradients of "needed" are from those of "all".

    dH is that of the same rows and products. dW sums over the rows, and chunks and GEMMs group that sum by where rows
    stand, so leaving rows of zeros out moves it by a rounding of fp32: 2.5e-7, as it does the bare product.
    """
    needed, everything = (runs[score](batch) for score in ("needed", "all"))
    torch.testing.assert_close(needed.loss, everything.loss, rtol=1e-6, atol=1e-7)
    at_zero = batch.advantages == 0
    assert not needed.hidden[at_zero].any()
    apart = {name: loss_peers.apart(getattr(needed, name), getattr(everything, name)) for name in ("hidden", "weight")}
    assert apart["hidden"] <= 1e-7, apart
    assert apart["weight"] <= 5e-7, apart
    return apart


def timed(benchmark: Any, contenders: dict[str, Callable[[], Any]], name: str, wanted: list[str]) -> dict[str, float]:
    """The `wanted` ratios of medians, in turns with `name` as the one whose time is the benchmark's own."""
    for contender in list(contenders.values()) * WARMUPS:
        contender()
    if benchmark.disabled:
        benchmark(contenders[name])
        return {}
    seconds = take_turns(benchmark, contenders, timed=name, rounds=ROUNDS)
    figures = summary(seconds)
    ratios = {ratio: quotient(figures["median_seconds"], ratio) for ratio in wanted}
    benchmark.extra_info |= {"omp_num_threads": os.environ.get("OMP_NUM_THREADS"), "threads": torch.get_num_threads()}
    benchmark.extra_info |= {**ratios, **figures, "seconds": seconds}
    print("", ratios, figures, sep="\n")
    return ratios


def quotient(values: dict[str, float], ratio: str) -> float:
    """values["a"] / values["b"] of "a/b"."""
    above, below = ratio.split("/")
    return values[above] / values[below]


def check_ratios(
    ratios: dict[str, float], *, most: dict[str, float] | None = None, least: dict[str, float] | None = None
) -> None:
    """All of them at once, so that one breach does not hide another; none are there where nothing is timed."""
    if not ratios:
        return
    over = {name: bound for name, bound in (most or {}).items() if ratios[name] > bound}
    under = {name: bound for name, bound in (least or {}).items() if ratios[name] < bound}
    assert not over | under, f"got {ratios}, want at most {over}, at least {under}"


def peak_beside_gradients(run: Run, batch: Batch) -> int:
    kept: list[Result] = []
    peak = allocations()(lambda: kept.append(run(batch)))
    return peak - kept[0].hidden.nbytes - kept[0].weight.nbytes


@functools.cache
def allocations() -> Callable[[Callable[[], object]], int]:
    """How the tests count allocations: the most bytes at a time that a call is the maker of."""
    path = Path(__file__).resolve().parent.parent / "tests" / "ops" / "test_memory.py"
    spec = importlib.util.spec_from_file_location("allocations_of_test_memory", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.peak_of_allocations
