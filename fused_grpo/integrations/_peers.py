"""Checks for all drop-ins: of another project's version, of ids, for which others take any integers, and of counts."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch
from torch import Tensor

from fused_grpo.config import LARGEST
from fused_grpo.errors import InputError, UnavailableError, quoted
from fused_grpo.head.checks import check_tensors, is_number


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

    if not SpecifierSet(versions).contains(installed, prereleases=True):  # before packaging 26 a clone's was never in
        raise UnavailableError(
            f"got {package} {installed}, want {versions}, whose inner parts this was written against; {fix}"
        )


def token_ids(name: str, ids: Tensor) -> Tensor:
    """`ids` as int64, which are integers: a cast would make ids of a mask, or of log-probs.

    Raises:
        InputError: they are not.
    """
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise InputError(f"got {name} of dtype {ids.dtype}, want integers; fix: {name}.long()")
    return ids.long()


def check_items(count: Any) -> None:
    """Check that `num_items_in_batch` is one number; no value of a tensor is read.

    Raises:
        InputError: it is not.
    """
    if isinstance(count, Tensor):
        check_tensors(num_items_in_batch=count)
    if not (count.numel() == 1 if isinstance(count, Tensor) else is_number(count, 0, LARGEST)):
        raise InputError(
            f"got num_items_in_batch={quoted(count)}, want a number >= 0, or a tensor of one; fix: its sum"
        )
