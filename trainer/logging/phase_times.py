"""The timer of a step: how many seconds each of its phases takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fused_grpo.trainer.logging.progress import live, progress

# What a terminal shows meanwhile.
DOING = {"sync": "sending weights to the engine", "generate": "sampling", "reward": "scoring", "train": "learning"}


class Phases:
    """Seconds of each phase of a step: `with phases("generate"): ...`.

    Args:
        first: this is the first step, whose long phases leave a line: it compiles kernels and fills caches.
    """

    def __init__(self, *, first: bool = False) -> None:
        self.seconds: dict[str, float] = {}
        self.first = first

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start, doing = time.perf_counter(), DOING.get(name, name)
        if self.first:
            # On a GPU, the first backward pass waits for the compiler.
            doing = f"first step: {doing}{' (compiles kernels)' * (name == 'train' and torch.cuda.is_available())}"
        shown = progress(doing) if self.first else live(doing)
        try:
            with shown:
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
