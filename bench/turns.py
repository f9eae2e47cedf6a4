"""Benchmarks whose contenders take turns, so that whatever else the machine does, it does to all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

Contenders = dict[str, Callable[[], object]]


def take_turns(benchmark: Any, contenders: Contenders, *, timed: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of every call: `rounds` of each contender, each round starting with the next of them.

    `timed` is timed by the `benchmark` fixture of pytest-benchmark; the others run in what it takes for its setup.
    """
    names, seconds = list(contenders), {name: [] for name in contenders if name != timed}
    turns = iter([names[(k + i) % len(names)] for k in range(rounds) for i in range(len(names))])

    def others() -> None:
        for name in turns:
            if name == timed:
                return
            start = time.perf_counter()
            contenders[name]()
            seconds[name].append(time.perf_counter() - start)

    benchmark.pedantic(contenders[timed], setup=others, rounds=rounds)
    others()
    return {timed: list(benchmark.stats.stats.data), **seconds}


def summary(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Median of each, and its spread: (slowest - fastest) / median."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    spreads = {name: (max(values) - min(values)) / medians[name] for name, values in seconds.items()}
    return {"median_seconds": medians, "spread": spreads}
