"""Tensors of classes that wrap others: a call gives what it gives for what they wrap, or an error of ours."""

import re
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from fused_grpo import fused_linear_divergence, fused_linear_grpo_loss, grpo_loss, linear_logprobs
from fused_grpo.errors import InputError, UnsupportedError

pytestmark = pytest.mark.cpu_only(reason="the classes wrap tensors of a CPU")
V, D, N = 11, 4, 6


class Wrapper(torch.Tensor):
    """The values of another tensor, as wrapper subclasses have them (those of torch's testing, torchao, ...)."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Wrapper":
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, strides=inner.stride())

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(inner_of, (args, kwargs or {}))
        return tree_map(lambda x: cls(x) if isinstance(x, torch.Tensor) else x, function(*args, **kwargs))


def inner_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and torch._is_functional_tensor(value):
        return torch._from_functional_tensor(value)
    return value.inner if isinstance(value, Wrapper) else value


def tensors() -> dict[str, torch.Tensor]:
    return {
        "hidden": torch.linspace(-1, 1, N * D).view(N, D),
        "weight": torch.linspace(-2, 1, V * D).view(V, D),
        "bias": torch.linspace(0, 1, V),
        "targets": torch.tensor([0, 3, 7, 10, 7, 2]),
        "advantages": torch.ones(2),
        "cu_seqlens": torch.tensor([0, 2, N]),
        "old_logprobs": torch.linspace(-3, -1, N),
        "mask": torch.tensor([1, 1, 0, 1, 1, 1]),
        "temperature": torch.full((N,), 0.7),
    }


def loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, **given: Any) -> torch.Tensor:
    return fused_linear_grpo_loss(hidden, weight, targets, **given).loss


def divergence(hidden: torch.Tensor, weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return fused_linear_divergence(hidden, weight, hidden.detach() * 2, weight.detach(), mask=mask).loss


def of_logprobs(old_logprobs: torch.Tensor, **given: Any) -> torch.Tensor:
    return grpo_loss(old_logprobs + 0.1, old_logprobs=old_logprobs, **given).loss


CALLS = {
    linear_logprobs: ("hidden", "weight", "targets", "bias", "temperature"),
    loss: tuple(tensors()),
    of_logprobs: ("old_logprobs", "advantages", "cu_seqlens", "mask"),
    divergence: ("hidden", "weight", "mask"),
}
CASES = [(call, name) for call, names in CALLS.items() for name in names]


@pytest.mark.parametrize("wrap", [Wrapper, torch._to_functional_tensor], ids=["wrapper", "functional"])
@pytest.mark.parametrize(("call", "name"), CASES, ids=[f"{call.__name__}-{name}" for call, name in CASES])
def test_a_wrapped_tensor_counts_as_what_it_wraps_or_is_refused(call, name, wrap):
    given = {one: tensors()[one] for one in CALLS[call]}
    expected = call(**given)
    result, error = expected, "got fused_linear_ with a tensor of a class that wraps others"
    try:
        result = inner_of(call(**given | {name: wrap(given[name])}))
    except UnsupportedError as refused:
        error = str(refused)
    assert re.match("got fused_linear_.* with a tensor of a class that wraps others", error)
    torch.testing.assert_close(result, expected)


class Quantized(Wrapper):
    """As torchao's, of which some leave the `out` of a product as it was."""

    def dequantize(self) -> torch.Tensor:
        return self.inner


@pytest.mark.parametrize(("call", "name"), CASES, ids=[f"{call.__name__}-{name}" for call, name in CASES])
def test_a_quantized_tensor_of_another_package_is_refused_too(call, name):
    given = {one: tensors()[one] for one in CALLS[call]}
    with pytest.raises(InputError, match=r"got \w+ as a nested, quantized or sparse tensor, .* \.dequantize\(\)"):
        call(**given | {name: Quantized(given[name])})


@pytest.mark.parametrize("name", ["targets", "mask"])
def test_what_the_loss_has_to_read_is_refused_by_name(name):
    given = tensors()
    with pytest.raises(UnsupportedError, match=r"got fused_linear_grpo_loss with .*, want plain tensors; fix: what it"):
        loss(**given | {name: Wrapper(given[name])})
