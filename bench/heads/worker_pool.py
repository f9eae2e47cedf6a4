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
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
    preparation: float = 0.0
    """Seconds of its preparation, imports and compilation included."""

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
        self.release_all_but(names)
        measurements = dict(self.prepare(work, names, memory=memory))
        self.time(measurements, rounds=rounds, slow=slow)
        return measurements

    def prepare(
        self, work: Work, names: Sequence[str], *, memory: bool = True, at_once: int = 1
    ) -> Iterator[tuple[str, Measurement]]:
        """Errors and bytes of each implementation, in order, as soon as they are known; `at_once` work side by side."""
        for name in names:
            self._ensure(name)

        def prepare_one(name: str) -> tuple[str, Measurement]:
            measurement, start = Measurement(), time.monotonic()
            self._note(measurement, self._ask(name, do="prepare", work=vars(work), memory=memory))
            measurement.preparation = time.monotonic() - start
            return name, measurement

        with ThreadPoolExecutor(at_once) as threads:
            yield from threads.map(prepare_one, names)

    def time(self, measurements: Mapping[str, Measurement], *, rounds: int, slow: Sequence[str] = ()) -> None:
        """Add the seconds of interleaved rounds to what was prepared."""
        names = list(measurements)
        for number in range(rounds):
            for position in range(len(names)):
                name = names[(number + position) % len(names)]
                if measurements[name].absent is None and (number % 3 == 0 or name not in slow):
                    self._note(measurements[name], self._ask(name, do="measure"))

    def release_all_but(self, names: Sequence[str]) -> None:
        """Have the other workers drop their inputs."""
        for name in self._workers.keys() - set(names):
            self._ask(name, do="release")

    def longest(self, work: Work, names: Sequence[str], *, most: int) -> dict[str, dict[str, Any]]:
        """The largest power of two of tokens for which memory suffices, one implementation after the other."""
        answers = {}
        self.close()  # which frees what the others hold
        for name in names:
            self._ensure(name)
            answers[name] = self._ask(name, do="longest", work=vars(work), most=most)
            self._end(name)  # which frees its memory
        return answers

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
