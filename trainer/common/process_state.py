"""What a tool or a reward changes of the process, and a run needs as it was: it is put back.

`os.environ` and the generators of Python and NumPy are the user's: a run reads none of them between two steps.
"""

from __future__ import annotations

import locale
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial
from typing import Any

import torch

from fused_grpo.trainer.common.contexts import contextmanager

_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)


def _umask() -> int:
    os.umask(before := os.umask(0o077))
    return before


def _set_handlers(handlers: list[Any]) -> None:
    with suppress(ValueError):  # outside of the main thread, where none can be set
        for number, handler in zip(_SIGNALS, handlers, strict=True):
            if handler is not None:  # one that was not set from Python
                signal.signal(number, handler)


def _set_autocast(before: list[tuple[str, bool, torch.dtype]]) -> None:
    for device, enabled, dtype in before:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
    torch.clear_autocast_cache()


# How each is read, and put back.
KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "recursion limit": (sys.getrecursionlimit, sys.setrecursionlimit),
    "locale": (partial(locale.setlocale, locale.LC_ALL), partial(locale.setlocale, locale.LC_ALL)),
    "umask": (_umask, os.umask),
    "signal handlers": (lambda: list(map(signal.getsignal, _SIGNALS)), _set_handlers),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (
        torch.get_default_device,
        lambda device: torch.set_default_device(None if device.type == "cpu" else device),  # None: without a mode
    ),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "autocast": (
        lambda: [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")[: 2 if torch.cuda.is_initialized() else 1]
        ],
        _set_autocast,
    ),
    "precision of products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic algorithms": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda before: torch.use_deterministic_algorithms(before[0], warn_only=before[1]),
    ),
    "threads": (torch.get_num_threads, torch.set_num_threads),
}


@contextmanager
def process_kept(names: Collection[str] = KEPT.keys()) -> Iterator[None]:
    """Around calls of a user's functions: what is in KEPT under these names is as it was afterwards."""
    kept = {name: KEPT[name] for name in names}
    before = {name: get() for name, (get, _) in kept.items()}
    try:
        yield
    finally:
        for name, (get, put) in kept.items():
            if get() != before[name]:
                put(before[name])


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Around calls of a user's functions: what they draw from torch's generators, or seed, is no part of the run's."""
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
        torch.manual_seed(seed)
        yield


@contextmanager
def place_kept() -> Iterator[None]:
    """Around calls of a user's functions: the folder, and where is printed to, are as they were afterwards.

    Threads that redirect output at the same time would leave it redirected, or close it for all.
    """
    folder: int | None = None
    with suppress(OSError):  # a descriptor, because the folder may be renamed or removed meanwhile
        folder = os.open(".", getattr(os, "O_PATH", os.O_RDONLY))
    try:
        with redirect_stdout(sys.stdout and _Lent(sys.stdout)), redirect_stderr(sys.stderr and _Lent(sys.stderr)):
            yield
    finally:
        if folder is not None:
            with suppress(OSError):
                os.fchdir(folder)
            os.close(folder)


class _Lent:
    """A stream that its borrower cannot close."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def close(self) -> None:
        """Leave it to its owner."""
