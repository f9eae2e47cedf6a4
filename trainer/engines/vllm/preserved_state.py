"""Restores the state of the trainer's process that vLLM changes.

vLLM is written for a process of its own. It reseeds the global random number generators, turns off TF32, may leave
another CUDA stream current, replaces `torch.set_num_threads` by a function that does nothing, binds the memory of the
whole process to one NUMA node (CPU build), sets LD_PRELOAD and LOCAL_WORLD_SIZE for child processes, creates the
default process group, and at shutdown destroys that group even where the trainer created it. A process of its own would
need none of this, but takes 22 s to start (see inprocess.py).
"""

from __future__ import annotations

import logging
import os
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch


@contextmanager
def preserved_state() -> Iterator[None]:
    """Restore the random generators, TF32, the CUDA stream, threads, the CPU affinity and the environment afterwards.

    The generators are those of Python, NumPy and torch (CPU and current CUDA device). vLLM's own environment variables
    stay, because it reads them again while it runs.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    set_num_threads, threads, cpus = torch.set_num_threads, torch.get_num_threads(), os.sched_getaffinity(0)
    environment, has_tf32 = dict(os.environ), torch.backends.cuda.matmul.fp32_precision == "tf32"
    stream = torch.cuda.stream(torch.cuda.current_stream()) if devices else nullcontext()
    try:
        with torch.random.fork_rng(devices=devices), stream:
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if has_tf32:
            torch.set_float32_matmul_precision("high")
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != threads:
            set_num_threads(threads)
        if os.sched_getaffinity(0) != cpus:
            os.sched_setaffinity(0, cpus)
        for name in {*os.environ, *environment}:
            if not name.startswith("VLLM_") and os.environ.get(name) != environment.get(name):
                if name in environment:
                    os.environ[name] = environment[name]
                else:
                    del os.environ[name]


@contextmanager
def without_numa_binding() -> Iterator[None]:
    """Keep vLLM's CPU worker from binding the memory of the whole process to one NUMA node."""
    # Operators are found by __getattr__; an attribute of the same name hides one until it is deleted.
    operators: Any = torch.ops._C
    operators.init_cpu_memory_env = lambda nodes: None
    try:
        yield
    finally:
        del operators.init_cpu_memory_env


@contextmanager
def preserved_default_group() -> Iterator[None]:
    """Let vLLM destroy its own process groups, but not the default one, which is the trainer's."""
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
def errors_only(name: str) -> Iterator[None]:
    """Let this logger pass errors only."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Suppress Python warnings and log records below errors."""
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
