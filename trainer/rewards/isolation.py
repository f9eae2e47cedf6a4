"""A reward function in a process of its own, which can be killed.

For what a trainer must not do in its own process: run or parse what a model wrote. A completion that sends the function
into an endless loop, or makes it ask for all the memory there is, costs a worker process and nothing else.

One worker lives as long as the function is used. It is asked about one completion at a time, so that a failure is that
completion's alone; when it takes too long, or dies, its whole process group is killed and a new one started. It is a
bare interpreter, not a copy of this one: it loads the function by name and does not run the user's script again.
Requests and replies are lines of JSON, because a process that runs a model's code is not one to unpickle things from.

A worker repeats the number of a request, which nobody can guess, when it takes it up. One that does not is held up by
what an earlier completion left running, or left in the pipe: a fresh one is asked instead.

The worker's environment is without what looks like a secret, it has none of the trainer's open files, leaves no core
dump, and writes no endless file. What it is not: a sandbox. It may do whatever the user may: read files (the trainer's
own environment in /proc, too), open connections, leave its process group. And what runs inside the function's own
process can answer in its place, as long as that process lives.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from fused_grpo.errors import InputError, RewardError
from fused_grpo.trainer.rewards.calling import FLOAT32_MAX, RewardFunction, is_async
from fused_grpo.trainer.rewards.loading import load_reward

# Importing what a function needs may take long, and is no fault of any completion's.
START_SECONDS = 300.0
# Of one completion, and so of a line of rollouts.jsonl: what is beyond that is no answer.
REPLY_BYTES, LOGGED_NAMES, LOGGED_LEVELS = 1 << 18, 64, 20
SECRET_NAME = re.compile(
    r"TOKEN(?!IZE)|SECRET|PASSW|PASSPHRASE|PASS$|CREDENTIAL|COOKIE|KEYS?([_\d]|$)|(^|_)(AUTH(_|$)|PATS?$)|_PWD$",
    re.I,
)
# A user in an address, with or without a password, and what connection strings call theirs.
SECRET_VALUE = re.compile(r"://[^/\s]*@|(password|passwd|pwd|secret|token|key)=\S", re.I)
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
        secrets: environment variables (OPENAI_API_KEY, ...) that the function needs although their names or values
            look like secrets. The worker gets no others of that kind.

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
                    # What has no mean is logged as null; the sum of two infinities is an error.
                    log_metric(name, value if abs(value) <= FLOAT32_MAX else math.nan)
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
        worker = self._worker_that_takes(request)
        try:
            if worker is None:
                raise TimeoutError
            reply = worker.reply(seconds=self.timeout)
        except (OSError, EOFError, ValueError, RecursionError) as error:
            self._end_worker()
            first = sample.get("prompts", next(iter(sample.values())))[0]
            what = f"the process of the isolated {self.reference} {self._failure(error)}"
            reply = {"error": f"{what}; at {first!r}; fix the function"}
        if "error" not in reply:
            return reply
        if self.on_failure == "raise":
            raise RewardError(f"{reply['error']}; or say what such a completion gets: isolated(..., on_failure=None)")
        _log.warning("%s; its reward is %s", reply["error"], self.on_failure)
        return {"value": self.on_failure}

    def _worker_that_takes(self, request: str) -> _Worker | None:
        """The worker that has taken up the request; None: not even a fresh one did.

        Raises:
            InputError: a fresh one cannot load the function.
        """
        if self._worker is not None and not self._worker.takes(request, seconds=self.timeout):
            _log.warning("the process of the isolated %s took up no more requests; a new one is asked", self.reference)
            self._end_worker()
        if self._worker is None:
            env = without_secrets(os.environ, keep=self.secrets)
            fresh = _Worker(self.reference, timeout=self.timeout, memory=self.memory, env=env)
            self._worker = fresh
            if not fresh.takes(request, seconds=self.timeout):
                self._end_worker()
        return self._worker

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    def _failure(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"took longer than {self.timeout} s and was killed"
        return "died" if isinstance(error, OSError | EOFError) else f"answered with {error} and was killed"


class _Worker:
    """The process, and the two pipes to it."""

    def __init__(self, reference: str, *, timeout: float, memory: int | None, env: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fused_grpo.trainer.rewards.worker", reference, str(timeout), str(memory or 0)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**env, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            # A process group of its own: killed with all that the function started, and spared by Ctrl-C.
            start_new_session=True,
        )
        self.kill = weakref.finalize(self, _kill, self.process)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.requests, self.replies, self.received = self.process.stdin.fileno(), self.process.stdout.fileno(), b""
        os.set_blocking(self.requests, False)
        try:
            ready = json.loads(self._line(time.monotonic() + START_SECONDS))
        except (OSError, EOFError, ValueError) as error:
            ready = {"error": f"{type(error).__name__} {error}"}
        if "error" in ready:
            self.kill()
            raise InputError(f"got {reference}, which a new process cannot load: {ready['error']}")

    def takes(self, request: str, *, seconds: float) -> bool:
        """Hand over a request. False: it was not read in time, or something else than its number came back."""
        number, deadline = os.urandom(8).hex().encode(), time.monotonic() + seconds
        rest = memoryview(b"%s %s\n" % (number, request.encode()))
        try:
            while rest:
                _wait_for(self.requests, select.POLLOUT, deadline)
                rest = rest[os.write(self.requests, rest) :]
            return self._line(deadline) == number
        except (OSError, EOFError, ValueError):
            return False

    def reply(self, *, seconds: float) -> dict[str, Any]:
        """The answer to the request taken up. TimeoutError: not in time; EOFError: never; ValueError: it is none."""
        line = self._line(time.monotonic() + seconds)
        if self.received:
            raise ValueError("more than one line")
        return checked_reply(line)

    def _line(self, deadline: float) -> bytes:
        """The next line, which may come in pieces, or with the one after it."""
        while b"\n" not in self.received:
            _wait_for(self.replies, select.POLLIN, deadline)
            piece = os.read(self.replies, 1 << 16)
            if not piece:
                raise EOFError
            self.received += piece
            if len(self.received) > REPLY_BYTES:
                raise ValueError(f"more than {REPLY_BYTES} bytes")
        line, _, self.received = self.received.partition(b"\n")
        return line


def checked_reply(line: bytes) -> dict[str, Any]:
    """What the worker says about one completion. It may have been written by what the function ran.

    Raises:
        ValueError: the trainer could not go on with it.
    """
    reply = json.loads(line)
    json.dumps(reply, ensure_ascii=False).encode()  # half a surrogate pair cannot be written to rollouts.jsonl
    match reply:
        case {"error": str(error)}:
            return {"error": error}
        case {"value": None | float() as value, "extra": dict(extra), "metrics": dict(metrics)}:
            if value is not None and not abs(value) <= FLOAT32_MAX:
                raise ValueError(f"the reward {value}")
            if len(extra) + len(metrics) > LOGGED_NAMES:
                raise ValueError(f"more than {LOGGED_NAMES} columns and metrics")
            if _nests(extra, LOGGED_LEVELS):
                raise ValueError(f"columns of more than {LOGGED_LEVELS} levels")
            columns = all(isinstance(logged, list) and len(logged) == 1 for logged in extra.values())
            numbers = (
                isinstance(logged, list) and all(type(n) is float for n in logged) for logged in metrics.values()
            )
            if columns and all(numbers):
                return {"value": value, "extra": extra, "metrics": metrics}
    raise ValueError("something that is no answer")


def _nests(value: Any, levels: int) -> bool:
    """Whether lists and dicts lie in one another deeper than that."""
    inner = value.values() if isinstance(value, dict) else value
    return isinstance(value, dict | list) and (levels == 0 or any(_nests(item, levels - 1) for item in inner))


def _wait_for(descriptor: int, event: int, deadline: float) -> None:
    """Until a pipe can be read or written. TimeoutError: not in time."""
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
        raise TimeoutError


def without_secrets(environment: Mapping[str, str], *, keep: Collection[str] = ()) -> dict[str, str]:
    """The variables of which neither name nor value looks like a secret, and those to keep."""
    return {
        name: value
        for name, value in environment.items()
        if name in keep or not (SECRET_NAME.search(name) or SECRET_VALUE.search(value))
    }


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
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
