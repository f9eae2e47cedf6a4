"""What the process of an OwnServer runs: vLLM's server, until the trainer ends. It imports nothing of this package.

A trainer that was killed has left the weights that it was sending, and the sockets: they are removed before the end.

vLLM's module and its arguments are in an environment variable, as JSON: they may have secrets, and any user can list
those of a process. Standard input is a pipe that the trainer writes nothing to. It ends when the trainer does, but for
one that has forked: then this process gets another parent.
"""

import json
import os
import runpy
import select
import signal
import sys
import threading
import time
from pathlib import Path

_SECONDS = 0.5  # from one look at the parent to the next
_remove_abandoned = runpy.run_path(str(Path(__file__).parents[1] / "abandoned.py"))["remove_abandoned"]


def _end_with_trainer(trainer: int, parents: list[str]) -> None:
    # Not by `sys.stdin`, whose lock a forked process of vLLM's would wait for.
    while os.getppid() == trainer and not select.select([0], [], [], _SECONDS)[0]:
        pass
    limit = time.monotonic() + _SECONDS
    while os.getppid() == trainer and time.monotonic() < limit:  # its locks are open when it has ended
        time.sleep(0.01)
    for parent in parents:
        _remove_abandoned(parent)
    os.killpg(0, signal.SIGTERM)  # on which vLLM removes its shared memory
    time.sleep(5)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    left_in = json.loads(os.environ.pop("FUSED_GRPO_LEFT_IN"))
    threading.Thread(target=_end_with_trainer, args=(os.getppid(), left_in), daemon=True).start()
    module, *sys.argv[1:] = json.loads(os.environ.pop("FUSED_GRPO_SERVER_ARGUMENTS"))
    runpy.run_module(module, run_name="__main__", alter_sys=True)
