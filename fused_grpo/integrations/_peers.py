"""What every drop-in needs: the peer in a version that was read, and a way to put things in its place and back."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fused_grpo.errors import UnavailableError


def check_version(package: str, versions: str) -> None:
    """Raise where `package` is not installed in one of `versions`, as in "~=1.16.0".

    Raises:
        UnavailableError: with the command that installs it.
    """
    fix = f"fix: pip install '{package}{versions}'"
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise UnavailableError(f"got no {package}, want {package}{versions}; {fix}") from None
    # Every peer brings it; torch and triton do not.
    from packaging.specifiers import SpecifierSet

    if installed not in SpecifierSet(versions):
        raise UnavailableError(
            f"got {package} {installed}, want {versions}, whose inner parts this was written against; {fix}"
        )


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Have `owner.name` be `value` for a while. What was there comes back, or goes again if it was inherited.

    What somebody has put around it in the meantime stays: they have it to undo.
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
