"""The worker process of one implementation: `python -m fused_grpo.bench.heads.worker NAME DEVICE`.

It reads an order as a line of JSON and writes its answer as a line. A process for each implementation lets rounds be
interleaved, while an out-of-memory, imports and compilation of one have no effect on another.

    {"do": "prepare", "work": {...}, "memory": true}
        -> {"absent": why} | {"rejected": errors} | {"errors": ..., "memory": bytes of each phase | null}
    {"do": "measure"}                 -> {"seconds": s}, on a device the median of as many runs as take `SECONDS`
    {"do": "release"}                 -> {}, after which no inputs are held
    {"do": "longest", "work": {...}, "most": n}  -> {"tokens": n}, before memory runs out
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import statistics
import sys
import time
from typing import Any

import torch

from fused_grpo.bench.heads.correctness import Errors, errors_of
from fused_grpo.bench.heads.implementations import Implementation
from fused_grpo.bench.heads.peers import named
from fused_grpo.bench.heads.work import Batch, Work, batch_of
from fused_grpo.bench.memory import allocations_of

# A short run on a device is repeated for so many seconds, and at most so often.
SECONDS, MOST = 0.05, 20


class Worker:
    """An implementation and its current work."""

    def __init__(self, implementation: Implementation, device: str) -> None:
        self.implementation, self.device = implementation, device
        self.work: Work | None = None
        self.batch: Batch | None = None
        self._errors: dict[Work, Errors] = {}

    def prepare(self, work: dict[str, Any], *, memory: bool) -> dict[str, Any]:
        """Make the inputs and run once, unless the implementation cannot do the work or fails its check.

        On a CPU the first run warms up although its bytes are counted; on a GPU it would count workspaces, too. The
        bytes of a lower bound are not counted: it has its own way to hold results.
        """
        memory = memory and not self.implementation.floor
        self.work, self.batch = Work(**work), None
        self.free_memory()
        reason = self.implementation.why_not(self.work, self.device)
        if reason is not None:
            return {"absent": reason}
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # after a few shapes torch.compile stops compiling and runs the eager code
        errors = None if self.implementation.floor else self.errors(self.work)
        if errors is not None and errors.too_large(self.work):
            return {"rejected": errors._asdict()}
        self.batch = batch_of(self.work, self.device)
        if self.device == "cuda" or not memory:
            self.run()
        counted = self.memory() if memory else None
        self.free_memory()
        return {"errors": None if errors is None else errors._asdict(), "memory": counted}

    def errors(self, work: Work) -> Errors:
        """Errors on the small work, which several works share."""
        if work.small() not in self._errors:
            self._errors[work.small()] = errors_of(self.implementation, work, self.device)
        return self._errors[work.small()]

    def release(self) -> dict[str, Any]:
        """Drop the inputs while others are measured."""
        self.batch = None
        self.free_memory()
        return {}

    def free_memory(self) -> None:
        """Give the device's memory back; `measure` fills the allocator's cache again before it measures."""
        gc.collect()
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def run(self) -> None:
        assert self.work is not None
        assert self.batch is not None
        self.implementation.run(self.batch, self.work)

    def measure(self) -> dict[str, float]:
        """Seconds of a run."""
        if self.device != "cuda":
            start = time.perf_counter()
            self.run()
            return {"seconds": time.perf_counter() - start}
        self.run()  # warms clocks and caches after the run of another implementation
        seconds = [self.timed()]
        for _ in range(min(MOST, int(SECONDS / seconds[0]))):
            seconds.append(self.timed())
        self.free_memory()
        return {"seconds": statistics.median(seconds)}

    def timed(self) -> float:
        """Seconds of one run between device events."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        self.run()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def memory(self) -> dict[str, int | None]:
        """The most bytes at a time that each phase adds to the inputs, gradients included."""
        assert self.work is not None
        assert self.batch is not None
        batch, work = self.batch, self.work
        batch.hidden.grad = batch.weight.grad = None
        before = allocations_of(lambda: self.implementation.forward(batch, work), self.device)
        after = allocations_of(lambda: self.implementation.backward(before.result, batch, work), self.device)
        batch.hidden.grad = batch.weight.grad = None
        reserved = torch.cuda.max_memory_reserved() if self.device == "cuda" else None
        return {"forward": before.peak, "backward": before.retained + after.peak, "reserved": reserved}

    def longest(self, work: dict[str, Any], most: int) -> dict[str, Any]:
        """The largest power of two of tokens that fits, up to `most`."""
        asked, fits, self.batch = Work(**work), 0, None
        reason = self.implementation.why_not(asked, self.device)
        if reason is not None:
            return {"absent": reason}
        while asked.tokens <= most:
            try:
                self.implementation.run(batch_of(asked, self.device), asked)
            except (torch.OutOfMemoryError, MemoryError):
                break
            finally:
                gc.collect()
            fits, asked = asked.tokens, Work(**{**work, "tokens": 2 * asked.tokens})
        return {"tokens": fits}


def main(name: str, device: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of peers must not mix with answers
    worker = Worker(named(name), device)
    gc.collect()
    gc.freeze()  # each round collects garbage, and need not look at what the imports made
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = getattr(worker, order.pop("do"))(**order)
        except Exception as error:
            worker.batch = None
            answer = {"failed": f"{type(error).__name__}: {error}"[:500]}
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
