"""Helpers of all drop-ins: a check of the other project's version, and a replacement of its attributes."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fused_grpo.errors import UnavailableError


def check_version(package: str, versions: str) -> None:
    """Check that `package` is installed in one of `versions`, for example "~=1.16.0".

    Raises:
        UnavailableError: it is not installed, or in another version. The message has the command that installs it.
    """
    fix = f"fix: pip install '{package}{versions}'"
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise UnavailableError(f"got no {package}, want {package}{versions}; {fix}") from None
    # Every peer depends on it; torch and triton do not.
    from packaging.specifiers import SpecifierSet

    if installed not in SpecifierSet(versions):
        raise UnavailableError(
            f"got {package} {installed}, want {versions}, whose inner parts this was written against; {fix}"
        )


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace `owner.name` by `value` inside the context. Afterwards it is restored, or deleted if it was inherited.

    If other code has replaced it in the meantime, that replacement stays: that code has to undo it.
    """
    own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if vars(owner).get(name) is not value:
            pass
        elif own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
