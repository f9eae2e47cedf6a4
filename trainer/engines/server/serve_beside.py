"""What the process of an OwnServer runs: vLLM's server, until the trainer ends. It imports nothing of this package.

Standard input is a pipe that the trainer alone can write to, and does not: it ends when the trainer does.
"""

import os
import runpy
import signal
import threading
import time


def _end_with_trainer() -> None:
    os.read(0, 1)  # not `sys.stdin`, whose lock a forked process of vLLM's would wait for
    os.killpg(0, signal.SIGTERM)  # on which vLLM removes its shared memory
    time.sleep(5)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with_trainer, daemon=True).start()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
