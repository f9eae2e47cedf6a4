"""Tools in processes of their own, which can be killed: rewards/isolation.py has their limits."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from queue import LifoQueue
from typing import Any

from fused_grpo.errors import InputError
from fused_grpo.trainer.rewards.isolation import IsolatedFunction, WorkerError, checked_text, importable
from fused_grpo.trainer.rewards.reward_call import reward_name


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
        memory: limit of a process's address space, in bytes. None: no limit.
        workers: how many processes there are at most; they start when they are needed, and make one call at a time.
        secrets: environment variables that a process gets although their names or values look like secrets.

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
        idle.put(IsolatedFunction(reference, timeout=timeout, memory=memory, secrets=secrets, what="tool"))

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
