"""Restores the state of the trainer's process that vLLM changes.

vLLM is written for a process of its own. It reseeds the global random number generators, turns off TF32, may leave
another CUDA stream current, replaces `torch.set_num_threads` by a function that does nothing, binds the memory of the
whole process to one NUMA node (CPU build), sets LD_PRELOAD and LOCAL_WORLD_SIZE for child processes, creates the
default process group, and at shutdown destroys that group even where the trainer created it. Where it has no model of
its own and runs that of transformers, it changes the class. A process of its own would need none of this, but takes
22 s to start (see inprocess.py).
"""

from __future__ import annotations

import logging
import os
import random
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

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


def without_numa_binding() -> AbstractContextManager[Any]:
    """Keep vLLM's CPU worker from binding the memory of the whole process to one NUMA node."""
    return patch.object(torch.ops._C, "init_cpu_memory_env", lambda nodes: None, create=True)


def preserved_default_group() -> AbstractContextManager[Any]:
    """Let vLLM destroy its own process groups, but not the default one, which is the trainer's."""
    owner, name, destroy = torch.distributed, "destroy_process_group", torch.distributed.destroy_process_group
    return patch.object(owner, name, lambda group=None: None if group is None else destroy(group))


def preserved_classes() -> AbstractContextManager[Any]:
    """Keep vLLM from compiling classes of transformers in place, where it runs them: the trainer's model is of one."""
    from vllm.compilation import decorators

    decorate = decorators._support_torch_compile

    def decorated(cls: Any, *args: Any, **options: Any) -> Any:
        return cls if cls.__module__.startswith("transformers") else decorate(cls, *args, **options)

    return patch.object(decorators, "_support_torch_compile", decorated)


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
