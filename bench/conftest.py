"""How the benchmarks run, and the entries that their result file has beside pytest-benchmark's own.

    pytest bench                         the suite of this machine, at full size
    pytest bench --suite gpu --tiny      the GPU's suite with the same code, at sizes that run anywhere
    pytest bench -m trainer              one part: cpu, gpu (the head by itself) or trainer
    pytest bench -m long                 what takes half an hour by itself, and is left out without it

`python -m fused_grpo.bench` (`fused-grpo bench`, `make bench`) runs it and makes tables and charts of the result.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fused_grpo
from fused_grpo import __version__
from fused_grpo.bench.heads.suites import Case, cases, is_met
from fused_grpo.bench.heads.worker_pool import Measurement, WorkerPool
from fused_grpo.env import versions

PEERS = ("trl", "liger-kernel", "cut-cross-entropy", "verl", "quack-kernels")
PACKAGES = ("torch", "triton", "transformers", "vllm", *PEERS)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fused-grpo benchmarks")
    group.addoption("--suite", choices=("cpu", "gpu"), help="default: gpu where there is one")
    group.addoption("--tiny", action="store_true", help="use small sizes, to see that everything runs")
    group.addoption("--resume", metavar="FILE", help="keep the figures of each case there, and do not measure it again")


def pytest_configure(config: pytest.Config) -> None:
    for marker in ("cpu: heads on a CPU", "gpu: heads on a GPU", "trainer: whole trainers and generation", LONG):
        config.addinivalue_line("markers", marker)
    notes: Notes = {"absent": [], "longest": [], "promises": []}
    config.stash[NOTES] = notes


LONG = "long: heads of real models over N, and the training phase of SmolLM2; -m long alone runs them"
Notes = dict[str, list[dict[str, Any]]]
NOTES: pytest.StashKey[Notes] = pytest.StashKey()


def suite_of(config: pytest.Config) -> str:
    """The suite of this run, "cpu" or "gpu"; the GPU's runs on a CPU only if it is tiny."""
    suite: str = config.getoption("--suite") or ("gpu" if torch.cuda.is_available() else "cpu")
    if suite == "gpu" and not torch.cuda.is_available() and not config.getoption("--tiny"):
        raise pytest.UsageError("got --suite gpu without a GPU; fix: --tiny, to see that everything runs")
    return suite


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "implementation" in metafunc.fixturenames:
        suite_cases = cases(suite_of(metafunc.config), tiny=metafunc.config.getoption("--tiny"))
        pairs = [
            pytest.param(case, name, marks=[pytest.mark.long] * case.long, id=f"{case.name}: {name}")
            for case in suite_cases
            for name in case.names
        ]
        metafunc.parametrize(("case", "implementation"), pairs)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark = getattr(pytest.mark, suite_of(config))
    for item in items:
        if "implementation" in getattr(item, "fixturenames", ()) or "promise" in item.name or "longest" in item.name:
            item.add_marker(mark)
    if "long" not in config.option.markexpr and not config.getoption("--tiny"):
        left_out = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def keep_figures(kept: Path, case: str, measurements: dict[str, Measurement]) -> None:
    """Add a case to the file of an unfinished run."""
    entry = {"run": run_identity(), "case": case, "found": {name: vars(m) for name, m in measurements.items()}}
    with kept.open("a") as file:
        # The newline comes first, so that half a line of a killed run spoils no other line.
        file.write("\n" + json.dumps(entry))


def kept_figures(kept: Path) -> dict[str, dict[str, Measurement]]:
    """The figures of an unfinished run by case, if this code measured them on this machine."""
    figures = {}
    for line in kept.read_text().splitlines() if kept.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if entry["run"] == run_identity():
            figures[entry["case"]] = {name: Measurement(**values) for name, values in entry["found"].items()}
    return figures


class Figures:
    """The measurements; a case is measured when its first implementation is needed."""

    def __init__(self, pool: WorkerPool, notes: Notes, kept: Path | None) -> None:
        self._pool, self._notes, self._kept = pool, notes, kept
        self._measurements = {} if kept is None else kept_figures(kept)

    def of(self, case: Case) -> dict[str, Measurement]:
        if case.name not in self._measurements:
            self._measurements[case.name] = measurements = self._pool.measure(
                case.work, case.names, rounds=case.rounds, slow=case.slow, memory=case.memory
            )
            if self._kept is not None:
                keep_figures(self._kept, case.name, measurements)
        return self._measurements[case.name]

    def note(self, kind: str, **entry: Any) -> None:
        """Add an entry to the result file beside the benchmarks."""
        self._notes[kind].append(entry)

    def promise(self, what: str, group: str, value: float, bound: str) -> None:
        """Note whether a promise is met, and fail if it is not."""
        met = is_met(value, bound)
        self.note("promises", what=what, group=group, value=value, bound=bound, met=met)
        assert met, f"got {value:.3f} for {what}, want {bound}"


@pytest.fixture(scope="session")
def pool(pytestconfig: pytest.Config) -> Iterator[WorkerPool]:
    workers = WorkerPool("cuda" if torch.cuda.is_available() else "cpu")
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def figures(pool: WorkerPool, pytestconfig: pytest.Config) -> Figures:
    kept = pytestconfig.getoption("--resume")
    return Figures(pool, pytestconfig.stash[NOTES], Path(kept) if kept else None)


class Replay:
    """A timer for pytest-benchmark that replays seconds which were measured elsewhere."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def into(self, benchmark: Any, seconds: list[float]) -> None:
        remaining = iter(seconds)

        def run() -> None:
            self.now += next(remaining, 0.0)

        benchmark.pedantic(run, rounds=len(seconds))


@pytest.fixture
def replay(benchmark: Any) -> Replay:
    clock = Replay()
    benchmark._timer = clock
    return clock


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    machine_info |= {
        "name": machine_name(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(memory, 1),
        "versions": versions(PACKAGES),
        "suite": suite_of(config),
        "tiny": config.getoption("--tiny"),
    }
    machine_info.pop("node", None)


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: Any, output_json: dict[str, Any]) -> None:
    notes: Notes = config.stash[NOTES]
    output_json |= notes


def machine_name() -> str:
    """The name of the folder of its results."""
    if torch.cuda.is_available():
        return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    return f"cpu-{os.cpu_count()}-cores"


@functools.cache
def run_identity() -> str:
    """The identity of a run: the code, the machine and torch."""
    code = hashlib.sha256()
    for folder, _, names in sorted(os.walk(Path(fused_grpo.__file__).parent, followlinks=True)):
        for name in sorted(names):
            if name.endswith(".py"):
                code.update(Path(folder, name).read_bytes())
    return f"{__version__} {code.hexdigest()[:16]} {machine_name()} torch {torch.__version__}"
