"""Figures that others published, and that we measured, beside what the model says: how far it can be trusted.

Each is of GEMMs in bf16 of one size, [N, D] by [D, V], with as many bytes beside them as the passes between them move.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """A time in ms of so many GEMMs of one size, and of passes over its logits."""

    machine: str
    what: str
    source: str
    ms: float
    gemms: int
    size: tuple[int, int, int]
    """(N, D, V)"""
    bytes_per_logit: int = 0

    def predicted(self, flops: float, bytes_per_s: float) -> float:
        """In ms, at these rates."""
        N, D, V = self.size
        return 1e3 * (2 * self.gemms * N * D * V / flops + self.bytes_per_logit * N * V / bytes_per_s)


LARGE, OURS = (8192, 4096, 151936), "bench/results/nvidia-h200/2026-11-27.jsonl"
# A pass reads logits in fp32, and writes weights in bf16.
PASS = 4 + 2
POINTS = (
    Point("H100 SXM", "three products", "TRL, pull request 7244", 42.0, 3, LARGE),
    Point("H200", "three products and a pass", "Liger, pull request 1369", 18.8, 3, (4096, 4096, 128256), PASS),
    Point("B200", "three products and a pass", "Liger, pull request 1339", 20.9, 3, (8192, 4096, 152064), PASS),
    Point("H200", "three products", OURS, 43.9, 3, LARGE),
    Point("H200", "two products", OURS, 27.5, 2, LARGE),
    Point("H200", "one product", OURS, 13.1, 1, LARGE),
    Point("H200", "three products", OURS, 10.0, 3, (8192, 1024, 151936)),
)
