"""The raw file of a measurement: where it is, and what made it."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fused_grpo.env import environment
from fused_grpo.errors import DataError

ROOT = Path(__file__).resolve().parent.parent


def raw_file(name: str, made_by: str, **more: Any) -> tuple[Path, dict[str, Any]]:
    """bench/results/<machine>/<name>-<date>.json, whose folder exists then, and its first entries.

    A measurement calls it before it begins: the commit is that of the code which it has imported.
    """
    today = datetime.date.today().isoformat()
    path = ROOT / "bench" / "results" / f"cpu-{os.cpu_count()}-cores" / f"{name}-{today}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path, {"made_by": made_by, "date": today, "commit": commit(), "environment": environment(), **more}


def begun(path: Path, first_entries: dict[str, Any], *, same: Sequence[str], fix: str) -> dict[str, Any]:
    """What an earlier run has written to `path`, to go on with, or `first_entries`; DataError where `same` differ."""
    entries: dict[str, Any] = json.loads(path.read_text()) if path.exists() else first_entries
    if differing := [name for name in same if entries[name] != first_entries[name]]:
        raise DataError(f"got {path} of another {' and '.join(differing)}, want one run throughout; fix: {fix}")
    return entries


def write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def commit() -> dict[str, Any]:
    """The commit of this tree, and whether files differ from it."""
    return {"id": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
