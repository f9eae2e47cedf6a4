"""Times of callables of one process in interleaved rounds, so that a disturbance of the machine affects all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

K = TypeVar("K")
"""The name of an action."""


def interleaved_seconds(actions: Mapping[K, Callable[[], object]], *, rounds: int) -> dict[K, list[float]]:
    """Seconds of every call: `rounds` of each action; each round starts with the next action."""
    names = list(actions)
    seconds: dict[K, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for position in range(len(names)):
            name = names[(number + position) % len(names)]
            start = time.perf_counter()
            actions[name]()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def quotient(seconds: Mapping[K, list[float]], over: K, under: K) -> float:
    """The quotient of the medians of two actions."""
    return statistics.median(seconds[over]) / statistics.median(seconds[under])
