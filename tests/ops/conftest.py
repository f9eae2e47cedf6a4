"""Problems to solve and the rule by which answers are judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_grpo import linear_logprobs


@dataclass
class Problem:
    """Inputs of the ops in fp64; `cast` gives the same values as a dtype holds them."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    head: dict[str, Any] = field(default_factory=dict)
    loss: dict[str, Any] = field(default_factory=dict)

    def leaves(self, dtype: torch.dtype) -> dict[str, Tensor]:
        tensors = {"hidden": self.hidden, "weight": self.weight, "bias": self.bias}
        return {name: x.to(dtype).requires_grad_() for name, x in tensors.items() if x is not None}


@pytest.fixture
def make_problem() -> Callable[..., Problem]:
    def make(N: int, V: int, D: int, *, seed: int = 0, options: bool = True) -> Problem:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).half().double()

        targets = torch.randint(0, V, (N,), generator=generator)
        targets[::5] = -100
        head: dict[str, Any] = {"temperature": 0.7 + torch.rand(N, generator=generator)}
        head |= {"softcap": 4.0, "logit_scale": 1.25} if options else {"temperature": 1.0}
        bias = normal(V) if options else None
        problem = Problem(normal(N, D), normal(V, D) / D**0.5, bias, targets, head)
        near = linear_logprobs(problem.hidden, problem.weight, targets, bias=bias, **head, impl="reference")
        problem.loss = {
            # The second of three sequences is empty.
            "cu_seqlens": torch.tensor([0, N // 3, N // 3, N], dtype=torch.int32),
            "advantages": torch.tensor([1.0, -2.0, -0.5]),
            # As far from the current policy as a few updates are: some ratios are clipped, on either side.
            **{name: near + 0.3 * normal(N) for name in ("old_logprobs", "ref_logprobs", "sampling_logprobs")},
        }
        return problem

    return make


@pytest.fixture
def assert_as_exact() -> Callable[..., None]:
    """Error against fp64 at most twice that of plain torch in fp32 from the same inputs, on maximum and RMS."""

    def check(ours: Tensor, plain: Tensor, exact: Tensor, *, what: str) -> None:
        assert torch.equal(ours.isinf(), exact.isinf()), f"{what}: infinite in other places"
        ours, plain, exact = (x.masked_fill(exact.isinf(), 0.0) for x in (ours, plain, exact))
        # A single number may come out right by luck in plain fp32, the largest of a few hundred nearly so; many cannot.
        ulps, scale = (
            (4 if exact.numel() > 1000 else 16, largest(exact)) if exact.ndim else (32, max(1.0, largest(exact)))
        )
        floor = ulps * torch.finfo(ours.dtype).eps * scale
        for norm in (largest, rms):
            error, allowed = norm(ours.double() - exact), 2 * norm(plain.double() - exact) + floor
            assert error <= allowed, f"{what}: {norm.__name__} error {error:.3e}, allowed {allowed:.3e}"

    return check


def largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item() if x.numel() else 0.0
