"""Reading a result file, selecting a group of it, and formatting its quantities.

A result file is pytest-benchmark's JSON with what `conftest.py` adds. Here it becomes groups of rows: one work, with a
row for each implementation that did it. "products alone", the bare matrix products that every implementation needs, is
the lower bound of its group (the floor) and no implementation itself. Names of ours start with "fused-grpo".
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fused_grpo.bench.heads.suites import FLOOR
from fused_grpo.errors import DataError

Result = dict[str, Any]

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
# Keys of files from before 2026-11-23, and what they are called today.
OLD_KEYS = {"contender": "implementation", "direction": "gradients"}
CARRIED = {"implementation", "version", "setting", "work", "errors", "memory", "peak_bytes", "flop_per_second"}
CARRIED |= {"share_of_products"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """The result of one implementation in a group. Times are seconds, `peak` is bytes beside the inputs."""

    group: str
    implementation: str
    version: str | None
    setting: str
    median: float
    fastest: float
    slowest: float
    seconds: tuple[float, ...]
    """Of each round, in the order of the rounds; empty where the file does not have them."""
    rounds: int
    peak: int | None
    errors: Mapping[str, float]
    """From fp64, of the small problem, by name: the value, and the gradients that the work has."""
    work: Mapping[str, Any] | None
    """None for whole trainers and generation."""
    more: Mapping[str, Any]
    """All other entries of the benchmark's `extra_info`."""

    @property
    def ours(self) -> bool:
        return self.implementation.startswith("fused-grpo")

    @property
    def is_floor(self) -> bool:
        return self.implementation == FLOOR

    @property
    def spread(self) -> float:
        return (self.slowest - self.fastest) / self.median

    @property
    def error(self) -> float | None:
        """The largest error; NaN counts as larger than every number."""
        return max(self.errors.values(), key=lambda x: math.inf if math.isnan(x) else x, default=None)

    @property
    def rate(self) -> float | None:
        """FLOP of the necessary products, per second; further products of an implementation do not count."""
        return None if self.work is None else float(self.work["flop"]) / self.median


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows of one name, the floor first and the others from fast to slow, and the reasons of absent implementations."""

    name: str
    rows: tuple[Row, ...]
    absent: Mapping[str, str]

    @property
    def floor(self) -> Row | None:
        return next((row for row in self.rows if row.is_floor), None)

    @property
    def implementations(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.is_floor)

    @property
    def work(self) -> Mapping[str, Any] | None:
        return next((row.work for row in self.rows if row.work is not None), None)

    @property
    def best_time(self) -> float | None:
        return min((row.median for row in self.implementations), default=None)

    @property
    def least_memory(self) -> int | None:
        return min((row.peak for row in self.implementations if row.peak is not None), default=None)

    def times_products(self, row: Row) -> float | None:
        return None if self.floor is None else row.median / self.floor.median

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of the work, in the dtype of the inputs: the least memory that is possible."""
        work = self.work
        if work is None or work["gradients"] == "no_grad":
            return 0
        rows = work["tokens"] + (work["vocab"] if work["gradients"] == "trainable" else 0)
        return int(rows * work["hidden"] * BYTES[work["dtype"]])


def read(path: str | Path) -> Result:
    """A result file; older ones with the keys of today, and the results.jsonl of scripts/gpu_first.py.

    Raises:
        DataError: there is no such file, or it is not a result file.
    """
    path = Path(path)
    if path.suffix == ".jsonl":
        from fused_grpo.bench.report.gpu_results import result_of

        return result_of(path)
    want = "want a result file of the benchmarks"
    try:
        result = json.loads(path.read_text(), object_hook=with_current_keys)
    except FileNotFoundError as error:
        raise DataError(f"got no file at {path}, {want}; fix: fused-grpo bench makes one") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"got {path}, which is no JSON ({error}), {want}; fix: fused-grpo bench makes one") from error
    benchmarks = result.get("benchmarks") if isinstance(result, dict) else None
    if not benchmarks or not all("implementation" in benchmark.get("extra_info", {}) for benchmark in benchmarks):
        raise DataError(f"got {path}, whose benchmarks name no implementations, {want}; fix: run fused-grpo bench")
    return result  # type: ignore[no-any-return]


def with_current_keys(entry: dict[str, Any]) -> dict[str, Any]:
    """An object of a result file, also of an older one, with the keys that files have today."""
    return {OLD_KEYS.get(key, key): value for key, value in entry.items()}


def row_of(benchmark: Mapping[str, Any]) -> Row:
    extra, stats = benchmark["extra_info"], benchmark["stats"]
    return Row(
        group=benchmark["group"] or benchmark["name"],
        implementation=extra["implementation"],
        version=extra.get("version"),
        setting=extra.get("setting") or "",
        median=stats["median"],
        fastest=stats["min"],
        slowest=stats["max"],
        seconds=tuple(stats.get("data", ())),
        rounds=stats["rounds"],
        peak=extra.get("peak_bytes"),
        errors={name: error for name, error in (extra.get("errors") or {}).items() if error is not None},
        work=extra.get("work"),
        more={name: value for name, value in extra.items() if name not in CARRIED},
    )


def groups_of(result: Result) -> dict[str, Group]:
    """Groups in the order of the file; those without any measurement come last."""
    rows = [row_of(benchmark) for benchmark in result["benchmarks"]]
    absent = result.get("absent", [])
    names = dict.fromkeys([row.group for row in rows] + [entry["group"] for entry in absent])
    return {name: _group(name, (row for row in rows if row.group == name), absent) for name in names}


def _group(name: str, rows: Iterable[Row], absent: list[dict[str, str]]) -> Group:
    ordered = sorted(rows, key=lambda row: (not row.is_floor, row.median, row.implementation))
    reasons = {entry["implementation"]: entry["why"] for entry in absent if entry["group"] == name}
    return Group(name=name, rows=tuple(ordered), absent=reasons)


def headline(result: Result, *, kind: str | None = None, name: str | None = None) -> Group:
    """The group to show where there is space for one: whose name contains `name`, and the most informative of a kind.

    A loss comes before log-probs, all gradients before some, ordinary rollouts before special ones; then the group with
    the most rounds, the most implementations and the most work.

    Raises:
        DataError: no group was measured of that kind and name.
    """
    groups = [group for group in groups_of(result).values() if group.work is not None and group.implementations]
    chosen = [group for group in groups if kind is None or work_of(group)["kind"] == kind]
    chosen = [group for group in chosen if name is None or name in group.name]
    if not chosen:
        asked = " and ".join(x for x in (kind, name and f"{name!r} in its name") if x) or "measured implementations"
        has = "; ".join(group.name for group in groups) or "none"
        raise DataError(f"got no group with {asked}, want one of: {has}; fix: name one of these")
    return max(chosen, key=_importance)


def work_of(group: Group) -> Mapping[str, Any]:
    """The work of a group of heads."""
    assert group.work is not None
    return group.work


def _importance(group: Group) -> tuple[Any, ...]:
    work = work_of(group)
    ordinary = work["entropy"] is None
    ordinary &= not any(work.get(name) for name in ("idle", "uneven", "several", "kept", "centred"))
    gradients = ("no_grad", "frozen", "trainable").index(work["gradients"])
    rounds = min(row.rounds for row in group.implementations)
    return work["kind"] == "loss", gradients, ordinary, rounds, len(group.implementations), work["flop"]


def processor(result: Result) -> str:
    """Name of the GPU, or of the CPU."""
    machine = result["machine_info"]
    if machine.get("device", "cpu") != "cpu":
        return str(machine["device"])
    return str(machine.get("cpu", {}).get("brand_raw", "CPU")).replace("(R)", "").replace("(TM)", "")


def version_of(result: Result, package: str) -> str | None:
    """Version of a package on the machine of the result; None if it was not installed."""
    version: str | None = result["machine_info"].get("versions", {}).get(package)
    return version


def day(result: Result) -> str:
    return str(result["datetime"])[:10]


def commit(result: Result) -> str:
    """Seven digits of the commit, and whether the sources had changes that were not committed."""
    info = result.get("commit_info") or {}
    return str(info.get("id") or "unknown")[:7] + (" with changes" if info.get("dirty") else "")


def rounds_text(groups: Iterable[Group]) -> str:
    """`5 rounds`, or `3 to 5 rounds`."""
    counts = {row.rounds for group in groups for row in group.rows} or {0}
    low, high = min(counts), max(counts)
    return f"{low} rounds" if low == high else f"{low} to {high} rounds"


def machine_text(result: Result) -> str:
    """Machine and versions of a measurement, in half a sentence."""
    machine = result["machine_info"]
    parts = [processor(result), f"{machine.get('cores', '?')} CPU cores", f"{machine.get('threads', '?')} threads"]
    parts += [f"{machine['memory_gib']:g} GiB of memory"] if "memory_gib" in machine else []
    versions = ", ".join(f"{package} {version}" for package, version in machine.get("versions", {}).items())
    return f"{machine.get('name', 'unnamed')} ({', '.join(parts)}) with {versions or 'unknown versions'}"


def number_text(value: float) -> str:
    """Three digits without an exponent: 0.0123, 1.84, 184, 151,936; all digits before the point, and of an int."""
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value) or value == 0:
        return "0" if value == 0 else str(value)
    rounded = float(f"{value:.3g}")  # so that 9.996 becomes 10.0 and not 10.00
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(rounded))))}f}"


def seconds_text(value: float) -> str:
    """`1.84 s`, `184 ms` or `18.4 µs`."""
    scale, unit = next(((s, u) for s, u in ((1.0, "s"), (1e-3, "ms")) if value >= 0.9995 * s), (1e-6, "µs"))
    return f"{number_text(value / scale)} {unit}"


def bytes_text(value: float) -> str:
    """`11.7 GiB`, `83.2 MiB` or `12.5 KiB`."""
    scale, unit = next(((s, u) for s, u in ((2**30, "GiB"), (2**20, "MiB")) if value >= 0.9995 * s), (2**10, "KiB"))
    return f"{number_text(value / scale)} {unit}"
