"""The device and architecture that the kernels run on.

Triton selects the interpreter when `@triton.jit` runs, which is when this package is imported. So it is read once,
here, at the same time.
"""

# mypy: disable-error-code="import-untyped"

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
import triton

INTERPRETED: bool = triton.knobs.runtime.interpret


def is_available() -> tuple[bool, str]:
    """(can the kernels run here, why or why not). A CUDA or ROCm device, or Triton's interpreter."""
    if INTERPRETED:
        return True, "Triton's interpreter (TRITON_INTERPRET=1)"
    if torch.cuda.is_available():
        return True, torch.cuda.get_device_name()
    return False, "no CUDA or ROCm device; fix: run on one, or set TRITON_INTERPRET=1 before the first import"


def _check_device(device: torch.device) -> None:
    if not INTERPRETED and device.type != "cuda":
        raise RuntimeError(
            f"got tensors on {device}, want them on a CUDA or ROCm device, for which these kernels are compiled; "
            "fix: move them to one, or set TRITON_INTERPRET=1 before the first import (slow, for tests)"
        )


# Architectures of one generation with the same shared memory use the same tiles.
FAMILY = {"sm_87": "sm_86", "sm_103": "sm_100", "sm_110": "sm_100", "sm_121": "sm_120", "gfx950": "gfx942"}


@cache
def architecture(device: torch.device) -> str:
    """The key of the tile tables: "sm_90" and the like, "gfx942" and the like, or "interpreter"."""
    _check_device(device)
    if INTERPRETED:
        return "interpreter"
    if torch.version.hip:
        name: str = torch.cuda.get_device_properties(device).gcnArchName
        name = name.split(":")[0]
    else:
        name = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    return FAMILY.get(name, name)


HERE = nullcontext()


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Makes `device` current: Triton launches on the current device, not on that of the tensors."""
    _check_device(device)
    is_current = device.type != "cuda" or device.index == torch.cuda.current_device()
    return HERE if is_current else torch.cuda.device(device)
