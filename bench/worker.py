"""One contender in a process of its own, which does what it is told: `python -m fused_grpo.bench.worker NAME DEVICE`.

A line of JSON comes in, a line goes out. So contenders take turns although each has a process, an out-of-memory ends
nobody's run but its own, and what one imports or compiles does nothing to another.

    {"do": "prepare", "work": {...}}  -> {"absent": why} | {"rejected": errors} | {"errors": ...}
    {"do": "turn"}                    -> {"seconds": s}, between device events where there is a device
    {"do": "release"}                 -> {}, with nothing held any more
    {"do": "memory"}                  -> {"forward": bytes, "backward": bytes, "reserved": bytes | null}
    {"do": "longest", "work": {...}, "most": n}  -> {"tokens": n}, before memory runs out
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
from typing import Any

import torch

from fused_grpo.bench.contenders import Contender
from fused_grpo.bench.gate import errors_of
from fused_grpo.bench.memory import allocations_of
from fused_grpo.bench.peers import named
from fused_grpo.bench.work import Batch, Work, batch_of


class Worker:
    """A contender, and the work that it has been given."""

    def __init__(self, contender: Contender, device: str) -> None:
        self.contender, self.device = contender, device
        self.work: Work | None = None
        self.batch: Batch | None = None

    def prepare(self, work: dict[str, Any]) -> dict[str, Any]:
        """Make the inputs, unless the contender cannot do it or does it wrong; and run it once."""
        self.work, self.batch = Work(**work), None
        self.rest()
        reason = self.contender.why_not(self.work, self.device)
        if reason is not None:
            return {"absent": reason}
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # past a few shapes torch.compile gives up, and runs what it was given
        errors = None if self.contender.floor else errors_of(self.contender, self.work, self.device)
        if errors is not None and errors.too_large(self.work):
            return {"rejected": errors._asdict()}
        self.batch = batch_of(self.work, self.device)
        self.run()
        self.rest()
        return {"errors": None if errors is None else errors._asdict()}

    def release(self) -> dict[str, Any]:
        """Hold nothing while others work."""
        self.batch = None
        self.rest()
        return {}

    def rest(self) -> None:
        """Leave the device's memory to the others; a turn fills its caches again before it is timed."""
        gc.collect()
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def run(self) -> None:
        assert self.work is not None
        assert self.batch is not None
        self.contender.run(self.batch, self.work)

    def turn(self) -> dict[str, float]:
        """Seconds of one run."""
        if self.device != "cuda":
            start = time.perf_counter()
            self.run()
            return {"seconds": time.perf_counter() - start}
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.run()  # the clocks and the caches of somebody else's turn
        torch.cuda.synchronize()
        start_event.record()
        self.run()
        end_event.record()
        torch.cuda.synchronize()
        seconds = start_event.elapsed_time(end_event) / 1e3
        self.rest()
        return {"seconds": seconds}

    def memory(self) -> dict[str, int | None]:
        """The most bytes at a time that each phase adds to the inputs, the gradients among them."""
        assert self.work is not None
        assert self.batch is not None
        batch, work = self.batch, self.work
        batch.hidden.grad = batch.weight.grad = None
        before = allocations_of(lambda: self.contender.forward(batch, work), self.device)
        after = allocations_of(lambda: self.contender.backward(before.result, batch, work), self.device)
        batch.hidden.grad = batch.weight.grad = None
        reserved = torch.cuda.max_memory_reserved() if self.device == "cuda" else None
        return {"forward": before.peak, "backward": before.left + after.peak, "reserved": reserved}

    def longest(self, work: dict[str, Any], most: int) -> dict[str, Any]:
        """The largest power of two of tokens that fits, up to `most`."""
        asked, fits = Work(**work), 0
        reason = self.contender.why_not(asked, self.device)
        if reason is not None:
            return {"absent": reason}
        while asked.tokens <= most:
            try:
                self.contender.run(batch_of(asked, self.device), asked)
            except (torch.OutOfMemoryError, MemoryError):
                break
            finally:
                gc.collect()
            fits, asked = asked.tokens, Work(**{**work, "tokens": 2 * asked.tokens})
        return {"tokens": fits}


def main(name: str, device: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what peers print is no answer
    worker = Worker(named(name), device)
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
