"""Compile what the other parts launch, so that Triton's and inductor's caches on disk have it. Nothing is measured."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed

from fused_grpo.bench.gpu.clock import Figure, figure_of
from fused_grpo.bench.gpu.peers import compared
from fused_grpo.bench.gpu.scale import Scale
from fused_grpo.bench.heads.worker_pool import WorkerPool

# The trainers at a tiny size: their imports take longer than their kernels.
PARTS = {
    "tiles": ("timings", "tiles"),
    "forward": ("timings", "forward"),
    "passes": ("timings", "passes"),
    "trainers": ("training", "phase", "--tiny"),
}


def warm(scale: Scale) -> Iterator[Figure]:
    """The seconds of each part and of each implementation, all side by side; what they say is dropped."""
    with ThreadPoolExecutor(len(PARTS) + len(scale.peers)) as threads:
        jobs = {threads.submit(seconds_of, run_part, part, scale): part for part in PARTS}
        jobs |= {threads.submit(seconds_of, prepare_all, name, scale): name for name in scale.peers}
        for job in as_completed(jobs):
            yield figure_of(jobs[job], job.result(), "s", None)


def seconds_of(run: Callable[[str, Scale], None], name: str, scale: Scale) -> float:
    start = time.monotonic()
    run(name, scale)
    return time.monotonic() - start


def run_part(part: str, scale: Scale) -> None:
    module, *arguments = PARTS[part]
    tiny = ["--tiny"] if scale.device == "cpu" else []
    command = [sys.executable, "-m", f"fused_grpo.bench.gpu.{module}", *arguments, *tiny]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def prepare_all(name: str, scale: Scale) -> None:
    """Every work of the peers once, in a process of its own."""
    pool = WorkerPool(scale.device)
    try:
        for work in compared(scale):
            pool.measure(work, [name], rounds=0, memory=False)
    finally:
        pool.close()
