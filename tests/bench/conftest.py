"""A result file in miniature, in the format of `bench/conftest.py`, with figures that are easy to tell apart."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fused_grpo.bench.heads.work import Work

WORK = Work(kind="loss", head="GPT-2", tokens=2048)
ROUNDS = (1.0, 0.98, 1.01, 1.03, 0.99)
SECONDS = {"products alone": 1.0, "fused-grpo": 1.1, "full logits": 1.5, "Liger GRPO": 1.9, "TRL": 2.7}
MEBIBYTES = {"products alone": 400, "fused-grpo": 250, "full logits": 1200, "Liger GRPO": 380, "TRL": 700}
ERRORS = {"fused-grpo": 4e-7, "full logits": 3e-7, "Liger GRPO": 9e-6, "TRL": 1.1e-5}


def head(implementation: str, work: Work = WORK, **changed: Any) -> dict[str, Any]:
    """A benchmark of a head by itself; `seconds` is its median."""
    error, scale = ERRORS.get(implementation, 1e-6), work.tokens / WORK.tokens
    extra = {
        "implementation": implementation,
        "version": "1.2.3",
        "setting": "as documented",
        "work": work.described(),
        "errors": {"value": error / 4, "d_hidden": error, "d_weight": error / 2},
        "peak_bytes": MEBIBYTES.get(implementation, 500) * 2**20,
    }
    seconds = changed.pop("seconds", SECONDS.get(implementation, 1.0) * scale)
    rounds = changed.pop("rounds", ROUNDS)
    return timed(work.name, {**extra, **changed}, [seconds * share for share in rounds], seconds)


def other(group: str, implementation: str, seconds: float, **extra: Any) -> dict[str, Any]:
    """A benchmark of a whole trainer, or of generation."""
    return timed(group, {"implementation": implementation, **extra}, [seconds * share for share in ROUNDS], seconds)


def timed(group: str, extra: dict[str, Any], data: list[float], median: float) -> dict[str, Any]:
    stats = {"median": median, "min": min(data), "max": max(data), "rounds": len(data), "data": data}
    return {"group": group, "name": f"test[{extra['implementation']}]", "extra_info": extra, "stats": stats}


def result(benchmarks: list[dict[str, Any]] | None = None, **notes: Any) -> dict[str, Any]:
    """A whole file: by default one group of all `SECONDS`."""
    machine = {"name": "cpu-2-cores", "device": "cpu", "cores": 2, "threads": 2, "memory_gib": 23.5, "tiny": False}
    return {
        "machine_info": {**machine, "versions": {"torch": "2.13.0"}, "cpu": {"brand_raw": "Intel(R) Xeon(R)"}},
        "commit_info": {"id": "abcdef0123456789", "dirty": False},
        "datetime": "2026-11-21T16:04:09",
        "benchmarks": [head(name) for name in SECONDS] if benchmarks is None else benchmarks,
        "absent": [],
        "longest": [],
        "promises": [],
        **notes,
    }


@pytest.fixture
def build() -> SimpleNamespace:
    """What result files are made of here."""
    return SimpleNamespace(head=head, other=other, result=result, WORK=WORK, SECONDS=SECONDS, ROUNDS=ROUNDS)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Write a result to a file of this name."""

    def save(content: dict[str, Any], name: str = "result.json") -> Path:
        path = tmp_path / name
        path.write_text(json.dumps(content))
        return path

    return save
