"""Reward functions by name: `module:name`, `module.name` or `path.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from fused_grpo.errors import InputError
from fused_grpo.trainer.rewards.reward_call import RewardFunction


def load_reward(name: str) -> RewardFunction:
    """The function of that name. Its module is imported, or its file is run.

    Raises:
        InputError: the name has none of these forms, or there is nothing callable of that name.
    """
    source, _, attribute = name.rpartition(":" if ":" in name else ".")
    if not source:
        raise InputError(f"got reward function {name!r}, want module:name, module.name or path.py:name")
    _search_working_directory()
    try:
        module = _run_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
        function: Any = getattr(module, attribute)
    except Exception as error:  # anything that the module raises when it is imported
        raise InputError(f"got reward function {name!r}, which cannot be loaded: {error}") from error
    if not callable(function):
        raise InputError(f"got reward function {name!r}, which is a {type(function).__name__}, want something callable")
    loaded: RewardFunction = function
    return loaded


def names_a_function(name: str) -> bool:
    """True for a string with a colon and for `module.name` of a module that exists, unless it is a path that exists."""
    module, _, attribute = name.rpartition(".")
    if Path(name).exists() or ":" in name:
        return not Path(name).exists()
    if not (module and name.replace(".", "").isidentifier() and attribute):
        return False
    _search_working_directory()
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _run_file(path: Path) -> ModuleType:
    # A prefix keeps a user's json.py from replacing the module json.
    spec = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _search_working_directory() -> None:
    """Import modules from the working directory too, as `python -m` does."""
    if "" not in sys.path:
        sys.path.insert(0, "")
