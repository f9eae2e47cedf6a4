"""A taskset of verifiers 0.4 (`verifiers.v1`) as a `Task`: its rows, and its rewards for a completion of one turn.

Here the trainer samples, and the task's rewards read the conversation: docs/environments.md says which tasks need more.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any, cast

from fused_grpo.errors import InputError, UnsupportedError, quoted, shown
from fused_grpo.trainer.common.packages import installed
from fused_grpo.trainer.tasks.task import Task


def verifiers_task(taskset: Any, *, size: int | None = None, heldout_size: int = 0) -> Task:
    """The rows of a taskset, and the weighted sum of its rewards as one function.

    Args:
        taskset: a `Taskset`, or the id of an installed one.
        size: rows to train on. None: all but the held-out ones.
        heldout_size: held-out rows, the first ones.

    Raises:
        UnavailableError: verifiers is not installed.
        InputError: no such taskset, no rows to train on, or a taskset without an end and no `size`.
        UnsupportedError: tasks with tools, sandboxes, or a loop of their own.
    """
    vf = installed("verifiers.v1", extra="verifiers")
    if any(not isinstance(number, int) or number < least for number, least in ((size or 1, 1), (heldout_size, 0))):
        raise InputError(f"got size={size} and heldout_size={heldout_size}, want numbers of rows; fix: size >= 1")
    if isinstance(taskset, str):
        taskset = _loaded(vf, taskset)
    if not isinstance(taskset, vf.Taskset):
        raise InputError(f"got {quoted(taskset)}, want a Taskset of verifiers.v1, or the id of one; fix: Kind(config)")
    name = taskset.config.name or type(taskset).__name__
    if size is None and not taskset.bounded:
        raise InputError(f"got {name}, which has no end, and no size, want a number of rows; fix: size=...")
    tasks = list(taskset if size is None else taskset.take(heldout_size + size))
    if len(tasks) <= heldout_size:
        raise InputError(f"got {len(tasks)} tasks of {name}, want more than heldout_size={heldout_size}; fix: fewer")
    kinds = {(type(one), one.data.prompt is None): one for one in tasks}
    if needs := dict.fromkeys(need for one in kinds.values() for need in _needs(vf, taskset, one)):
        raise UnsupportedError(
            f"got tasks of {name} that need {', '.join(needs)}, want rewards that read a completion of one turn; fix: "
            "an environment of your own (docs/agents.md)"
        )

    async def reward(prompts: Any, completions: Any, task_number: Any, **columns: Any) -> list[float]:
        said = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
        scores = (_score(vf, tasks[number], one) for number, one in zip(task_number, said, strict=True))
        return list(await asyncio.gather(*scores))

    reward.__name__ = name
    rows = [{"prompt": _prompt(task.data), "task_number": number} for number, task in enumerate(tasks)]
    train, heldout = rows[heldout_size:], rows[:heldout_size]
    return Task(name=name, train=train, heldout=heldout, reward=cast(Any, reward))


def _loaded(vf: Any, name: str) -> Any:
    try:
        return vf.load_taskset(vf.taskset_config_type(name)(id=name))
    except Exception as error:
        raise InputError(
            f"got {name!r}, of which verifiers loads no taskset ({shown(error, 500)}); fix: the id of an installed one"
        ) from error


def _needs(vf: Any, taskset: Any, task: Any) -> list[str]:
    """What of a task happens in the loops of verifiers alone."""
    kind = type(task)
    names = ("setup", "finalize", "stage_verifier")
    needs = [f"{hook}()" for hook in names if getattr(kind, hook, None) is not getattr(vf.Task, hook, None)]
    needs += [f"the stop condition {hook.__name__}" for hook in task.hooks("stop")]
    hooks = [*task.hooks("reward"), *(judge.score for judge in task.plugged_judges())]
    needs += [] if hooks else ["rewards of their own, of which they have none"]
    # verifiers leaves out rewards without the runtime that they require, and calls the others with its default.
    runtimes = ((hook.__name__, inspect.signature(hook).parameters.get("runtime")) for hook in hooks)
    needs += [f"a runtime for the reward {name}" for name, one in runtimes if one and one.default is one.empty]
    tools = [*task.toolsets(task.config), *taskset.toolsets(taskset.config)]
    needs += [f"the tools {type(one).__name__}" for one in tools]
    needs += ["a container"] * kind.NEEDS_CONTAINER + ["a user who begins"] * (task.data.prompt is None)
    return needs + ["a loop of their own"] * (vf.environment_class(taskset.config.id) is not vf.SingleAgentEnv)


def _prompt(data: Any) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    return [*system, *(message.model_dump(exclude_none=True) for message in data.prompt)]


async def _score(vf: Any, task: Any, conversation: list[Any]) -> float:
    """The weighted sum of the rewards of a conversation, whose last message was sampled."""
    last = len(conversation) - 1
    nodes = [
        vf.MessageNode(message=message, parent=place - 1 if place else None, sampled=place == last)
        for place, message in enumerate(conversation)
    ]
    trace = vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=nodes,
        is_completed=True,
        ok=True,
    )
    await task.score(trace)
    return float(trace.reward)
