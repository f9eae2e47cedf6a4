"""What others published and we measured, to hold the model against.

A published figure is of GEMMs in bf16 of one size, [N, D] by [D, V], with as many bytes beside them as the passes
between them move. "Three products" of Liger-Kernel's pull request 1422 are its backward pass, which multiplies anew;
34.6 ms are its 762.8 TFLOP/s.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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


LARGE, LIGER = (8192, 4096, 151936), "Liger-Kernel, pull request"
# A pass reads logits in fp32, and writes weights in bf16.
PASS = 4 + 2
POINTS = (
    Point("H100 SXM", "three products", "TRL, issue 7244", 42.0, 3, LARGE),
    Point("H100 SXM", "a read of bf16 logits", "TRL, issue 7244", 0.89, 0, LARGE, 2),
    Point("H200", "three products and a pass", f"{LIGER} 1369", 18.8, 3, (4096, 4096, 128256), PASS),
    Point("H200", "three products", f"{LIGER} 1422", 8.59, 3, (2048, 4096, 131072)),
    Point("H200", "three products", f"{LIGER} 1422", 34.6, 3, (8192, 4096, 131072)),
    Point("H200", "three products", f"{LIGER} 1422", 19.1, 3, (8192, 2048, 131072)),
    Point("B200", "three products and a pass", f"{LIGER} 1339", 20.9, 3, (8192, 4096, 152064), PASS),
    Point("B200", "three products and a pass", f"{LIGER} 1339", 4.85, 3, (2048, 4096, 128256), PASS),
    Point("B200", "three products and a pass", f"{LIGER} 1339", 2.52, 3, (1024, 4096, 128256), PASS),
)
# On the machine whose host is the model's.
MEASURED = Path(__file__).resolve().parent.parent / "results" / "nvidia-h200" / "2026-11-27.jsonl"
