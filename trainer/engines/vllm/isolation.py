"""Keeps vLLM a guest: what it changes in the process it runs in is put back, so that training does not notice.

vLLM is written to own its process. Started inside the trainer's it reseeds the global generators, replaces
`torch.set_num_threads` by a no-op, binds the memory of the whole process to one NUMA node (CPU build), exports
LD_PRELOAD and LOCAL_WORLD_SIZE to every later child, creates the default process group, and at shutdown destroys that
group even where it is the trainer's. Each manager here undoes one of these. A process of its own would not need them,
but takes 22 s to start (vllm_inprocess has the figures).
"""

from __future__ import annotations

import logging
import os
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def kept_rng() -> Iterator[None]:
    """The global generators of Python, NumPy and torch (CPU and current CUDA device) come out as they went in."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextmanager
def kept_threads() -> Iterator[None]:
    """Torch's thread count, its setter, and the CPUs this process may run on come out as they went in."""
    setter, count = torch.set_num_threads, torch.get_num_threads()
    cpus = os.sched_getaffinity(0)
    try:
        yield
    finally:
        torch.set_num_threads = setter
        if torch.get_num_threads() != count:
            setter(count)
        if os.sched_getaffinity(0) != cpus:
            os.sched_setaffinity(0, cpus)


@contextmanager
def kept_environment() -> Iterator[None]:
    """Environment variables come out as they went in, but for vLLM's own, which it reads again while it runs."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in [name for name in os.environ if not name.startswith("VLLM_")]:
            if name not in before:
                del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if not name.startswith("VLLM_")})


@contextmanager
def memory_unbound() -> Iterator[None]:
    """vLLM's CPU worker cannot bind the memory of the whole process, the trainer's too, to one NUMA node in here."""
    # Operators are found by __getattr__; an attribute of the same name hides one until it is deleted.
    operators: Any = torch.ops._C
    operators.init_cpu_memory_env = lambda nodes: None
    try:
        yield
    finally:
        del operators.init_cpu_memory_env


@contextmanager
def kept_default_group() -> Iterator[None]:
    """vLLM may destroy process groups of its own in here, but not the default one, which is the trainer's."""
    destroy = torch.distributed.destroy_process_group

    def destroy_unless_default(group: torch.distributed.ProcessGroup | None = None) -> None:
        if group is not None:
            destroy(group)

    torch.distributed.destroy_process_group = destroy_unless_default
    try:
        yield
    finally:
        torch.distributed.destroy_process_group = destroy


@contextmanager
def hushed(*, below: int) -> Iterator[None]:
    """No Python warnings and no log records below level `below` in here."""
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, below - 1))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Nothing below an error from the logger of that name."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
