"""Worker processes, one for each implementation, measured in interleaved rounds.

A disturbance of the machine then affects all implementations, and an out-of-memory of one ends no other.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fused_grpo.bench.heads.work import Work


@dataclass
class Measurement:
    """The measurement of a work for one implementation. Without seconds there is a reason in `absent`."""

    seconds: list[float] = field(default_factory=list)
    errors: dict[str, float | None] | None = None
    """Errors of the small work against fp64: value, d_hidden, d_weight."""
    memory: dict[str, int | None] | None = None
    """Bytes beside the inputs: forward, backward, reserved."""
    absent: str | None = None
    """The reason why it was not measured: not installed, cannot do the work, out of memory, and others."""
    rejected: bool = False
    """Whether it failed its correctness check."""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def peak(self) -> int | None:
        """Bytes of the larger of the two phases."""
        return None if self.memory is None else max(self.memory["forward"] or 0, self.memory["backward"] or 0)


class WorkerPool:
    """A worker process for each implementation, started on first use and killed after `patience` seconds of silence."""

    def __init__(self, device: str, *, patience: float = 300.0) -> None:
        self.device, self.patience = device, patience
        self._workers: dict[str, subprocess.Popen[str]] = {}

    def measure(
        self, work: Work, names: Sequence[str], *, rounds: int, slow: Sequence[str] = (), memory: bool = True
    ) -> dict[str, Measurement]:
        """Bytes, then seconds of `rounds` interleaved rounds, each of which starts with the next implementation.

        Implementations that are `slow` take part in every third round.
        """
        found = {name: Measurement() for name in names}
        for name in self._workers.keys() - set(names):
            self._ask(name, do="release")
        for name in names:
            self._ensure(name)
        for name in names:
            self._note(found[name], self._ask(name, do="prepare", work=vars(work), memory=memory))
        for number in range(rounds):
            for position in range(len(names)):
                name = names[(number + position) % len(names)]
                if found[name].absent is None and (number % 3 == 0 or name not in slow):
                    self._note(found[name], self._ask(name, do="measure"))
        return found

    def longest(self, work: Work, names: Sequence[str], *, most: int) -> dict[str, dict[str, Any]]:
        """The largest power of two of tokens for which memory suffices, one implementation after the other."""
        found = {}
        self.close()  # which frees what the others hold
        for name in names:
            self._ensure(name)
            found[name] = self._ask(name, do="longest", work=vars(work), most=most)
            self._end(name)  # which frees its memory
        return found

    def close(self) -> None:
        for name in list(self._workers):
            self._end(name)

    def _note(self, measurement: Measurement, answer: dict[str, Any]) -> None:
        measurement.absent = answer.get("absent", answer.get("failed"))
        if "rejected" in answer:
            measurement.rejected, measurement.errors = True, answer["rejected"]
            measurement.absent = f"wrong, and not timed: {answer['rejected']}"
        if "errors" in answer:
            measurement.errors, measurement.memory = answer["errors"], answer["memory"]
        if "seconds" in answer:
            measurement.seconds.append(answer["seconds"])

    def _ask(self, name: str, **order: Any) -> dict[str, Any]:
        worker = self._workers[name]
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            print(json.dumps(order), file=worker.stdin, flush=True)
            # An answer is one line, which is written at once: select() sees all of it or nothing.
            if not select.select([worker.stdout], [], [], self.patience)[0]:
                worker.kill()
                return {"failed": f"took longer than {self.patience:g} s for {order['do']!r}, and was killed"}
            line = worker.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            return {"failed": f"its process ended with status {worker.wait()}"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ensure(self, name: str) -> None:
        """Start the process, unless it is running. A new process has not prepared any work."""
        if name in self._workers and self._workers[name].poll() is not None:
            self._end(name)
        if name not in self._workers:
            self._workers[name] = self._start(name)

    def _command(self, name: str) -> list[str]:
        return [sys.executable, "-m", "fused_grpo.bench.heads.worker", name, self.device]

    def _start(self, name: str) -> subprocess.Popen[str]:
        # Threads of a worker spin for a moment after its run. Sleeping (OMP_WAIT_POLICY=PASSIVE) would make works with
        # many small steps 5 % slower.
        env = {"HF_HUB_OFFLINE": "1", **os.environ}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        return subprocess.Popen(self._command(name), env=env, text=True, **pipes)  # type: ignore[call-overload,no-any-return]

    def _end(self, name: str) -> None:
        worker = self._workers.pop(name)
        assert worker.stdin is not None
        assert worker.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it ended before it read its last order
            worker.stdin.close()
        worker.wait()
        worker.stdout.close()
