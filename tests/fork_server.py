"""Starts scripts in processes of their own, forked from one that has imported what they need.

Importing torch, transformers and the trainer takes ten seconds, vLLM as long again, and the tests start two hundred
processes. So a session has one fork server, which imports in stages, each of them a fork of the one before:

    torch       torch
    libraries   transformers, datasets, TRL, ...: everything but this package, for tests of a copy of it
    trainer     the trainer
    vllm        vLLM
    collected   the tests that find planted bugs, from the trainer on: see swap.py

A stage is made when it is first asked for. It listens on a socket, takes lines of JSON, and ends with the session:

    {"stage": "trainer"}                           soon to be spoken to there  ->  {"socket": path, "pid": 6}
    {"start": [script, *arguments], "env": {...}, "cwd": path, "output": path, "teardown": false}  ->  {"pid": 7}
    {"reap": 7}                                          once it has ended     ->  {"returncode": 0}

A script is a path, or "-m" and a module. See `ForkServer` in conftest.py, which speaks to it.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

Becomes = Callable[[], Any]

# Of what tests import, all that takes a while; pytest imports its plugins when it runs, and Triton Gluon with a kernel.
LIBRARIES = ("accelerate", "datasets", "httpx", "hypothesis", "pytest", "rich.syntax", "torch.distributed.checkpoint")
LIBRARIES += ("triton.compiler.code_generator", "triton.runtime.interpreter")
LIBRARIES += tuple(f"_pytest.{plugin}" for plugin in ("doctest", "faulthandler", "helpconfig", "junitxml", "pastebin"))
LIBRARIES += tuple(f"_pytest.{plugin}" for plugin in ("setuponly", "setupplan", "skipping", "stepwise", "subtests"))
LIBRARIES += tuple(f"_pytest.{plugin}" for plugin in ("threadexception", "unittest", "unraisableexception", "warnings"))
# What those import when they first do something.
LIBRARIES += ("_pytest._argcomplete", "pdb", "anyio._backends._asyncio", "httpcore", "http.server", "numpy.ctypeslib")
LIBRARIES += ("peft.tuners.lora.bnb", "peft.utils.transformers_weight_conversion", "rich._emoji_codes")
LIBRARIES += ("torch.distributed.checkpoint.state_dict", "torch.profiler._cupti_monitor")
LIBRARIES += ("transformers.models.qwen3_moe.modeling_qwen3_moe",)


def main(folder: str, session: str) -> None:
    """The first stage; `session` is the process with which all of them end."""
    # As in conftest.py: by default the collector looks through a million imported objects again and again.
    gc.set_threshold(20_000, 20, 50)
    import_torch()
    becomes: Becomes | None = serve(Path(folder), "torch", int(session))
    while becomes is not None:  # this process is a fork: a later stage, or a script
        becomes = becomes()


def serve(folder: Path, stage: str, session: int) -> Becomes:
    """Answer requests until the session ends; in a process that a request has started, return what it is to be."""
    listener, connections = socket.socket(socket.AF_UNIX), dict[int, socket.socket]()
    listener.bind(str(folder / f"{stage}.new"))
    listener.listen()
    os.rename(folder / f"{stage}.new", folder / stage)  # who sees it can connect
    ended, stages = os.pidfd_open(session), dict[str, int]()
    gc.freeze()  # what was imported stays: no fork has to look through it, nor copy it for that
    while True:
        ready = select.select([ended, listener, *connections], [], [])[0]
        if ended in ready:
            os._exit(0)
        if listener in ready:
            connection, _ = listener.accept()
            connections[connection.fileno()] = connection
        for connection in [connections[number] for number in ready if number in connections]:
            request = read_line(connection)
            if request is None:
                connections.pop(connection.fileno()).close()
            elif "reap" in request:
                _, status = os.waitpid(request["reap"], 0)
                answer(connection, returncode=os.waitstatus_to_exitcode(status))
            elif request.get("stage") in stages:
                answer(connection, socket=str(folder / request["stage"]), pid=stages[request["stage"]])
            elif pid := os.fork():
                if "stage" in request:
                    stages[request["stage"]] = pid
                    answer(connection, socket=str(folder / request["stage"]), pid=pid)
                else:
                    answer(connection, pid=pid)
            else:
                for inherited in (listener, *connections.values()):
                    inherited.close()
                os.close(ended)
                if "start" in request:
                    return functools.partial(become, request)
                STAGES[request["stage"]]()
                return functools.partial(serve, folder, request["stage"], session)


def read_line(connection: socket.socket) -> dict[str, Any] | None:
    """A request; None where the connection was closed."""
    received = b""
    while not received.endswith(b"\n"):
        if not (more := connection.recv(1 << 16)):
            return None
        received += more
    request: dict[str, Any] = json.loads(received)
    return request


def answer(connection: socket.socket, **content: Any) -> None:
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(json.dumps(content).encode() + b"\n")


# Nothing that a stage imports may start a thread or use a thread pool.


def import_torch() -> None:
    global torch
    import torch
    from imported import quick_torch

    torch.distributed.destroy_process_group = after_a_moment(torch.distributed.destroy_process_group)
    quick_torch.make_quick()


def import_libraries() -> None:
    """What tests import, but for this package; what is not installed is left out."""
    from imported import quick_accelerate

    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    quick_accelerate.make_quick()
    with contextlib.suppress(ImportError):
        import transformers

        # Its modules are imported at the first use of a name.
        names = ("AutoTokenizer", "PreTrainedTokenizerFast", "Qwen2ForCausalLM", "LlamaForCausalLM")
        assert all(getattr(transformers, name) for name in names)
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("qwen2")  # hundreds of patterns are compiled at the first save or adapter
    with contextlib.suppress(ImportError):
        from trl import import_utils

        # No test samples with vLLM through TRL, and importing it takes longer than all the rest.
        with mock.patch.object(import_utils, "is_vllm_available", return_value=False):
            import trl.trainer.grpo_trainer  # noqa: F401


def import_trainer() -> None:
    import fused_grpo.trainer.cli.options
    import fused_grpo.trainer.loop  # noqa: F401


def import_vllm() -> None:
    """What an engine imports at its start, too; as quietly as the trainer starts it."""
    from imported import quick_vllm

    from fused_grpo.trainer.engines.vllm.start_vllm import DEFAULT_ENVIRONMENT

    quick_vllm.make_quick()
    for name, value in DEFAULT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in (  # by name: a linter takes away what is imported and not used
        "entrypoints.llm",
        "model_executor.models.qwen2",
        "v1.worker.cpu_worker",
        "v1.worker.cpu_model_runner",
        "entrypoints.launchers.api_server.entry",
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(f"vllm.{name}")


def collect_tests() -> None:
    """Those that find planted bugs."""
    import swap

    swap.collect()


STAGES: dict[str, Callable[[], None]] = {
    "libraries": import_libraries,
    "trainer": import_trainer,
    "vllm": import_vllm,
    "collected": collect_tests,
}


def after_a_moment(leave: Callable[..., None]) -> Callable[..., None]:
    """PyTorch frees a gloo group with the interpreter locked, and waits there for a thread that may want the lock for
    what it did last. The trainer's own end has such a moment, too (`barrier` in distributed/failures.py)."""

    def leave_later(*group: Any) -> None:
        if torch.distributed.get_world_size() > 1:  # vLLM leaves a dozen groups of one
            time.sleep(0.25)
        leave(*group)

    return leave_later


def become(request: dict[str, Any]) -> None:
    """Run a script as `python script arguments` would, in this process."""
    os.setsid()  # killed alone, or with what it starts
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores, for a whole suite
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # After all other exit handlers: what the collector no longer looks at, Triton's bindings call a leak.
    atexit.register(os.dup2, nowhere, 2)
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    if request["teardown"]:
        run_script(*request["start"])
    else:
        run_and_leave(request["start"])


def run_script(script: str, *arguments: str) -> None:
    sys.path[0] = os.getcwd() if script == "-m" else os.path.dirname(script)
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if script == "-m":
        sys.argv = list(arguments)
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")


def run_and_leave(command: list[str]) -> NoReturn:
    """End as Python does, but for taking down all that was imported: that takes half a second."""
    for made in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        made.atexit = False  # among them each of PyTorch's registered operators
    if "torch._dynamo.utils" in sys.modules:  # which looks through all that it has compiled, for a log that is off
        atexit.unregister(sys.modules["torch._dynamo.utils"].dump_compile_times)
    status: Any = 0
    interrupted = False
    try:
        run_script(*command)
    except SystemExit as end:
        status = end.code
    except (Exception, KeyboardInterrupt) as error:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status, interrupted = 1, isinstance(error, KeyboardInterrupt)
    if not isinstance(status, int | None):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if interrupted:  # as Python ends, which forgets to where an `exec` ran on its way
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((status or 0) & 0xFF)


if __name__ == "__main__":
    main(*sys.argv[1:])
