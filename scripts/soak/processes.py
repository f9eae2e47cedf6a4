"""Processes forked from one that has imported what they need, and what this one holds: threads, files, memory."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36


def preload() -> None:
    """Import what the runs do. Nothing here may start a thread."""
    import accelerate
    import datasets
    import transformers

    import fused_grpo.trainer.logging.report
    import fused_grpo.trainer.loop

    names = ("AutoTokenizer", "PreTrainedTokenizerFast", "Qwen2ForCausalLM")
    assert all((accelerate, datasets, fused_grpo, *(getattr(transformers, name) for name in names)))


def start(work: Callable[..., None], *arguments: Any, log: Path) -> int:
    """Run `work(*arguments)` in a fork of this process, which says to `log` what it has to say; its pid."""
    pid = os.fork()
    if pid:
        return pid
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    status = 1
    try:
        work(*arguments)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    # As any Python process ends, but without running on in the caller's code.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def ended(pid: int, *, within: float) -> int | None:
    """The exit status of a child, or minus the signal that ended it; None where it goes on for so many seconds."""
    deadline = time.monotonic() + within
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.02)


def adopt_orphans() -> None:
    """From now on, processes whose parent ends before them are this one's: none can get out of sight."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children(pid: int) -> list[int]:
    """Of a process, those that run; not those that have ended and are waited for."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    found = [int(child) for task in tasks for child in _read(task).split()]
    return [child for child in found if _state(child) not in ("", "Z")]


def descendants(pid: int) -> list[int]:
    """Its children, theirs, and so on."""
    found = children(pid)
    return [*found, *(further for child in found for further in descendants(child))]


def command(pid: int) -> str:
    """What a process is, in words."""
    return _read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").strip()[:200]


def held() -> dict[str, int]:
    """What this process has open: threads, children, and descriptors by kind."""
    kinds = Counter[str]()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue  # the descriptor that this listing was made with
        if target.endswith(".ttf"):
            continue  # matplotlib keeps the few fonts that it has needed
        kinds[target.partition(":")[0] if not target.startswith("/") else "file"] += 1
    threads = len(os.listdir("/proc/self/task"))
    return {"threads": threads, "children": len(children(os.getpid())), **dict(sorted(kinds.items()))}


def resident(pid: int) -> int | None:
    """Bytes of memory that a process has now; None where it is gone."""
    fields = _read(Path(f"/proc/{pid}/statm")).split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if fields else None


def _state(pid: int) -> str:
    return _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].strip()[:1]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
