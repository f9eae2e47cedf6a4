"""The standalone GRPO trainer: rollout, reward, advantage, batch, step, sync, log.

`GRPOTrainer` and `GRPOConfig` take TRL's names. Exports are lazy: reading a config does not import transformers. What
the trainer needs beyond torch and triton is installed by the extra `fused-grpo[trainer]`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fused_grpo.errors import UnavailableError

if TYPE_CHECKING:
    from fused_grpo.trainer.config.grpo_config import GRPOConfig
    from fused_grpo.trainer.loop import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]

_HOME = {"GRPOConfig": "config.grpo_config", "GRPOTrainer": "loop"}

# The modules of the extra: pyproject.toml has the packages.
EXTRA = frozenset(
    "accelerate datasets httpx huggingface_hub jinja2 rich safetensors transformers tyro yaml".split()  # noqa: SIM905
)


@contextmanager
def extra_installed() -> Iterator[None]:
    """UnavailableError in the place of a ModuleNotFoundError of one of them, with the `pip install` that mends it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRA:
            raise
        raise UnavailableError(
            f"got no {error.name} in this environment, want what the trainer needs beside the ops; "
            "fix: pip install 'fused-grpo[trainer]'"
        ) from error


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fused_grpo.trainer' has no attribute {name!r}")
    with extra_installed():
        return getattr(importlib.import_module(f"fused_grpo.trainer.{_HOME[name]}"), name)
