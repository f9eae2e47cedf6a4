"""A reward function in a process of its own, which can be killed.

For what a trainer must not do in its own process: run or parse what a model wrote. A completion that sends the function
into an endless loop, or makes it ask for all the memory there is, costs a worker process and nothing else.

One worker lives as long as the function is used. It is asked about one completion at a time, so that a failure is that
completion's alone; when it takes too long, or dies, its whole process group is killed and a new one started. It is a
bare interpreter, not a copy of this one: it loads the function by name and does not run the user's script again.
Requests and replies are lines of JSON, because a process that runs a model's code is not one to unpickle things from.

The worker has no secrets in its environment and none of the trainer's open files, leaves no core dump, and writes no
endless file. What it is not: a sandbox. It may do whatever the user may: read files, open connections, leave its
process group. And what runs inside the function's own process can answer in its place.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from multiprocessing.connection import wait as wait_for_input
from typing import Any, Literal

from fused_grpo.errors import InputError, RewardError
from fused_grpo.trainer.rewards.calling import RewardFunction, is_async
from fused_grpo.trainer.rewards.loading import load_reward

# Importing what a function needs may take long, and is no fault of any completion's.
START_SECONDS = 300.0
# More than a reward, its columns and its metrics need: what else is written there is no answer.
REPLY_BYTES = 16 << 20
SECRET_VARIABLE = re.compile(
    r"(^|_)(TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|PAT)S?$|^SSH_AUTH_SOCK$", re.I
)
Failed = float | None | Literal["raise"]

_log = logging.getLogger(__name__)


def isolated(
    function: RewardFunction | str,
    *,
    timeout: float,
    memory: int | None = None,
    on_failure: Failed = "raise",
    secrets: Sequence[str] = (),
) -> IsolatedReward:
    """The function, to be called in a process of its own, for one completion at a time.

    Args:
        function: a function that a new process can import (from the top level of a module), or its name as
            "module:name" or "path.py:name". Its arguments must be JSON: strings, numbers, lists, dicts.
        timeout: seconds for one completion.
        memory: bytes of address space that the worker may take. None: no limit.
        on_failure: the reward of a completion for which the function raises, takes too long or dies; None: not
            scored; "raise": RewardError.
        secrets: environment variables (OPENAI_API_KEY, ...) that the function needs although their names are those of
            secrets. The worker gets no others of that kind.

    Raises:
        InputError: a function that a new process cannot import, or options out of their range.
    """
    if not 0 < timeout < math.inf:
        raise InputError(f"got timeout={timeout}, want seconds > 0")
    if memory is not None and memory <= 0:
        raise InputError(f"got memory={memory}, want bytes > 0, or None for no limit")
    if isinstance(on_failure, str) and on_failure != "raise":
        raise InputError(f"got on_failure={on_failure!r}, want 'raise', a number or None")
    reference = function if isinstance(function, str) else _reference(function)
    loaded = load_reward(function) if isinstance(function, str) else function
    if is_async(loaded):
        raise InputError(f"got the async function {reference}, want a plain one: a worker does one thing at a time")
    reward = IsolatedReward(reference, timeout=timeout, memory=memory, on_failure=on_failure, secrets=secrets)
    # For its name, and for its signature: the trainer hands over what the function names.
    functools.update_wrapper(reward, loaded)
    return reward


class IsolatedReward:
    """See `isolated`. The function itself is only ever called in the worker."""

    def __init__(
        self, reference: str, *, timeout: float, memory: int | None, on_failure: Failed, secrets: Sequence[str] = ()
    ) -> None:
        self.reference, self.timeout, self.memory, self.on_failure = reference, timeout, memory, on_failure
        self.secrets = frozenset(secrets)
        self._worker: _Worker | None = None
        self._lock = threading.Lock()

    def __call__(
        self, *, log_extra: Any = None, log_metric: Any = None, trainer_state: Any = None, **columns: Sequence[Any]
    ) -> list[float | None]:
        """Rewards of B completions; the state of the trainer stays behind.

        Raises:
            RewardError: a completion failed, and `on_failure` is "raise"; or an argument is not JSON.
            InputError: the worker cannot load the function.
        """
        count = len(next(iter(columns.values())))
        with self._lock:
            replies = [self._ask({name: [values[index]] for name, values in columns.items()}) for index in range(count)]
        extra = dict.fromkeys(column for reply in replies for column in reply.get("extra", {}))
        for column in extra if log_extra else ():
            log_extra(column, [reply.get("extra", {}).get(column, [None])[0] for reply in replies])
        for reply in replies if log_metric else ():
            for name, logged in reply.get("metrics", {}).items():
                for value in logged:
                    log_metric(name, value)
        return [reply["value"] for reply in replies]

    def _ask(self, sample: dict[str, list[Any]]) -> dict[str, Any]:
        """The worker's reply about one completion, or what stands for it."""
        try:
            request = json.dumps(sample)
        except (TypeError, ValueError) as error:
            raise RewardError(
                f"got arguments for the isolated {self.reference} that are not JSON: {error}; "
                "fix: let the function name the arguments that it needs, in place of **columns"
            ) from error
        if self._worker is None:
            env = without_secrets(os.environ, keep=self.secrets)
            self._worker = _Worker(self.reference, timeout=self.timeout, memory=self.memory, env=env)
        try:
            reply = self._worker.ask(request, seconds=self.timeout)
        except (TimeoutError, OSError, EOFError, ValueError, RecursionError) as error:
            self._worker.kill()
            self._worker = None
            late = f"took longer than {self.timeout} s and was killed" if isinstance(error, TimeoutError) else "died"
            first = sample.get("prompts", next(iter(sample.values())))[0]
            reply = {"error": f"the process of the isolated {self.reference} {late}; at {first!r}; fix the function"}
        if "error" not in reply:
            return reply
        if self.on_failure == "raise":
            raise RewardError(f"{reply['error']}; or say what such a completion gets: isolated(..., on_failure=None)")
        _log.warning("%s; its reward is %s", reply["error"], self.on_failure)
        return {"value": self.on_failure}


class _Worker:
    """The process, and the two pipes to it."""

    def __init__(self, reference: str, *, timeout: float, memory: int | None, env: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fused_grpo.trainer.rewards.worker", reference, str(timeout), str(memory or 0)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**env, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            # A process group of its own: killed with all that the function started, and spared by Ctrl-C.
            start_new_session=True,
        )
        self.kill = weakref.finalize(self, _kill, self.process)
        try:
            ready = self._reply(START_SECONDS)
        except (TimeoutError, EOFError, ValueError) as error:
            ready = {"error": f"{type(error).__name__} {error}"}
        if "error" in ready:
            self.kill()
            raise InputError(f"got {reference}, which a new process cannot load: {ready['error']}")

    def ask(self, request: str, *, seconds: float) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(request.encode() + b"\n")
        self.process.stdin.flush()
        return self._reply(seconds)

    def _reply(self, seconds: float) -> dict[str, Any]:
        """The next line, which may come in pieces. TimeoutError: not in time; EOFError: never."""
        assert self.process.stdout is not None
        descriptor, deadline, received = self.process.stdout.fileno(), time.monotonic() + seconds, b""
        while not received.endswith(b"\n"):
            if not wait_for_input([descriptor], max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            piece = os.read(descriptor, 1 << 16)
            if not piece:
                raise EOFError
            received += piece
            if len(received) > REPLY_BYTES:
                raise ValueError(f"an answer of more than {REPLY_BYTES} bytes")
        reply = json.loads(received)
        if not isinstance(reply, dict) or not reply.keys() & {"ready", "value", "error"}:
            raise ValueError("something that is no answer")
        return reply


def without_secrets(environment: Mapping[str, str], *, keep: Collection[str] = ()) -> dict[str, str]:
    """The variables whose names are not those of secrets, and those to keep."""
    return {name: value for name, value in environment.items() if name in keep or not SECRET_VARIABLE.search(name)}


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):  # what was still to be written has no reader any more
            pipe.close()
    process.wait()


def _reference(function: RewardFunction) -> str:
    """The name under which a new process finds the function."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    home = sys.modules.get(module or "")
    if home is None or getattr(home, name, None) is not function:
        raise InputError(
            f"got {function!r}, which a new process cannot import; "
            "fix: a function at the top level of a module, or its name as 'module:name' or 'path.py:name'"
        )
    if module != "__main__":
        return f"{module}:{name}"
    if not str(getattr(home, "__file__", "")).endswith(".py"):
        raise InputError(f"got {name}, defined in no file; fix: put it into a module, for a new process to import it")
    return f"{home.__file__}:{name}"
