"""Argument checks of the ops: got / want / fix, before anything is computed or allocated.

On a CPU every value is looked at. On a GPU that would stop the stream, so target ids are checked by an assertion on the
device and the other values are taken as given; shapes, dtypes and devices are checked everywhere.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fused_grpo.errors import InputError, UnsupportedError

_GREEDY = "fix: greedy sampling has no log-probs to train on; pass the temperature that sampling used"
IMPLS = ("auto", "triton", "torch", "reference")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None,
    temperature: float | Tensor,
    logit_scale: float,
    softcap: float | None,
    sharded: bool = False,
) -> None:
    """Everything that decides the logits, but for values. `targets` may be any leading shape of `hidden`."""
    check_whole(hidden=hidden, weight=weight)
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        if tensor.dtype not in FLOATS:
            raise InputError(f"got {name} of dtype {tensor.dtype}, want one of {', '.join(map(str, FLOATS))}")
    if weight.ndim != 2:
        fix = "; fix: DeepSpeed keeps it elsewhere: call this in the forward of the module that it wraps"
        raise InputError(
            f"got weight of shape {tuple(weight.shape)}, want [V, D] (nn.Linear's layout)"
            + (fix if hasattr(weight, "ds_id") else "")
        )
    if hidden.ndim < 2 or hidden.shape[-1] != weight.shape[1]:
        raise InputError(
            f"got hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}, want [..., D] and [V, D] with one D"
            + ("; fix: pass weight.t()" if hidden.ndim and hidden.shape[-1] == weight.shape[0] else "")
        )
    if weight.shape[0] == 0 and not sharded:
        raise InputError("got weight of 0 rows, want a vocabulary of at least one token")
    if targets.dtype != torch.int64:
        raise InputError(f"got targets of dtype {targets.dtype}, want torch.int64; fix: targets.long()")
    if targets.shape != hidden.shape[:-1]:
        raise InputError(f"got targets {tuple(targets.shape)}, want {tuple(hidden.shape[:-1])}: one per row of hidden")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype not in FLOATS):
        raise InputError(f"got bias {tuple(bias.shape)} {bias.dtype}, want [V] = {tuple(weight.shape[:1])}, floating")
    check_same_device(hidden=hidden, weight=weight, targets=targets, bias=bias)
    check_temperature(temperature, targets)
    if not -math.inf < logit_scale < math.inf:
        raise InputError(f"got logit_scale={logit_scale}, want a finite number")
    if softcap is not None and not 0.0 < softcap < math.inf:
        raise InputError(f"got softcap={softcap}, want a finite number > 0, or None for no cap")


def check_whole(**tensors: Tensor) -> None:
    """No DTensor. It is known by what only a DTensor has: its module takes long to import."""
    for name, tensor in tensors.items():
        if hasattr(tensor, "full_tensor"):
            raise InputError(
                f"got {name} as a DTensor, of which each process has a part, want a plain tensor; fix: call this in "
                "the forward of the module that FSDP wraps, where weights are plain tensors; those of a module with "
                "a fully_shard of its own are after module.unshard()"
            )


def check_differentiated_once() -> None:
    """In a backward pass of ours. With create_graph=True, PyTorch would take its results for constants, in silence."""
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "got create_graph=True, want a first derivative; these gradients have none of their own; "
            "fix: impl='reference', which autograd sees through"
        )


def check_plan(impl: str, chunk_bytes: int | None) -> None:
    """How to get there: which implementation, in how much memory."""
    if impl not in IMPLS:
        raise InputError(f"got impl={impl!r}, want {', '.join(map(repr, IMPLS[:-1]))} or {IMPLS[-1]!r}")
    if chunk_bytes is not None and chunk_bytes <= 0:
        raise InputError(f"got chunk_bytes={chunk_bytes}, want a number of bytes > 0, or None for the default")


def check_same_device(**tensors: Tensor | None) -> None:
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        listing = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise InputError(f"got {listing}; want all on one device; fix: .to({next(iter(devices.values()))!s})")


def check_temperature(temperature: float | Tensor, targets: Tensor) -> None:
    if not isinstance(temperature, Tensor):
        if not 0.0 < temperature < math.inf:
            raise InputError(f"got temperature={temperature}, want a finite number > 0; {_GREEDY}")
        return
    if temperature.shape != targets.shape or not temperature.is_floating_point():
        raise InputError(
            f"got temperature {tuple(temperature.shape)} {temperature.dtype}, "
            f"want a float, or a floating tensor of targets' shape {tuple(targets.shape)}"
        )
    check_same_device(temperature=temperature, targets=targets)


def check_temperature_values(temperature: Tensor) -> None:
    """Every temperature of a tensor [N]."""
    allowed = (temperature > 0) & (temperature < math.inf)
    if temperature.device.type == "cuda":
        torch._assert_async(allowed.all(), f"a temperature is out of range; want finite numbers > 0; {_GREEDY}")
    elif not bool(allowed.all()):
        found = temperature[~allowed][0].item()
        raise InputError(f"got a temperature of {found}, want finite numbers > 0; {_GREEDY}")


def check_targets(targets: Tensor, vocab_size: int, ignore_index: int) -> None:
    allowed = ((targets >= 0) & (targets < vocab_size)) | (targets == ignore_index)
    want = f"want 0 <= target < V={vocab_size}, or ignore_index={ignore_index}"
    if targets.device.type == "cuda":
        torch._assert_async(allowed.all(), f"a target is out of range; {want}")
    elif not bool(allowed.all()):
        at = (~allowed).nonzero()[0].tolist()
        raise InputError(f"got target {targets[tuple(at)].item()} at {at}; {want}")
