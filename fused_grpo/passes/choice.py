"""Which implementation runs: `impl="auto" | "triton" | "torch" | "reference"`.

"auto" takes Triton for tensors on a GPU for which Triton compiles, and the chunked torch path otherwise. It logs the
choice once, at INFO. An explicit choice that cannot run raises an error with the reason: nothing falls back silently.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
import os
from typing import Literal

import torch
from torch import Tensor

from fused_grpo.errors import UnavailableError
from fused_grpo.passes.protocol import RowPasses

Impl = Literal["auto", "triton", "torch", "reference"]
logger = logging.getLogger("fused_grpo")
_OFF_GPU = "it needs a GPU and the tensors are on {!r}"


def choose(impl: str, hidden: Tensor) -> str:
    """ "triton", "torch" or "reference" for these tensors; UnavailableError for impl="triton" where it cannot run."""
    if impl in ("torch", "reference"):
        return impl
    if impl == "auto" and not hidden.is_cuda:
        announce("torch", hidden.device.type, _OFF_GPU.format(hidden.device.type))
        return "torch"
    obstacle = why_not_triton(hidden)
    if impl == "triton" and obstacle:
        raise UnavailableError(f"got impl='triton', but {obstacle}; fix: impl='auto', which takes the torch path here")
    if impl == "auto":
        impl = "torch" if obstacle else "triton"
        announce(impl, hidden.device.type, obstacle)
    return impl


def why_not_triton(hidden: Tensor) -> str | None:
    """The reason that Triton cannot take these tensors, or None where it can."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not _has_triton():
        return "triton is not installed"
    if hidden.dtype == torch.float64:
        return "its kernels have no fp64"
    if interpreted and (obstacle := why_not_interpreted()):
        return obstacle
    if interpreted and hidden.dtype == torch.bfloat16 and not interprets_bf16():
        return "its interpreter has no bf16 arithmetic (use fp32 or fp16 there)"
    if not hidden.is_cuda and not interpreted:
        return _OFF_GPU.format(hidden.device.type)
    if hidden.is_cuda and hidden.dtype == torch.bfloat16 and not torch.version.hip:
        major, minor = torch.cuda.get_device_capability(hidden.device)
        if major < 8:
            return f"bf16 needs compute capability 8.0 and this GPU has {major}.{minor} (use fp16 or fp32 there)"
    return None


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def why_not_interpreted() -> str | None:
    """The reason that Triton's interpreter cannot run here, or None where it can. It computes with NumPy."""
    if importlib.util.find_spec("numpy") is None:
        return "its interpreter needs NumPy, which is not installed (pip install numpy)"
    triton, numpy = (importlib.metadata.version(name) for name in ("triton", "numpy"))
    if triton.startswith("3.6.") and tuple(map(int, numpy.split(".")[:2])) >= (2, 4):
        return f"the interpreter of triton {triton} cannot use NumPy {numpy} (pip install 'numpy<2.4')"
    return None


def interprets_bf16() -> bool:
    """Whether 2 * 2 is 4 there. As released it multiplies the bits as integers; our tests mend that."""
    import numpy
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle, interpreter_builder

    two = TensorHandle(numpy.full((1, 1), 0x4000, numpy.uint16), tl.bfloat16)
    zero = TensorHandle(numpy.zeros((1, 1), numpy.float32), tl.float32)
    return bool(interpreter_builder.create_dot(two, two, zero, None, None).data == 4)


@functools.cache
def announce(chosen: str, device: str, obstacle: str | None) -> None:
    logger.info("impl='auto' runs the %s path on %s%s", chosen, device, f" ({obstacle})" if obstacle else "")


@functools.cache
def passes(impl: str) -> RowPasses:
    """The row passes: those of `fused_grpo.kernels` for "triton", else those of `torch_passes`."""
    if impl == "triton":
        from fused_grpo import kernels

        return kernels
    from fused_grpo.passes import torch_passes

    return torch_passes
