"""The environment behind an OpenEnv server: the tool `step` takes the fields of its action."""

from __future__ import annotations

import json
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

from fused_grpo.errors import InputError, quoted
from fused_grpo.trainer.common.contexts import finalizer
from fused_grpo.trainer.common.packages import installed


def openenv_environment(
    url: str,
    action: type[Any],
    *,
    show: Callable[[dict[str, Any]], str] = json.dumps,
    reward: Callable[[list[float]], float] = sum,
) -> type[Any]:
    """A class for `environment_factory`, of which each object has a session of the server.

    Args:
        url: of the server, which must allow as many sessions as a batch has episodes.
        action: the class of its actions.
        show: turns an observation into the text that the model reads.
        reward: turns the rewards of the steps into that of the episode, which is 0 where no step had one.

    InputError for an action that is no class of one; UnavailableError where openenv-core is not installed.
    """
    client = installed("openenv.core", extra="openenv").GenericEnvClient
    closed = installed("websockets.exceptions", extra="openenv").ConnectionClosed
    if not isinstance(action, type) or not hasattr(action, "model_fields"):
        raise InputError(f"got {quoted(action)} as the action, want a class of Action; fix: that of the server")

    class OpenEnv:
        def __init__(self) -> None:
            self._session = client(base_url=url).sync().connect()
            self._rewards, self.done = list[float](), False
            finalizer(self, self._session.close)  # a public method would be a tool

        def reset(self, seed: int, prompt: Any = None, **row: Any) -> str:
            self._rewards = []
            try:
                return self._read(self._session.reset(seed=seed, **row))
            except closed as error:  # what the server has said before that is not read any more
                raise ConnectionError(
                    f"the server has ended the session ({error}): it has stopped, or allows fewer at the same time "
                    "(max_concurrent_envs)"
                ) from error

        def step(self, **fields: Any) -> str:
            if self.done:
                raise ValueError("the episode has ended")
            try:
                result = self._session.step(action(**fields).model_dump(mode="json"))
            except TimeoutError:  # its late answer would be read as that of the next message
                self.done = True
                self._session.disconnect()  # the next `reset` connects again
                raise
            self._rewards += [] if result.reward is None else [float(result.reward)]
            return self._read(result)

        def get_reward(self) -> float:
            return float(reward(self._rewards)) if self._rewards else 0.0

        def _read(self, result: Any) -> str:
            self.done = bool(result.done)
            return show(result.observation)

    _describe(OpenEnv.step, action)
    return OpenEnv


def _describe(step: Any, action: Any) -> None:
    """Type hints and a docstring, of which transformers makes the schema: those of the action's fields."""
    fields = {name: field for name, field in action.model_fields.items() if name != "metadata"}  # all actions have it
    step.__annotations__ = {name: field.annotation for name, field in fields.items()}
    parameters = [Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)]
    for name, field in fields.items():
        default = Parameter.empty if field.is_required() else field.get_default(call_default_factory=True)
        parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=field.annotation))
    step.__signature__ = Signature(parameters)
    texts = [f"{name}: {' '.join((field.description or name).split())}" for name, field in fields.items()]
    step.__doc__ = "\n    ".join([f"{' '.join((action.__doc__ or 'Take a step.').split())}\n\nArgs:", *texts])
