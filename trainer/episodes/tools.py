"""Functions that a model may call, and their answers (docs/agents.md).

One thread for the episode answers the calls of a turn. A time limit ends the wait, not the call: a plain function goes
on in its daemon thread.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from functools import partial
from typing import Any

from fused_grpo.errors import InputError, elide_middle
from fused_grpo.trainer.common.threads import event_loop, in_thread, leave_blocked_loop
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.data.prompts import schema_of
from fused_grpo.trainer.rewards.isolation import CannotLoadError, is_isolated
from fused_grpo.trainer.rewards.reward_call import is_async, own_copy
from fused_grpo.trainer.rewards.worker import as_text, error_text
from fused_grpo.trainer.types import ToolCall

Tool = Callable[..., Any]
Slots = threading.Semaphore  # of calls at the same time, of all episodes
ASYNC = "async tools"  # the name of their event loop: one that blocks it stops no reward
_THREAD_ERRORS = re.compile("(main|same|different|another) thread")  # errors of SQLite, signals, Playwright
_RECORDED = 10_000  # characters of an answer, in rollouts.jsonl and the report


def check_tools(tools: Any) -> list[Tool]:
    """The tools as a list; InputError for one without a schema: type hints and a docstring of Google's style."""
    listed = list(tools) if isinstance(tools, list | tuple) else [tools]
    names = set[str]()
    for tool in listed:
        name = getattr(tool, "__name__", None)
        if not (inspect.isfunction(tool) or inspect.ismethod(tool)) or name is None:
            raise InputError(f"got {tool!r} among the tools, want functions; fix: a function or a bound method")
        if name in names:
            raise InputError(f"got two tools called {name!r}, want one of each name; fix: rename one")
        names.add(name)
        try:
            schema = schema_of(tool)
            json.dumps(schema, ensure_ascii=False).encode()  # half of a surrogate pair reaches no tokenizer
        except Exception as error:  # of several types, all about what is missing
            raise InputError(
                f"got the tool {name!r}, of which no schema can be made ({error}); fix: type hints of all arguments, "
                "and a docstring with a description and a section 'Args:' that describes each"
            ) from error
        by_name, parameters = schema["function"]["parameters"]["properties"], inspect.signature(tool).parameters
        by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
        unnamed = [str(one) for name, one in parameters.items() if name not in by_name or one.kind in by_place]
        if unnamed or inspect.isgeneratorfunction(tool) or inspect.isasyncgenfunction(tool):
            got = f"the argument {unnamed[0]}" if unnamed else "yield"
            raise InputError(
                f"got the tool {name!r} with {got}, want arguments that a call gives by their names, and an answer "
                "that is returned; fix: a function around it, or the method of an object in the place of its class's"
            )
    return listed


class Answers:
    """Answers the calls of one episode, each within `timeout` seconds; with `slots`, when one of them is free."""

    def __init__(self, tools: Sequence[Tool], *, timeout: float, slots: Slots | None = None) -> None:
        self._tools: Mapping[str, Tool] = {tool.__name__: tool for tool in tools}
        self._timeout, self._slots = timeout, slots
        self.has_timed_out = False  # a call may still be running
        self._is_late = False  # a call of this turn took too long

    def start(self, calls: Sequence[Mapping[str, Any]], *, most: int) -> Future[list[tuple[ToolCall, str]]]:
        """The calls with their answers, in their order, as text of at most `most` + 1 characters: megabytes add up."""
        return in_thread(partial(self._all, [call["function"] for call in calls], most), name="tools")

    def _all(self, calls: list[Mapping[str, Any]], most: int) -> list[tuple[ToolCall, str]]:
        self._is_late = False
        # Coroutines run while plain functions are called.
        start, tools = time.perf_counter(), [self._tools.get(call["name"]) for call in calls]
        running = [
            self._started(tool, call) if tool and is_async(tool) and self._slots is None else None
            for tool, call in zip(tools, calls, strict=True)
        ]
        answers = list[tuple[ToolCall, str]]()
        for each in zip(calls, tools, running, strict=True):
            with self._slots or nullcontext():
                answers.append(self._answer(*each, start, most))
        return answers

    def _started(self, tool: Tool, call: Mapping[str, Any]) -> Future[str]:
        arguments = own_copy(call["arguments"])  # a tool may edit what it is given

        async def awaited(begin: Callable[[], Any]) -> str:
            return as_text(await begin())  # begun here: a call with wrong arguments raises at once

        def on_loop(begin: Callable[[], Any]) -> Future[str]:
            return asyncio.run_coroutine_threadsafe(awaited(begin), event_loop(ASYNC))

        def called() -> str:
            answer = tool(**arguments)
            # Awaitable is what a decorator around a coroutine function returns, say.
            return on_loop(lambda: answer).result() if inspect.isawaitable(answer) else as_text(answer)

        return on_loop(lambda: tool(**arguments)) if is_async(tool) else in_thread(called, name="tool")

    def _answer(
        self, call: Mapping[str, Any], tool: Tool | None, running: Future[str] | None, start: float, most: int
    ) -> tuple[ToolCall, str]:
        start, failed = start if running else time.perf_counter(), False
        try:
            if tool is None:
                raise ValueError(f"Tool {call['name']} not found.")
            if running is None and self._is_late:
                raise TimeoutError(f"{call['name']} was not called: a call before it took too long")
            running = running or self._started(tool, call)
            # An isolated tool has a limit of its own, which begins when it has a process.
            seconds_left = None if is_isolated(tool) else start + self._timeout - time.perf_counter()
            if not wait([running], seconds_left).done:
                running.cancel()
                self.has_timed_out = self._is_late = True
                leave_blocked_loop(ASYNC, timeout=self._timeout)
                raise TimeoutError(f"{call['name']} took longer than {self._timeout:g} s")
            text = running.result()
        except BaseException as error:  # of the tool's: signals reach the main thread alone
            if isinstance(error, CannotLoadError):
                raise  # which no model can mend
            text, failed = str({"error": error_text(error)}), True
            if _THREAD_ERRORS.search(text):
                warn_once(
                    f"got {text[:500]} from the tool {call['name']!r}, and plain functions run in threads, none of "
                    "which is the main one; fix: objects for any thread, as sqlite3.connect(..., check_same_thread="
                    "False) makes, and no signals"
                )
        recorded, text, seconds = clean(elide_middle(text, _RECORDED)), text[: most + 1], time.perf_counter() - start
        return ToolCall(call["name"], own_copy(call["arguments"]), recorded, failed, seconds), clean(text)


def clean(text: str) -> str:
    """Without lone surrogates, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode("utf-8")
