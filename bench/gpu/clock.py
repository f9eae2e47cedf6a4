"""Durations on a device, and figures: a number beside its predicted value.

A duration is the median between two device events, after warm-up runs. Inputs are random and larger than the caches.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from fused_grpo.bench.predictions import predicted

# Rounds are repeated for so many seconds, within bounds.
SECONDS, FEWEST, MOST = 0.4, 5, 30

# A millisecond of a GPU.
_LAUNCHING_CYCLES = 2_000_000


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One result, printed as a line of JSON."""

    figure: str
    value: float | None
    """None where nothing was measured; `note` has the reason."""
    unit: str
    predicted: float | None = None
    shape: dict[str, Any] = field(default_factory=dict)
    note: str | None = None
    promised: str | None = None
    """A bound of the value, as "<= 1.15"."""
    rounds: tuple[float, ...] = ()
    """The value of each interleaved round; empty where there were none."""

    def line(self) -> str:
        ratio = self.value / self.predicted if self.value is not None and self.predicted else None
        return json.dumps({**asdict(self), "ratio": ratio})


def figure_of(name: str, value: float | None, unit: str, expected: float | None, **shape: Any) -> Figure:
    shape = {key: x for key, x in shape.items() if x is not None}
    return Figure(figure=name, value=value, unit=unit, predicted=expected, shape=shape)


@dataclass(frozen=True)
class Clock:
    """A clock for "cuda", or for "cpu" in a trial run."""

    device: str
    queued: bool = False
    """Keep the GPU busy until the action is launched, which must not wait for it. Otherwise the time of a short action
    is that of Python."""

    def seconds(self, action: Callable[[], object], *, prepare: Callable[[], object] = lambda: None) -> float:
        """The median of several rounds; `prepare` runs before each round and is not counted."""
        runs: list[float] = []
        while len(runs) < 2 or len(runs) < 2 + self._rounds(runs[1]):
            prepare()
            runs.append(self._once(action))
        return statistics.median(runs[2:])

    def _rounds(self, seconds: float) -> int:
        """The number of counted rounds for runs of so many seconds."""
        return max(FEWEST, min(MOST, int(SECONDS / max(seconds, 1e-9)))) if self.device == "cuda" else 1

    def _once(self, action: Callable[[], object]) -> float:
        if self.device != "cuda":
            start = time.perf_counter()
            action()
            return time.perf_counter() - start
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        if self.queued:
            torch.cuda._sleep(_LAUNCHING_CYCLES)
        first.record()
        action()
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last)) / 1e3


@dataclass(frozen=True)
class Roofline:
    """The assumed rates of a machine; without rates nothing is predicted."""

    flops: float | None = None
    bytes_per_s: float | None = None
    triton_gemm: float = 1.0
    """The share of the vendor's FLOP/s that a GEMM in Triton reaches."""

    @classmethod
    def of(cls, device_name: str) -> Roofline:
        """The rates of the device with this name in torch."""
        machine, content = predicted.machine_of(device_name), predicted.content()
        if machine is None:
            return cls()
        rates = content["machines"][machine]
        return cls(rates["flops"], rates["bytes_per_s"], content["triton_gemm"])

    def seconds(self, *, flop: float = 0.0, moved: float = 0.0) -> float | None:
        """The longer of the times for so many operations and so many bytes."""
        if self.flops is None or self.bytes_per_s is None:
            return None
        return max(flop / self.flops, moved / self.bytes_per_s)


def scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def over(amount: float, seconds: float | None) -> float | None:
    """A rate."""
    return None if seconds is None else amount / seconds
