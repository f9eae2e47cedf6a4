"""Packages that are installed with an extra of ours, imported when they are asked for."""

from __future__ import annotations

import pkgutil
import warnings
from typing import Any

from fused_grpo.errors import UnavailableError, shown


def installed(module: str, *, extra: str, name: str = "") -> Any:
    """The module, or what it has under that name; UnavailableError where that cannot be imported, whatever it raises.

    What Python says of its source (`is` with a literal, ...) when it compiles that for the first time is not shown: who
    trains can change nothing there.
    """
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
            return pkgutil.resolve_name(f"{module}:{name}")
    except Exception as error:
        raise UnavailableError(
            f"got no {module} that can be imported ({shown(error, 500)}), want its package installed; fix: pip install "
            f"'fused-grpo[{extra}]'"
        ) from error
