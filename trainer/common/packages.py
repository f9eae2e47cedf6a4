"""Packages that are installed with an extra of ours, imported when they are asked for."""

from __future__ import annotations

import importlib
from typing import Any

from fused_grpo.errors import UnavailableError, shown


def installed(module: str, *, extra: str) -> Any:
    """The module; UnavailableError where it cannot be imported."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnavailableError(
            f"got no {module} that can be imported ({shown(error, 500)}), want its package installed; fix: pip install "
            f"'fused-grpo[{extra}]'"
        ) from error
