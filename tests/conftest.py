"""Before anything imports Triton or a model library: interpret kernels, and never go to the network."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# A machine that is busy makes no test fail.
hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")

# Triton decides when a kernel is decorated whether it is interpreted, so this comes before that import.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Whole files go to workers, in this order: a long one that began last would leave the other worker idle.
LONGEST_FIRST = ("test_compile.py", "test_planted_bugs.py", "test_demo.py", "test_examples.py", "test_vllm_server.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


class Process:
    """A script that the farm has started; a small `subprocess.Popen`."""

    def __init__(self, farm: Farm, pid: int, output: Path) -> None:
        self._farm, self.pid, self._output = farm, pid, output
        self._handle = os.pidfd_open(pid)
        self.returncode: int | None = None

    def wait(self, timeout: float = 120.0) -> int:
        """Its exit status, or minus the signal that ended it; TimeoutError, with its output, where it goes on."""
        if self.returncode is None:
            if not select.select([self._handle], [], [], timeout)[0]:
                raise TimeoutError(f"process {self.pid} goes on after {timeout} s:\n{self.output}")
            self.returncode = self._farm.ask(reap=self.pid)["returncode"]
            os.close(self._handle)
        return self.returncode

    def poll(self) -> int | None:
        """`wait` without waiting: None while it goes on."""
        with contextlib.suppress(TimeoutError):
            self.wait(timeout=0)
        return self.returncode

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal, to this process alone; nothing where it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    @property
    def output(self) -> str:
        """What it has printed, to either stream."""
        # It opens the file itself, a moment after it was started.
        return self._output.read_text(errors="replace") if self._output.exists() else ""


class Farm:
    """Starts scripts in processes that have imported torch, transformers and the trainer already. See farm.py."""

    def __init__(self, folder: Path) -> None:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        # The same hash of a string in all of them; no GPU.
        env = {**os.environ, **threads, "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": ""}
        self._folder, self._processes = folder, list[Process]()
        worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        # Below those that the kernel hands out; a range for each worker, in an order that no other session has.
        first = 10_000 + worker % 20 * 1000
        self._ports = iter(random.Random().sample(range(first, first + 1000), 1000))
        self._server = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(Path(__file__).with_name("farm.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        assert self._read()["ready"]

    def start(self, script: str | Path, *arguments: Any, env: dict[str, str] | None = None) -> Process:
        """`python script *arguments`, with a process group of its own."""
        output = self._folder / f"{len(self._processes)}.txt"
        command = [str(part) for part in (script, *arguments)]
        pid = self.ask(start=command, env=env or {}, output=str(output))["pid"]
        self._processes.append(Process(self, pid, output))
        return self._processes[-1]

    def start_ranks(
        self, script: str | Path, *arguments: Any, processes: int = 2, env: dict[str, str] | None = None
    ) -> list[Process]:
        """As torchrun does: the same script in several processes that find each other."""
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._free_port()), "WORLD_SIZE": str(processes)}
        return [
            self.start(script, *arguments, env={**group, "RANK": str(rank), "LOCAL_RANK": str(rank), **(env or {})})
            for rank in range(processes)
        ]

    def run(
        self, script: str | Path, *arguments: Any, processes: int = 1, timeout: float = 120.0, **options: Any
    ) -> str:
        """The output of a script that has to end well; of its first process, where there are several."""
        if processes > 1:
            started = self.start_ranks(script, *arguments, processes=processes, **options)
        else:
            started = [self.start(script, *arguments, **options)]
        for process in started:
            assert process.wait(timeout) == 0, process.output
        return started[0].output

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End everything that still runs."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        self._server.kill()
        self._server.communicate()

    def _free_port(self) -> int:
        """Not one that the kernel hands out, to any process between now and the rank that takes it."""
        for port in self._ports:
            with socket.socket() as free, contextlib.suppress(OSError):
                free.bind(("127.0.0.1", port))
                return port
        raise OSError("every port of this worker is taken")

    def _read(self) -> dict[str, Any]:
        assert self._server.stdout is not None
        answer: dict[str, Any] = json.loads(self._server.stdout.readline())
        return answer


@pytest.fixture(scope="session")
def farm(tmp_path_factory) -> Iterator[Farm]:
    """Processes in a fraction of a second each."""
    farm = Farm(tmp_path_factory.mktemp("farm"))
    yield farm
    farm.close()
