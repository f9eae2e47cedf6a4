"""Rewards that fail. Which prompt fails in which step, and how, is drawn from both and from nothing else.

So a run that is killed and resumed meets the same faults again, and so does the undisturbed run that it has to equal.
No import of torch: the isolated one is loaded by a process that should not wait for it.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import time
from collections import Counter
from typing import Any

# Longer than the reward_timeout of the runs, and short enough for the threads that nobody waits for to end.
HANG_SECONDS = 4.0
RAISES, NAN, SHORT, HANGS, KILLED = "raises", "returns NaN", "returns too few values", "hangs", "loses its worker"
REPEATABLE = (RAISES, NAN, SHORT)


class Digits:
    """A reward with faults in it: about one prompt in `1 / rate`, of the kinds given."""

    __name__ = "digits"

    def __init__(self, *, rate: float, kinds: tuple[str, ...], worker: Any = None) -> None:
        self.rate, self.kinds, self.worker = rate, kinds, worker
        self.seen: Counter[str] = Counter()

    def __call__(self, prompts: list[str], completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
        values = [len(set(text)) + 0.1 * len(text) for text in completions]
        for prompt in prompts:
            draw = random.Random(drawn(prompt, trainer_state.global_step))
            if draw.random() < self.rate:
                return self._fail(draw.choice(self.kinds), values)
        return values

    def _fail(self, kind: str, values: list[float]) -> list[float]:
        self.seen[kind] += 1
        match kind:
            case "raises":
                raise RuntimeError("on order")
            case "returns NaN":
                return [math.nan] * len(values)
            case "returns too few values":
                return values[1:]
            case "hangs":
                time.sleep(HANG_SECONDS)
            case "loses its worker" if self.worker._worker is not None:
                self.worker._worker.process.kill()
        return values


def fragile(prompts: list[str], completions: list[str]) -> list[float]:
    """Runs isolated, and takes its process with it on one completion in 200."""
    number = drawn(prompts[0], completions[0])
    if number % 200 == 0:
        os._exit(1)
    return [number % 10 / 10]


def drawn(*what: object) -> int:
    """A number that is the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8], "big")
