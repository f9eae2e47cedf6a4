"""Before anything imports Triton or a model library: interpret kernels, and never go to the network.

Cases marked `full` run with `--full` alone (`make test-full`): the rest of a grid whose corners always run. Of a large
grid in a module marked `grid`, a quarter runs without it, the same quarter every time.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib.util
import json
import os
import random
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# A machine that is busy makes no test fail.
hypothesis.settings.register_profile("unhurried", deadline=None)
# Of a planted bug it is enough that it is found: the smallest example takes twenty seconds.
PHASES = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
hypothesis.settings.register_profile("found", deadline=None, phases=PHASES, report_multiple_bugs=False)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "unhurried"))

# tests/imported: where the ops run, unless it is where the tests make their tensors.
DEVICE = os.environ.get("FUSED_GRPO_TEST_DEVICE", "")
# Triton decides when a kernel is decorated whether it is interpreted, so this comes before that import.
if DEVICE == "cuda":
    os.environ.pop("TRITON_INTERPRET", None)
    # Read at the first GEMM of a process. Without it, torch takes no GEMM of a GPU for deterministic.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
else:
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Of fork_server.py, each with the one before, whose imports it has, too.
STAGES = {"torch": "", "libraries": "torch", "trainer": "libraries", "vllm": "trainer", "collected": "trainer"}

# Whole files go to workers, in this order: a long one that began last would leave the other worker idle.
LONGEST_FIRST = (
    "test_compile.py",
    "test_emulated_kernels.py",
    "test_gpu_first.py",
    "test_planted_bugs.py",
    "test_real_model.py",
    "test_demo.py",
)
LONGEST_FIRST += ("test_examples.py",)
# These to the same worker, which then imports vLLM and starts a server once.
ENGINES = ("test_vllm_server.py", "test_contract.py", "test_vllm_process.py", "test_weight_sync.py")
ENGINES += ("test_adapters.py", "faults/test_engines.py", "test_vllm_sizes.py", "test_vllm_models.py")
ENGINES += ("test_gsm8k.py",)
# A function of so many cases, in a module marked `grid`, is a large one.
LARGE, A_QUARTER = 8, 4


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="the cases marked `full` too: exhaustive grids")
    parser.addoption("--seeds", type=int, default=1, help="seeds of each test of learning: scripts/learning_chances.py")


def pytest_configure(config: pytest.Config) -> None:
    # A million objects are imported; looking through all of them takes 5 to 8 % of the trainer's tests.
    gc.set_threshold(20_000, 20, 50)
    if DEVICE:
        import device_run

        config.pluginmanager.register(device_run)
    if DEVICE != "cuda":
        import bf16_interpreter
        import quick_interpreter
        import quick_torch
        import quick_vllm

        quick_torch.make_quick()
        quick_interpreter.make_quick()
        quick_vllm.make_quick()
        bf16_interpreter.mend_bf16()
    # Of the session, not of one of its workers; a test that runs pytest itself has one of its own.
    if "FORK_SERVER" not in os.environ:
        os.environ["FORK_SERVER"] = f"{tempfile.mkdtemp(prefix='fork-server-')}:{os.getpid()}"


def pytest_collection_finish() -> None:
    import quick_accelerate

    quick_accelerate.make_quick()
    gc.freeze()  # and where a test collects garbage, none of them is looked through


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Nor what a file has imported: once vLLM is there, a collection takes a second, and some tests make several."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    folder, _, session = os.environ.get("FORK_SERVER", "").partition(":")
    if session == str(os.getpid()):
        shutil.rmtree(folder, ignore_errors=True)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "learning_seed" in metafunc.fixturenames:
        metafunc.parametrize("learning_seed", range(metafunc.config.getoption("--seeds")))


@pytest.fixture
def learned(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Demand that a run has learned at least so much. scripts/learning_chances.py reads what is recorded."""

    def learned(what: str, *, measured: float, least: float) -> None:
        record_property("learned", json.dumps({"what": what, "found": measured, "least": least}))
        assert measured >= least, what

    return learned


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any, float], None]]:
    """Give an isolated function another time limit; a process has the one that it was started with."""
    changed = []

    def limit(isolated: Any, seconds: float) -> None:
        monkeypatch.setattr(isolated, "timeout", seconds)
        isolated._end_worker()
        changed.append(isolated)

    yield limit
    for isolated in changed:
        isolated._end_worker()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("full"):
        cases = Counter(function_of(item) for item in items if not item.get_closest_marker("full"))
        left_out = [item for item in items if is_left_out(item, cases)]
        items[:] = [item for item in items if not is_left_out(item, cases)]
        config.hook.pytest_deselected(items=left_out)
    skip_what_cannot_run(items)
    order = {name: place for place, name in enumerate(LONGEST_FIRST + ENGINES)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def function_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def is_left_out(item: pytest.Item, cases: Counter[str]) -> bool:
    """Without `--full`. Which quarter of a grid is drawn by name: counting would take the same option every time."""
    is_one_of_many = item.get_closest_marker("grid") and cases[function_of(item)] > LARGE
    return bool(item.get_closest_marker("full") or (is_one_of_many and zlib.crc32(item.nodeid.encode()) % A_QUARTER))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class WholeFiles(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "engines" if nodeid.partition("::")[0].endswith(ENGINES) else super()._split_scope(nodeid)

    return WholeFiles(config, log)


def skip_what_cannot_run(items: list[pytest.Item]) -> None:
    from fused_grpo.passes.choice import why_not_interpreted

    reasons = {"engine": None if importlib.util.find_spec("vllm") else "vLLM is not installed"}
    if DEVICE != "cuda":
        reasons["kernels"] = (obstacle := why_not_interpreted()) and f"Triton: {obstacle}"
    for item in items:
        if DEVICE and (mark := item.get_closest_marker("cpu_only")):
            item.add_marker(pytest.mark.skip(reason=f"CPU only: {mark.kwargs['reason']}"))
        for name in ("gpu",) if DEVICE == "cpu" else () if DEVICE else ("gpu", "dry_run"):
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason="needs a GPU: make test-gpu"))
        for keyword, reason in reasons.items():  # a marker, or a folder
            if reason and keyword in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))


class Process:
    """A script that the fork server has started; a small `subprocess.Popen`."""

    def __init__(self, fork_server: ForkServer, pid: int, output: Path, stage: str) -> None:
        self._fork_server, self.pid, self._output, self._stage = fork_server, pid, output, stage
        self._handle = os.pidfd_open(pid)
        self.returncode: int | None = None

    def wait(self, timeout: float = 120.0) -> int:
        """Its exit status, or minus the signal that ended it; TimeoutError, with its output, where it goes on."""
        if self.returncode is None:
            if not select.select([self._handle], [], [], timeout)[0]:
                raise TimeoutError(f"process {self.pid} goes on after {timeout} s:\n{self.output}")
            self.returncode = self._fork_server.ask(self._stage, {"reap": self.pid})["returncode"]
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


class ForkServer:
    """Starts scripts in processes that have imported what they need already. See fork_server.py."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._processes = folder, list[Process]()
        self._stages: dict[str, socket.socket] = {}
        self._lock = threading.RLock()  # a test may start processes in threads
        worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        # Below those that the kernel assigns; a range for each worker, in an order that no other session has.
        first = 10_000 + worker % 20 * 1000
        self._ports = iter(random.Random().sample(range(first, first + 1000), 1000))

    def start(
        self,
        script: str | Path,
        *arguments: Any,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        stage: str = "trainer",
        teardown: bool = False,
    ) -> Process:
        """`python script *arguments`, with a process group of its own; `stage` is what it finds imported.

        With `teardown` Python also takes down at its end what was imported, as it does anywhere else.
        """
        command = [str(part) for part in (script, *arguments)]
        env = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), **(env or {})}
        request = {"start": command, "env": env, "cwd": str(cwd or Path.cwd()), "teardown": teardown}
        with self._lock:
            output = self._folder / f"{len(self._processes)}.txt"
            pid = self.ask(stage, {**request, "output": str(output)})["pid"]
            self._processes.append(process := Process(self, pid, output, stage))
        return process

    def start_ranks(
        self,
        script: str | Path,
        *arguments: Any,
        processes: int = 2,
        env: dict[str, str] | None = None,
        **options: Any,
    ) -> list[Process]:
        """As torchrun does: the same script in several processes that find each other."""
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.free_port()), "WORLD_SIZE": str(processes)}
        ranks = [{**group, "RANK": str(rank), "LOCAL_RANK": str(rank), **(env or {})} for rank in range(processes)]
        return [self.start(script, *arguments, env=rank, **options) for rank in ranks]

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

    def ask(self, stage: str, request: dict[str, Any]) -> dict[str, Any]:
        """What a stage answers; it is made where it is not there yet."""
        with self._lock:
            if stage not in self._stages:
                before = STAGES[stage]
                address = self.ask(before, {"stage": stage}) if before else self._first_stage()
                while not Path(address["socket"]).exists():
                    assert is_alive(address["pid"]), (
                        f"the fork server's stage {stage!r} did not come up: its traceback is above"
                    )
                    time.sleep(0.05)
                self._stages[stage] = socket.socket(socket.AF_UNIX)
                self._stages[stage].connect(address["socket"])
            self._stages[stage].sendall(json.dumps(request).encode() + b"\n")
            received = b""
            while not received.endswith(b"\n"):
                received += (more := self._stages[stage].recv(1 << 16))
                assert more, f"the fork server's stage {stage!r} has ended"
            answer: dict[str, Any] = json.loads(received)
            return answer

    @staticmethod
    def _first_stage() -> dict[str, Any]:
        """Where it is. The first worker that asks starts it."""
        folder, _, session = os.environ["FORK_SERVER"].partition(":")
        started = Path(folder, "started")
        with Path(folder, "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not started.exists():
                threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
                # The same hash of a string in all of them; no GPU.
                env = {**os.environ, **threads, "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": ""}
                script = str(Path(__file__).with_name("fork_server.py"))
                command = [sys.executable, "-W", "ignore", script, folder, session]
                started.write_text(str(os.posix_spawn(sys.executable, command, env, setsid=True)))
        return {"socket": str(Path(folder, "torch")), "pid": int(started.read_text())}

    def close(self) -> None:
        """End everything that still runs."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for stage in self._stages.values():
            stage.close()

    def free_port(self) -> int:
        """Not one that the kernel assigns to another process between now and the rank that takes it."""
        for port in self._ports:
            with socket.socket() as free, contextlib.suppress(OSError):
                free.bind(("127.0.0.1", port))
                return port
        raise OSError("every port of this worker is taken")


def is_alive(pid: int) -> bool:
    """Whether a process is there and is no zombie."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture
def portion(pytestconfig, record_property) -> Callable[[int], int]:
    """How many random inputs to try where a whole run tries so many: a quarter without `--full`."""

    def tried(count: int) -> int:
        count = count if pytestconfig.getoption("--full") else count // 4
        record_property("tried", count)  # for scripts/fault_table.py
        return count

    return tried


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory) -> Iterator[ForkServer]:
    """Processes in a fraction of a second each."""
    fork_server = ForkServer(tmp_path_factory.mktemp("fork_server"))
    yield fork_server
    fork_server.close()
