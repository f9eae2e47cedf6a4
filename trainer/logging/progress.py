"""What a run is doing while there is nothing else to read: loading, starting the engine, the phases of a step.

    with progress("loading Qwen/Qwen3-0.6B"):      # leaves the line "loading Qwen/Qwen3-0.6B: 12.3s"
    with live("sampling"):                         # leaves nothing
    with phases("generate"):                       # one of these, and adds to the seconds of that phase of a step

On a terminal, the phase and its seconds so far are a line that is rewritten until the phase is over. It leaves the
cursor at its start, so that what others print meanwhile overwrites it. Elsewhere `progress` prints a plain line when
the phase has lasted for a second, and another at its end. Shorter phases leave no line. Only the first process writes.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fused_grpo._text import visible
from fused_grpo.trainer.logging.formatting import duration

CLEAR = "\x1b[2K"  # of a terminal's line
REFRESH, SLOW = 0.25, 1.0  # seconds

# There is one live line: phases of other threads, and those inside another phase, are not shown.
_line = threading.Lock()
# What a terminal shows meanwhile.
DOING = {"sync": "sending weights to the engine", "generate": "sampling", "reward": "scoring", "train": "learning"}


@contextmanager
def progress(text: str, *, bars: bool = False) -> Iterator[None]:
    """A phase that is worth a line of its own.

    Args:
        text: what is done.
        bars: a library draws progress bars meanwhile, so that a terminal gets plain lines too.
    """
    if not _is_first_process():
        yield
        return
    start, is_plain = time.perf_counter(), bars or not sys.stdout.isatty()
    begun = threading.Timer(SLOW, lambda: print(f"{visible(text)} ...", flush=True))
    begun.daemon = True
    if is_plain:
        begun.start()
        try:
            yield
        finally:
            begun.cancel()
    else:
        with live(text):
            yield
    if (seconds := time.perf_counter() - start) >= SLOW:
        clear_line()
        print(f"{visible(text)}: {duration(seconds)}", flush=True)


@contextmanager
def live(text: str) -> Iterator[None]:
    """A phase that a terminal shows with its seconds while it lasts."""
    if not (_is_first_process() and sys.stdout.isatty() and _line.acquire(blocking=False)):
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_rewrite, args=(visible(text), over), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        clear_line()
        _line.release()


def clear_line() -> None:
    """Remove the live line, if there is one, before another line is printed in its place."""
    if _line.locked() and sys.stdout.isatty():
        sys.stdout.write(CLEAR)
        sys.stdout.flush()


def _rewrite(text: str, over: threading.Event) -> None:
    """Show `text` with its seconds until it is over."""
    start = time.perf_counter()
    while not over.wait(REFRESH):
        line = f"{text} ... {duration(time.perf_counter() - start)}"
        width = shutil.get_terminal_size().columns
        sys.stdout.write(f"{CLEAR}{line[: width - 1]}\r")
        sys.stdout.flush()


def _is_first_process() -> bool:
    """By the launcher's variable, because there may be no process group yet."""
    return os.environ.get("RANK", "0") == "0"


class Phases:
    """Seconds of each phase of a step: `with phases("generate"): ...`.

    Args:
        first: this is the first step, whose long phases leave a line: it compiles kernels and fills caches.
    """

    def __init__(self, *, first: bool = False) -> None:
        self.seconds: dict[str, float] = {}
        self.first = first

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start, doing = time.perf_counter(), DOING.get(name, name)
        if self.first:
            # On a GPU, the first backward pass waits for the compiler.
            doing = f"first step: {doing}{' (compiles kernels)' * (name == 'train' and torch.cuda.is_available())}"
        shown = progress(doing) if self.first else live(doing)
        try:
            with shown:
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
