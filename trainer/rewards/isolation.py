"""A reward function or a tool in processes of its own, with a time limit and a memory limit.

docs/rewards.md and docs/agents.md have what a user sees. Requests and replies are lines of JSON over a socket pair: a
reply from a process that runs model output must not be unpickled. That rules out process pools (concurrent.futures,
pebble): they unpickle replies, and "spawn" runs the user's script again. pebble also leaves alive what a killed worker
has started.

Before it replies, a worker echoes the random number of the request. If it does not, an earlier completion has left
something behind (a busy thread, unread output), and a new worker gets the request. This is not a sandbox (SECURITY.md).
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from queue import LifoQueue
from typing import Any, BinaryIO, ClassVar, Literal, TypeVar

from fused_grpo.errors import InputError, RewardError, quoted, shown
from fused_grpo.trainer.common.contexts import finalizer
from fused_grpo.trainer.common.redaction import without_secrets
from fused_grpo.trainer.common.threads import LONGEST, in_thread
from fused_grpo.trainer.rewards.reward_call import FLOAT32_MAX, RewardFunction, is_async, load_reward, reward_name

WORKER = "fused_grpo.trainer.rewards.worker"
START_SECONDS = 300.0  # to import the function's module, which no completion is to blame for
REPLY_BYTES = 1 << 18  # of one completion or tool call
_INSIDE = "FUSED_GRPO_ISOLATED"  # the variable of a worker with the names of the functions in whose workers it began
Failed = float | None | Literal["raise"]
Role = Literal["reward function", "tool"]
T = TypeVar("T")

_log = logging.getLogger(__name__)


def isolated(
    function: RewardFunction | str,
    *,
    timeout: float,
    memory: int | None = None,
    on_failure: Failed = "raise",
    secrets: Sequence[str] = (),
) -> IsolatedReward:
    """The function as a reward function that runs in a process of its own, one completion at a time.

    Args:
        function: a function at the top level of a module, or its name as "module:name" or "path.py:name". Its
            arguments must be JSON: strings, numbers, lists, dicts.
        timeout: seconds for one completion.
        memory: limit of the worker's address space, in bytes. None: no limit.
        on_failure: the reward of a completion for which the function raises, exceeds the timeout or dies. None: not
            scored. "raise": RewardError.
        secrets: environment variables that the worker gets although their names or values look like secrets
            ("OPENAI_API_KEY"). Without this it gets none of them.

    InputError for a function that a new process cannot import, an async one, or an option out of range.
    """
    if isinstance(on_failure, str) and on_failure != "raise":
        raise InputError(f"got on_failure={on_failure!r}, want 'raise', a number or None")
    reference, loaded = importable(function, "reward function", timeout=timeout, memory=memory)
    reward = IsolatedReward(reference, timeout=timeout, memory=memory, on_failure=on_failure, secrets=secrets)
    # The trainer reads the name and the signature.
    functools.update_wrapper(reward, loaded)
    return reward


def isolated_tool(
    tool: Callable[..., Any] | str,
    *,
    timeout: float,
    memory: int | None = None,
    workers: int = 4,
    secrets: Sequence[str] = (),
) -> Callable[..., str]:
    """The function as a tool whose calls run in processes of their own, with its name, signature and docstring.

    Args:
        tool: a function at the top level of a module, or its name as "module:name" or "path.py:name".
        timeout: seconds of a call, in the place of `tool_timeout`. The wait for a free process does not count.
        memory, secrets: as of `isolated`.
        workers: how many processes there are at most; they start when they are needed, and make one call at a time.

    Raises:
        InputError: a function that a new process cannot import, an async function, or an option out of range; in a
            call, one that a new process cannot load, which ends the run.
        RuntimeError: in a call, the tool raised, exceeded a limit or ended its process.
    """
    if workers < 1:
        raise InputError(f"got workers={workers}, want processes >= 1")
    reference, function = importable(tool, "tool", timeout=timeout, memory=memory)
    # The one that was called last is called next, so that no more start than are needed.
    idle = LifoQueue[IsolatedFunction]()
    for _ in range(workers):
        idle.put(IsolatedFunction(reference, timeout=timeout, memory=memory, secrets=secrets, role="tool"))

    @functools.wraps(function)
    def call(*positional: Any, **named: Any) -> str:
        request, worker = json.dumps([positional, named]), idle.get()
        try:
            reply = worker.reply(request, checked_text)
        except WorkerError as error:
            raise RuntimeError(f"the process of {reward_name(function)} {error}") from error
        finally:
            idle.put(worker)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply["value"]

    vars(call)["is_isolated"] = True
    return call


def importable(
    function: RewardFunction | str, role: Role, *, timeout: float, memory: int | None
) -> tuple[str, RewardFunction]:
    """The name by which a new process imports a function, and the function; InputError as `isolated`."""
    if not 0 < timeout <= LONGEST:
        raise InputError(f"got timeout={timeout}, want seconds > 0, {LONGEST} at most")
    if memory is not None and memory <= 0:
        raise InputError(f"got memory={memory}, want bytes > 0, or None for no limit")
    reference = function if isinstance(function, str) else _reference(function)
    loaded = load_reward(function, what=role) if isinstance(function, str) else function
    if is_async(loaded):
        raise InputError(f"got the async function {reference}, want a plain one: a worker does one thing at a time")
    return reference, loaded


def is_isolated(function: Any) -> bool:
    """Whether it is an isolated function, and not one around it, which has its attributes by `functools.wraps`."""
    return hasattr(function, "is_isolated") and not hasattr(getattr(function, "__wrapped__", None), "is_isolated")


class CannotLoadError(InputError):
    """No new process can import the function, whatever it is called with."""


class WorkerError(Exception):
    """A worker exceeded its time limit, died, or answered with something that is no reply; the text says which."""


@dataclass(eq=False)
class IsolatedFunction:
    """A function that a worker process calls, for one request at a time."""

    reference: str
    timeout: float
    memory: int | None
    secrets: Collection[str] = ()
    role: Role = "reward function"
    _worker: Worker | None = None
    is_isolated: ClassVar[bool] = True

    def reply(self, request: str, checked: Callable[[bytes], T]) -> T:
        """What `checked`, which raises ValueError where that is none, makes of the worker's reply; errors as `Worker`.

        WorkerError: there is no reply; the next request gets a new worker.
        """
        try:
            return checked(self._worker_with(request).line(self.timeout))
        except InputError:
            raise
        except (OSError, EOFError, ValueError, RecursionError) as error:
            self._end_worker()
            fate = "died" if isinstance(error, OSError | EOFError) else f"answered with {error} and was killed"
            if isinstance(error, TimeoutError):
                fate = f"took longer than {self.timeout} s and was killed"
            raise WorkerError(fate) from error

    def _worker_with(self, request: str) -> Worker:
        """The worker, which has accepted the request, or else a new one; TimeoutError where that does not either."""
        if self._worker is not None:
            if self._worker.accepts(request, self.timeout):
                return self._worker
            _log.warning("the process of the isolated %s accepts no more requests; starting a new one", self.reference)
            self._end_worker()
        self._worker = Worker(self)
        if not self._worker.accepts(request, self.timeout):
            raise TimeoutError
        return self._worker

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None


@dataclass(eq=False)
class IsolatedReward(IsolatedFunction):
    """A reward function that is called in a worker process; made by `isolated`."""

    on_failure: Failed = "raise"
    _lock: Any = field(default_factory=threading.Lock)

    def __call__(
        self, *, log_extra: Any = None, log_metric: Any = None, trainer_state: Any = None, **columns: Sequence[Any]
    ) -> list[float | None]:
        """Rewards of B completions; `trainer_state` is not passed on. InputError: the worker cannot load the function.

        RewardError: a completion failed, and `on_failure` is "raise"; or an argument is not JSON.
        """
        count = len(next(iter(columns.values())))
        with self._lock:
            replies = [self._score({name: [values[i]] for name, values in columns.items()}) for i in range(count)]
        names = dict.fromkeys(name for reply in replies for name in reply["extra"])
        for name in names if log_extra else ():
            log_extra(name, [reply["extra"].get(name, [None])[0] for reply in replies])
        for reply in replies if log_metric else ():
            for name, logged in reply["metrics"].items():
                for value in logged:
                    log_metric(name, value if abs(value) <= FLOAT32_MAX else math.nan)
        return [reply["value"] for reply in replies]

    def _score(self, sample: dict[str, list[Any]]) -> dict[str, Any]:
        """The worker's reply for one completion; after a failure, one with `on_failure` as its value."""
        try:
            request = json.dumps(sample)
        except (TypeError, ValueError) as error:
            raise RewardError(
                f"got arguments for the isolated {self.reference} that are not JSON: {error}; "
                "fix: let the function name the arguments that it needs, in place of **columns"
            ) from error
        try:
            reply = self.reply(request, checked_reply)
        except WorkerError as error:
            first = sample.get("prompts", next(iter(sample.values())))[0]
            what = f"the process of the isolated {self.reference} {error}; at {quoted(first)}; fix the function"
            reply = {"error": what}
        if "error" not in reply:
            return reply
        if self.on_failure == "raise":
            raise RewardError(f"{reply['error']}; or give such completions a reward: isolated(..., on_failure=None)")
        _log.warning("%s; its reward is %s", shown(reply["error"]), self.on_failure)
        return {"value": self.on_failure, "extra": {}, "metrics": {}}


class Worker:
    """The worker process, and the socket to it; InputError: it cannot load the function, RewardError: none starts."""

    def __init__(self, function: IsolatedFunction) -> None:
        reference, limits = function.reference, (str(function.timeout), str(function.memory or 0))
        inside = os.environ.get(_INSIDE, "").splitlines()
        if reference in inside:  # each would start another one, without an end
            raise InputError(
                f"got {reference}, which is called in its own process, where that name means a function around it; "
                "fix: give one of the two another name, or functools.wraps"
            )
        self.socket, worker_socket = socket.socketpair()
        self.replies = self.socket.makefile("rb")
        try:
            with worker_socket:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", WORKER, function.role, reference, *limits],
                    stdin=worker_socket.fileno(),
                    stdout=worker_socket.fileno(),
                    env={
                        **without_secrets(os.environ, keep=function.secrets),
                        "PYTHONPATH": import_path(),
                        "PYTHONHASHSEED": "0",  # in all workers one order of a set
                        _INSIDE: "\n".join([*inside, reference]),
                    },
                    # A process group, which is killed with what it started, and which Ctrl-C does not reach.
                    start_new_session=True,
                )
        except OSError as error:
            message = f"got no process for the isolated {reference} ({error}); fix: free memory or processes"
            raise RewardError(message) from error
        self.kill = finalizer(self, _kill, self.process, self.socket, self.replies)
        try:
            ready = json.loads(self.line(START_SECONDS))
        except (OSError, EOFError, ValueError) as error:
            ready = {"error": f"{type(error).__name__} {error}"}
        if "error" in ready:
            self.kill()
            raise CannotLoadError(f"got {reference}, which a new process cannot load: {ready['error']}")

    def accepts(self, request: str, seconds: float) -> bool:
        """Send a request; True if the worker echoes its number in time."""
        number = os.urandom(8).hex()
        with contextlib.suppress(OSError, EOFError, ValueError):
            return self.line(seconds, request=f"{number} {request}\n") == f"{number}\n".encode()
        return False

    def line(self, seconds: float, *, request: str = "") -> bytes:
        """Send a request and read the next line; TimeoutError, EOFError, or ValueError for one that is too long."""
        connection, replies = self.socket, self.replies  # not `self`, whose last reference ends the process

        def exchange() -> bytes:
            # An exception in a future would be a reference cycle that holds `self`.
            with contextlib.suppress(OSError):  # it has ended: what it said before that is read
                connection.sendall(request.encode())
            with contextlib.suppress(OSError):
                return replies.readline(REPLY_BYTES)
            return b""

        line = in_thread(exchange, name="isolated function").result(seconds)
        if not line:
            raise EOFError
        if not line.endswith(b"\n"):
            raise ValueError(f"more than {REPLY_BYTES} bytes, or half a line")
        return line


def import_path() -> str:
    """The PYTHONPATH of a new interpreter that imports what this one does. Imports ignore a Path in `sys.path`."""
    return os.pathsep.join(folder or os.getcwd() for folder in sys.path if isinstance(folder, str))


def checked_text(line: bytes) -> dict[str, str]:
    """The reply of a tool, as `checked_reply`."""
    reply: dict[str, str] = json.loads(line)
    match reply:
        case {"value": str()} | {"error": str()}:
            return reply
    raise ValueError("something that is not an answer")


def checked_reply(line: bytes) -> dict[str, Any]:
    """The reply in a line, which code that the function ran may have written; ValueError where it is none."""
    reply = json.loads(line)
    json.dumps(reply, ensure_ascii=False).encode()  # a lone surrogate cannot be written to rollouts.jsonl
    match reply:
        case {"error": str(error)}:
            return {"error": error}
        case {"value": None | float() as value, "extra": dict(extra), "metrics": dict(metrics)}:
            lists = all(isinstance(logged, list) for logged in (*extra.values(), *metrics.values()))
            one_each = lists and all(len(logged) == 1 for logged in extra.values())
            numbers = lists and all(type(number) is float for logged in metrics.values() for number in logged)
            if one_each and numbers and (value is None or abs(value) <= FLOAT32_MAX):
                return {"value": value, "extra": extra, "metrics": metrics}
    raise ValueError("something that is not an answer")


def _kill(process: subprocess.Popen[bytes], connection: socket.socket, replies: BinaryIO) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # ends a thread that still reads or writes
    replies.close()
    connection.close()
    process.wait()


def _reference(function: RewardFunction) -> str:
    """The name by which a new process imports the function; InputError where it has none."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    source = sys.modules.get(module or "")
    if source is None or getattr(source, name, None) is not function:
        raise InputError(
            f"got {function!r}, which a new process cannot import; "
            "fix: a function at the top level of a module, or its name as 'module:name' or 'path.py:name'"
        )
    spec = getattr(source, "__spec__", None)
    imported = spec.name if spec is not None and module == "__main__" else source.__name__  # of `python -m`
    if not imported.startswith(("__main__", "reward_file_")):  # a script, or what `load_reward` ran
        return f"{imported}:{name}"
    if not str(getattr(source, "__file__", "")).endswith(".py"):
        raise InputError(f"got {name}, defined in no file; fix: put it into a module, for a new process to import it")
    return f"{source.__file__}:{name}"
