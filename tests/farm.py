"""Starts scripts in processes of their own, forked from one that has imported what they need.

Importing torch, transformers and datasets takes five seconds or more, and tests that kill processes need dozens of
them. This process imports once, then forks for every line of JSON on its standard input; see `Farm` in conftest.py.

    {"start": [script, *arguments], "env": {...}, "output": path}  ->  {"pid": 7}
    {"reap": 7}                                                     ->  {"returncode": 0}   once it has ended
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from typing import Any


def main() -> None:
    preload()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "reap" in request:
            _, status = os.waitpid(request["reap"], 0)
            answer = {"returncode": os.waitstatus_to_exitcode(status)}
        else:
            pid = os.fork()
            if pid == 0:
                # Back in main, it ends as any Python process does: with its exit handlers.
                return become(request)
            answer = {"pid": pid}
        print(json.dumps(answer), flush=True)


def preload() -> None:
    """Import what nearly every script does. Nothing here may start a thread or use a thread pool."""
    import accelerate
    import datasets
    import torch
    import transformers

    import fused_grpo.trainer.loop

    torch.distributed.destroy_process_group = after_a_moment(torch.distributed.destroy_process_group)
    names = ("AutoTokenizer", "PreTrainedTokenizerFast", "Qwen2ForCausalLM")
    assert all((accelerate, datasets, torch, fused_grpo, *(getattr(transformers, name) for name in names)))


def after_a_moment(leave: Callable[..., None]) -> Callable[..., None]:
    """PyTorch frees a gloo group with the interpreter locked, and waits there for a thread that may want the lock for
    what it did last. The trainer's own end has such a moment, too (peers.settle)."""

    def leave_later(*group: Any) -> None:
        time.sleep(0.25)
        leave(*group)

    return leave_later


def become(request: dict[str, Any]) -> None:
    """Run a script as `python script arguments` would, in this process."""
    os.setsid()  # killed alone, or with what it starts
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(request["env"])
    script, *arguments = request["start"]
    sys.argv, sys.path[0] = [script, *arguments], os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
