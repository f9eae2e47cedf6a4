"""Bytes that an action allocates, counted by the allocator: exact, and equal in every run."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile


class Allocations(NamedTuple):
    """Bytes beside those that were allocated before."""

    peak: int
    """The most bytes at a time."""
    retained: int
    """Bytes that are still allocated afterwards, by the result or elsewhere."""
    result: Any


def allocations_of(action: Callable[[], Any], device: str) -> Allocations:
    """Run it once. A GPU's allocator has statistics; on a CPU the profiler records each allocation."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = action()
        torch.cuda.synchronize()
        return Allocations(torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before, result)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = action()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = list(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    return Allocations(max(held, default=0), held[-1] if held else 0, result)
