"""A check of another project's version, for all drop-ins."""

from __future__ import annotations

import importlib.metadata

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
