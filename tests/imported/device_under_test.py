"""The device that the ops of tests/kernels and tests/ops run on, and how their tensors get there and back.

    FUSED_GRPO_TEST_DEVICE=cuda    a GPU, with compiled kernels: `make test-gpu`
    FUSED_GRPO_TEST_DEVICE=cpu     its dry run: the same wrappers with copies, and 16-bit operands for every GEMM

Tests make their tensors on the CPU, and check results there. If the variable is set, `install` wraps each public op and
each row pass: the arguments of a test are copied to the device, with their strides and the memory around them, autograd
goes through the copies, and results are copied back. A result in the memory of an argument is copied back into that
memory. Calls within the package do not change.
"""

import dataclasses
import functools
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAME = os.environ.get("FUSED_GRPO_TEST_DEVICE", "")
DEVICE = torch.device("cuda" if NAME == "cuda" else "cpu")

CALLS: Counter[str] = Counter()
"""Of each wrapped function, the calls whose tensors were moved."""

OPS = {
    "divergence": ("fused_linear_divergence",),
    "fused_loss": ("fused_linear_grpo_loss",),
    "logprobs": ("linear_logprobs", "linear_logprobs_and_entropy"),
    "loss": ("grpo_loss",),
    "integrations.speculative": ("speculative_logprobs",),
}
NO_PASSES = ("empty_tile", "is_available")

# Tests replace torch.empty.
_empty = torch.empty


def why_not() -> str | None:
    """The reason that the tests cannot run where the variable says, with the fix; None where they can."""
    if NAME not in ("", "cpu", "cuda"):
        return f"got FUSED_GRPO_TEST_DEVICE={NAME}, want cuda, or cpu for its dry run"
    if NAME == "cuda" and not torch.cuda.is_available():
        built = "finds no GPU" if torch.version.cuda else "is built for CPUs alone"
        return f"got FUSED_GRPO_TEST_DEVICE=cuda, but torch {torch.__version__} {built}; fix: run it beside a GPU"
    return None


def install() -> None:
    """Wrap everything that tests call, before the first test module is imported."""
    import fused_grpo
    from fused_grpo import fused_loss, kernels
    from fused_grpo.head import head
    from fused_grpo.passes import torch_passes

    for module, names in OPS.items():
        home = __import__(f"fused_grpo.{module}", fromlist=names)
        for name in names:
            setattr(home, name, between(getattr(home, name)))
            vars(fused_grpo).pop(name, None)  # the unwrapped op, if it has been imported before
    fused_loss.FusedLinearGRPOLoss.forward = between(fused_loss.FusedLinearGRPOLoss.forward)
    for name in set(kernels.__all__) - set(NO_PASSES):
        for passes in (kernels, torch_passes):
            if getattr(passes, name, None) is not None:
                setattr(passes, name, between(getattr(passes, name)))
    if NAME == "cpu":
        head.Head.gemm_dtype = property(lambda self: self.hidden.dtype)
        head.multiply_into = as_tensor_cores(head.multiply_into)


def between(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` on the device, called from a test."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        trip = Trip()
        if caller.partition(".")[0] != "fused_grpo":
            args, kwargs = trip.there(args), trip.there(kwargs)
        CALLS[function.__name__] += trip.moved > 0
        result = function(*args, **kwargs)
        if trip.moved and isinstance(function, type):
            return _Abroad(result, trip)
        return trip.back(result) if trip.moved else result

    return call


class Trip:
    """The tensors of one call: to the device, and back."""

    def __init__(self) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []  # of each: (there, here)

    @property
    def moved(self) -> int:
        """How many tensors went there."""
        return len(self._copies)

    def there(self, value: Any) -> Any:
        return over_tensors(self._moved, value)

    def back(self, value: Any) -> Any:
        return over_tensors(self._returned, value)

    def _moved(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return tensor
        copy: Tensor = _There.apply(tensor)
        self._copies.append((copy, tensor))
        return copy

    def _returned(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != DEVICE.type:
            return tensor
        memory = tensor.untyped_storage()
        for copy, home in self._copies if not tensor.requires_grad else ():
            if tensor is copy or (memory.nbytes() and memory.data_ptr() == copy.untyped_storage().data_ptr()):
                as_bytes(home.untyped_storage()).copy_(as_bytes(memory))
                return home if tensor is copy else placed(tensor, home.untyped_storage())
        return tensor.to("cpu", copy=True)


class _Abroad:
    """An object made of tensors that are there: what its methods take goes there, and what they return comes back."""

    def __init__(self, itself: Any, trip: Trip) -> None:
        self._itself, self._trip = itself, trip

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._itself, name)
        if not callable(attribute):
            return self._trip.back(attribute)

        def method(*args: Any, **kwargs: Any) -> Any:
            return self._trip.back(attribute(*self._trip.there(args), **self._trip.there(kwargs)))

        return method


class _There(torch.autograd.Function):
    """A copy on the device; its gradient comes back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        memory = as_bytes(tensor.untyped_storage()).to(DEVICE, copy=True)
        return placed(tensor, memory.untyped_storage())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.cpu()


def placed(tensor: Tensor, memory: torch.UntypedStorage) -> Tensor:
    """What lies in `memory` where the tensor lies in its own."""
    where = (tensor.storage_offset(), tensor.size(), tensor.stride())
    return _empty(0, dtype=tensor.dtype, device=memory.device).set_(memory, *where)


def as_bytes(memory: torch.UntypedStorage) -> Tensor:
    return _empty(0, dtype=torch.uint8, device=memory.device).set_(memory, 0, (memory.nbytes(),), (1,))


def over_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same value with `function` of each tensor in it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: over_tensors(function, x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        items = [over_tensors(function, x) for x in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        results = {name: over_tensors(function, x) for name, x in fields.items()}
        changed = {name: x for name, x in results.items() if x is not fields[name]}
        return dataclasses.replace(value, **changed) if changed else value
    return value


def as_tensor_cores(multiply_into: Callable[..., None]) -> Callable[..., None]:
    """`head.multiply_into` for 16-bit operands, too: products and sums in fp32."""

    def multiply(out: Tensor, a: Tensor, b: Tensor, *, accumulate: bool = False) -> None:
        if a.dtype == out.dtype:
            multiply_into(out, a, b, accumulate=accumulate)
            return
        product = torch.mm(a.to(out.dtype), b.to(out.dtype))
        out.add_(product) if accumulate else out.copy_(product)

    return multiply


def rounds(dtype: torch.dtype) -> bool:
    """Whether GEMMs for hidden states of `dtype` take softmax weights or d-logits that are rounded to it."""
    return bool(NAME) and dtype in (torch.float16, torch.bfloat16)


def assert_rounded(ours: Tensor, exact: Tensor, *, dtype: torch.dtype, what: str) -> None:
    """A gradient for hidden states of `dtype`, by GEMMs of 16-bit operands: off by that dtype's eps of its length.

    The rule of tests/ops/test_gpu_arithmetic.py, and the one place for it: operands are rounded once (to half of eps),
    sums and all else are in fp32. A single number may have terms that are larger than itself.
    """
    eps = torch.finfo(dtype).eps
    error = ours.double() - exact.double()
    # What is handed over in fp16 has numbers that are 6e-8 apart at the least.
    floor = 2.0**-24 if ours.dtype == torch.float16 else 1e-30
    lengths = [torch.linalg.vector_norm(x).item() for x in (error, exact.double())]
    allowed = eps * lengths[1] + floor * exact.numel() ** 0.5
    assert lengths[0] <= allowed, f"{what}: error {lengths[0]:.2e}, allowed {allowed:.2e}"
    if error.numel():
        largest, most = error.abs().max().item(), 4 * eps * exact.abs().max().item() + floor
        assert largest <= most, f"{what}: largest error {largest:.2e}, allowed {most:.2e}"
