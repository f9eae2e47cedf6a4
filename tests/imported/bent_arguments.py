"""Arguments that are wrong, or strange, in the place of right ones, and how results are compared."""

import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fused_grpo.config import KL_ESTIMATORS, LEVELS, LOSS_TYPES

Arguments = dict[str, Any]


class Subclass(Tensor):
    """A tensor of another class."""


def with_value(value: float) -> Callable[[Tensor], Tensor]:
    """The tensor with one element of this value."""

    def put(tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        changed.view(-1)[:1] = value
        return changed

    return put


BENT: list[Callable[[Tensor], Any]] = [
    *(lambda x, dtype=dtype: x.to(dtype) for dtype in (torch.int32, torch.int64, torch.bool, torch.uint8)),
    *(lambda x, dtype=dtype: x.to(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64)),
    *(lambda x, dtype=dtype: x.to(dtype) for dtype in (torch.complex64, torch.float8_e4m3fn)),
    *map(with_value, (float("nan"), float("inf"), float("-inf"), 3e38, -3e38, 1e-45, -1.0, 2.0**31, 2.0**62, -101.0)),
    lambda x: x.flatten(),
    lambda x: x[None],
    lambda x: x[..., :0],
    lambda x: x[:0],
    lambda x: x.flatten()[0],
    lambda x: torch.cat([x, x]),
    lambda x: x.flatten()[:1].expand(x.shape),
    lambda x: x.t() if x.ndim == 2 else x.flip(0),
    lambda x: x.repeat_interleave(2, -1)[..., ::2],
    lambda x: torch.zeros_like(x),
    lambda x: torch.empty_like(x, device="meta"),
    lambda x: x.to_sparse(),
    lambda x: x.to_sparse_csr() if x.ndim == 2 else x.to_sparse(),
    lambda x: torch.nested.nested_tensor([x.flatten()[:1], x.flatten()]),
    lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    lambda x: x.as_subclass(Subclass),
    lambda x: x.float().clone().requires_grad_(),
    lambda x: x.float().clone().requires_grad_() * 2,
    lambda x: x.numpy(),
    lambda x: x.tolist(),
]
STRAY: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e-320, 1e308, 2**31, 2**63, 2**70, -(2**70), 1j, "", "1", b"1"),
    *(float("nan"), float("inf"), float("-inf"), Fraction(1, 3), np.float32(0.5), np.int64(3), np.array([1.0, 2.0])),
    *((), [], [1.0], {}, {1}, object(), int, len, torch.float32, torch.device("cpu"), slice(None)),
    *(torch.tensor(0.5), torch.tensor([0.5, 1.0]), torch.tensor(2), torch.tensor(float("nan")), torch.zeros(0)),
    *(torch.empty((), device="meta"), *LOSS_TYPES[:3], *LEVELS, *KL_ESTIMATORS, "torch", "reference", "needed"),
]


def bend(rng: random.Random, arguments: Arguments, names: Sequence[str]) -> Arguments:
    """The same with up to three of `names` replaced, bent, or one taken away or added."""
    for name in rng.sample(names, rng.randint(0, 3)):
        present = arguments.get(name)
        if isinstance(present, Tensor) and rng.random() < 0.8:
            try:
                arguments[name] = rng.choice(BENT)(present.detach())
            except (RuntimeError, TypeError, IndexError):  # not every tensor can be bent in every way
                continue
        else:
            arguments[name] = rng.choice(STRAY)
    return arguments


def results(output: Any, arguments: Arguments, leaves: Sequence[str]) -> list[Tensor]:
    """The tensors of an output, and the gradients of their sum in those of `leaves` that have one."""
    own = [x for name in leaves if isinstance(x := arguments.get(name), Tensor) and x.requires_grad and x.is_leaf]
    values = [output] if isinstance(output, Tensor) else [x for x in output if isinstance(x, Tensor)]
    total = sum(x.sum() for x in values if x.requires_grad)
    gradients = torch.autograd.grad(total, own, allow_unused=True) if isinstance(total, Tensor) and own else ()
    return [*(x.detach() for x in values), *(x for x in gradients if x is not None)]


def assert_same(ours: list[Tensor], expected: list[Tensor]) -> None:
    """Equal, NaN included. Rows without a target may hold one: autograd makes 0 * NaN of it, where ours is 0."""
    assert len(ours) == len(expected)
    for actual, other in zip(ours, expected, strict=True):
        actual, other = actual.double(), other.double()
        assert actual.shape == other.shape
        same = torch.isclose(actual, other, rtol=1e-3, atol=1e-3, equal_nan=True)
        assert (same | ((actual == 0) & other.isnan())).all(), (actual, other)


def is_tame(value: Any) -> bool:
    """Whether fp32 sums and products of it stay in fp32, in any order."""
    return not isinstance(value, Tensor | int | float) or not (torch.as_tensor(value).double().abs() > 1e18).any()
