"""Problems to solve and the rule by which answers are judged."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numerics
import pytest
import torch
from torch import Tensor

from fused_grpo import linear_logprobs
from fused_grpo.head import checks, head


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
    return numerics.assert_as_exact


@pytest.fixture(autouse=True)
def many_rows(monkeypatch) -> None:
    """Few rows stay in place on a GPU; those of the tests are few, and stand for many."""
    monkeypatch.setattr(checks, "FEW_ROWS", 0)


@pytest.fixture
def gemms(monkeypatch) -> list[tuple[str, int]]:
    """Each product over the head as (what, rows): "logits", "hidden" (its gradient) or "weight", in order."""
    ran: list[tuple[str, int]] = []
    tiles, add_logits_gradient = head.Head.tiles, head.HeadGradients.add_logits_gradient

    def counted_tiles(*arguments: Any, **options: Any) -> Iterator[head.Tile]:
        for tile in tiles(*arguments, **options):
            ran.append(("logits", len(tile.logits)))
            yield tile

    def counted_gradient(self: head.HeadGradients, tile: head.Tile, *arguments: Any) -> None:
        ran.extend((what, len(tile.logits)) for what in ("hidden", "weight") if getattr(self, f"_{what}") is not None)
        add_logits_gradient(self, tile, *arguments)

    monkeypatch.setattr(head.Head, "tiles", counted_tiles)
    monkeypatch.setattr(head.HeadGradients, "add_logits_gradient", counted_gradient)
    return ran
