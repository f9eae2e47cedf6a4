"""What the process of an OwnServer runs: vLLM's server, until the trainer ends. It imports nothing of this package.

Standard input is a pipe, from which the arguments come as a line of JSON. It ends when the trainer does, but for one
that has forked: then this process gets another parent.
"""

import json
import os
import runpy
import select
import signal
import sys
import threading
import time

_SECONDS = 0.5  # from one look at the parent to the next


def _end_with_trainer(trainer: int) -> None:
    # Not by `sys.stdin`, whose lock a forked process of vLLM's would wait for.
    while os.getppid() == trainer and not select.select([0], [], [], _SECONDS)[0]:
        pass
    os.killpg(0, signal.SIGTERM)  # on which vLLM removes its shared memory
    time.sleep(5)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    parent = os.getppid()
    with open(0, "rb", buffering=0, closefd=False) as arguments:
        sys.argv[1:] = json.loads(arguments.readline())
    threading.Thread(target=_end_with_trainer, args=(parent,), daemon=True).start()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
