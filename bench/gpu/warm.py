"""Compile what other parts launch, so that Triton's and inductor's caches on disk have it. Nothing is measured.

A figure is the seconds of a part or of an implementation. All are side by side, and what they say is dropped.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed

from fused_grpo.bench.gpu.clock import Figure, figure_of
from fused_grpo.bench.gpu.peers import compared
from fused_grpo.bench.gpu.scale import Scale
from fused_grpo.bench.heads.worker_pool import WorkerPool

PARTS = {name: ("timings", name) for name in ("tiles", "forward", "passes")}
# At a tiny size: their imports take longer than their kernels.
TRAINERS = {"trainers": ("training", "phase", "--tiny")}


def warm(scale: Scale) -> Iterator[Figure]:
    yield from side_by_side({name: functools.partial(run_part, scale, *part) for name, part in PARTS.items()})


def warm_peers(scale: Scale) -> Iterator[Figure]:
    jobs = {name: functools.partial(prepare_all, scale, name) for name in scale.peers}
    yield from side_by_side(jobs | {name: functools.partial(run_part, scale, *part) for name, part in TRAINERS.items()})


def side_by_side(jobs: Mapping[str, Callable[[], None]]) -> Iterator[Figure]:
    with ThreadPoolExecutor(len(jobs)) as threads:
        running = {threads.submit(seconds_of, run): name for name, run in jobs.items()}
        for job in as_completed(running):
            yield figure_of(running[job], job.result(), "s", None)


def seconds_of(run: Callable[[], None]) -> float:
    start = time.monotonic()
    run()
    return time.monotonic() - start


def run_part(scale: Scale, module: str, *arguments: str) -> None:
    tiny = ["--tiny"] if scale.device == "cpu" else []
    command = [sys.executable, "-m", f"fused_grpo.bench.gpu.{module}", *arguments, *tiny]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def prepare_all(scale: Scale, name: str) -> None:
    """Every work of the peers once, in a process of its own."""
    pool = WorkerPool(scale.device)
    try:
        for work in compared(scale):
            pool.measure(work, [name], rounds=0, memory=False)
    finally:
        pool.close()
