"""The worker process of isolated functions: calls one reward function or tool for requests that it reads from stdin.

    python -m fused_grpo.trainer.rewards.worker <role> <function> <seconds> <bytes>

A request is a line: its number, and JSON: the columns of one completion for a reward function, the positional and the
named arguments for a tool. The worker echoes the number before it calls the function; then it replies with a line of
JSON: the value of the completion or the text of the tool, or an error. The function itself has an empty stdin, and its
stdout is stderr. What it forks reads no request and answers none, even where it returns from the function.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fused_grpo.errors import shown
from fused_grpo.trainer.rewards.isolation import REPLY_BYTES, is_isolated
from fused_grpo.trainer.rewards.reward_call import RewardCaller, RewardInputs, load_reward, reward_name

FILE_BYTES = 1 << 30  # of one file: writing more raises OSError
_NO_TEXT = re.compile(r"<.* at 0x[0-9a-f]+>+", re.I | re.S)  # of an object with an address alone: an image, a generator
_ERROR = 2000  # characters of a tool's exception


def main(role: str, reference: str, seconds: float, memory: int) -> None:
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    os.register_at_fork(after_in_child=functools.partial(_disconnect, requests.fileno(), replies.fileno()))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would hold prompts and columns
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    try:
        function = load_reward(reference, what=role)
    except Exception as error:
        print(json.dumps({"error": shown(error)}), file=replies)
        return
    # Where a module names the isolated function, or one around it, as the plain one was named.
    around = inspect.unwrap(function, stop=is_isolated)
    function = vars(around)["__wrapped__"] if is_isolated(around) else function
    answer: Callable[[Any], str] = functools.partial(tool_reply, function)
    if role != "tool":
        answer = functools.partial(reward_reply, RewardCaller(function, reward_name(function)))
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    print(json.dumps({"ready": True}), file=replies)
    for request in requests:
        # Ends a call that never returns where the trainer, which would kill it, has ended.
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds + 1)
        number, arguments = request.split(" ", 1)
        print(number, file=replies)
        reply = answer(json.loads(arguments))
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(reply, file=replies)
        if not _has_streams():  # the next call gets a new process
            return


def _has_streams() -> bool:
    """Whether code that the function ran has left standard output and error open."""
    with suppress(OSError):
        return all(map(os.fstat, (1, 2))) and not any(getattr(one, "closed", False) for one in (sys.stdout, sys.stderr))
    return False


def _disconnect(*descriptors: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nothing, descriptor)
    os.close(nothing)


def reward_reply(call: RewardCaller, columns: dict[str, list[Any]]) -> str:
    # `RewardInputs` counts the prompts, and the function may not take any.
    columns = {"prompts": next(iter(columns.values())), **columns}
    try:
        scores = call(RewardInputs(columns=columns), pinpoint=False)
        value = None if math.isnan(scores.values[0]) else scores.values[0]
        return json.dumps({"value": value, "extra": scores.extra, "metrics": scores.metrics})
    except Exception as error:
        return json.dumps({"error": shown(error)})


def tool_reply(tool: Callable[..., Any], arguments: tuple[list[Any], dict[str, Any]]) -> str:
    positional, named = arguments
    try:
        text = as_text(tool(*positional, **named))
        reply = json.dumps({"value": text[:REPLY_BYTES]})
        if len(reply) >= REPLY_BYTES:  # with the end of the line
            raise ValueError(f"the answer has {len(text)} characters, more than {REPLY_BYTES} bytes of JSON")
        return reply
    except BaseException as error:  # the process gets no signal that raises
        return json.dumps({"error": error_text(error)})


def as_text(result: Any) -> str:
    """What the model reads: text as it is, parts of text joined, and anything else as `str` writes it."""
    parts = [part for part in result if isinstance(part, dict)] if isinstance(result, list) else []
    if any("image" in str(part.get("type", "")) for part in parts):
        raise ValueError("the tool returned an image, and the model reads text alone")
    if parts and all("text" in part for part in parts) and len(parts) == len(result):
        return "".join(str(part["text"]) for part in parts)
    for entry in result if isinstance(result, list | tuple) else [result]:
        if not isinstance(entry, str | int | float | dict) and _NO_TEXT.fullmatch(str(entry)):
            raise ValueError(f"the tool returned a {type(entry).__name__}, and the model reads text alone")
    return str(result)


def error_text(error: BaseException) -> str:
    """What the model reads of an exception: its text, or its name where it has none."""
    with suppress(BaseException):  # of its own `__str__`
        return shown(error, _ERROR) or type(error).__name__
    return type(error).__name__


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
