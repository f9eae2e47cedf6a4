"""Callables of one process that take turns, so that whatever else the machine does, it does to all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch


def take_turns(contenders: Mapping[str, Callable[[], object]], *, rounds: int) -> dict[str, list[float]]:
    """Seconds of every call: `rounds` of each contender, each round starting with the next of them."""
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for position in range(len(names)):
            name = names[(turn + position) % len(names)]
            start = time.perf_counter()
            contenders[name]()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def quotient(seconds: Mapping[str, list[float]], over: str, under: str) -> float:
    """Of the medians of two."""
    return statistics.median(seconds[over]) / statistics.median(seconds[under])
