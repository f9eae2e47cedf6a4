"""What figures were made on and with, without the machine's name."""

from __future__ import annotations

import datetime
import os
import subprocess
from pathlib import Path
from typing import Any

from fused_grpo.env import machine, versions

ROOT = Path(__file__).resolve().parent.parent.parent


def described() -> dict[str, Any]:
    """Date, commit, machine and versions."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    return {
        "date": datetime.date.today().isoformat(),
        "commit": {
            "id": _git("rev-parse", "HEAD"),
            "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        },
        "machine": {**machine(), "memory_gib": round(memory, 1), "processor": cpu.partition(":")[2].strip()},
        "versions": versions(),
    }


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()
