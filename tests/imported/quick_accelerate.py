"""Accelerate looks for each package once: in every step it asks whether an optimizer could be one of LOMO's."""

import functools
import sys


def make_quick() -> None:
    """From here on, in this process and its forks, where it has been imported."""
    if imports := sys.modules.get("accelerate.utils.imports"):
        imports._is_package_available = functools.cache(imports._is_package_available)  # type: ignore[attr-defined]
