"""Reward functions by name: `module:name`, `module.name` or `path.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from fused_grpo.errors import InputError
from fused_grpo.trainer.rewards.calling import RewardFunction


def load_reward(name: str) -> RewardFunction:
    """The function of that name. Its module is imported, or the file run.

    Raises:
        InputError: not of a form that names a function, or nothing callable there.
    """
    source, _, attribute = name.rpartition(":" if ":" in name else ".")
    if not source:
        raise InputError(f"got reward function {name!r}, want module:name, module.name or path.py:name")
    try:
        module = _run_file(Path(source)) if source.endswith(".py") else _import(source)
        function: Any = getattr(module, attribute)
    except Exception as error:  # whatever the file does when it runs
        raise InputError(f"got reward function {name!r}, which cannot be loaded: {error}") from error
    if not callable(function):
        raise InputError(f"got reward function {name!r}, which is a {type(function).__name__}, want something callable")
    loaded: RewardFunction = function
    return loaded


def names_a_function(name: str) -> bool:
    """Whether a string is the name of a function: it has a colon, or is `module.name` of a module that exists."""
    module, _, attribute = name.rpartition(".")
    if Path(name).exists() or ":" in name:
        return not Path(name).exists()
    if not (module and name.replace(".", "").isidentifier() and attribute):
        return False
    _search_here()
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _run_file(path: Path) -> ModuleType:
    # Under a name of its own: a user's file may be called json.py without becoming the json of everybody else.
    spec = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _import(name: str) -> ModuleType:
    _search_here()
    return importlib.import_module(name)


def _search_here() -> None:
    """Modules beside the user are found, as `python -m` finds them."""
    if "" not in sys.path:
        sys.path.insert(0, "")
