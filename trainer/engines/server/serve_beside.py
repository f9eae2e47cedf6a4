"""What the process of an OwnServer runs: vLLM's server, until the trainer ends. It imports nothing of this package.

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

_SECONDS = 0.5  # from one look at the parent to the next


def _end_with_trainer(trainer: int) -> None:
    # Not by `sys.stdin`, whose lock a forked process of vLLM's would wait for.
    while os.getppid() == trainer and not select.select([0], [], [], _SECONDS)[0]:
        pass
    os.killpg(0, signal.SIGTERM)  # on which vLLM removes its shared memory
    time.sleep(5)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with_trainer, args=(os.getppid(),), daemon=True).start()
    module, *sys.argv[1:] = json.loads(os.environ.pop("FUSED_GRPO_SERVER_ARGUMENTS"))
    runpy.run_module(module, run_name="__main__", alter_sys=True)
