"""`python -m` with a module of vLLM that serves and its arguments; engine and worker are forked, as they are on a GPU.

On a CPU vLLM spawns them: each imports everything anew, which takes most of the half minute of a start. Here they come
from Python's fork server, itself a fork of this process before it has a thread: forked from a process with threads, one
child in dozens waits for ever for a lock whose thread was not forked.
"""

import contextlib
import multiprocessing
import os
import runpy
import sys
import warnings
from multiprocessing import forkserver, resource_tracker, util

from vllm.v1.engine import utils
from vllm.v1.executor import multiproc_executor


def fork_and_run(path: str, command: list[str], open_files: list[int]) -> int:
    """In the place of a fresh interpreter for `python -c ...`."""
    if child := os.fork():
        return child
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in open_files:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(number)
    exec(command[-1], {})
    os._exit(0)


if __name__ == "__main__":
    resource_tracker.ensure_running()
    util.spawnv_passfds = fork_and_run
    forkserver.ensure_running()
    for module in (utils, multiproc_executor):
        module.get_mp_context = lambda: multiprocessing.get_context("forkserver")
    warnings.filterwarnings("error", message=".*api_server.*deprecated")
    module, *sys.argv[1:] = sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
