"""How much Python a call runs, and what it launches. With few tokens on a GPU, that is the time of an op."""

import cProfile
import pstats
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from fused_grpo import GRPOLossConfig, fused_linear_grpo_loss, linear_logprobs
from fused_grpo.head import checks, registered_ops

pytestmark = pytest.mark.cpu_only(reason="it counts calls of functions, the same on any device")


def calls_of(run: Callable[[], object]) -> int:
    """Functions that are called, after what is done once."""
    for _ in range(2):
        run()
    with cProfile.Profile() as profile:
        run()
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def run_of(name: str, config: GRPOLossConfig | None, **options: Any) -> Callable[[], object]:
    hidden = torch.randn(4, 16, 8, requires_grad=True)
    weight = torch.randn(32, 8, requires_grad="frozen" not in name)
    targets, old, advantages = torch.randint(32, (4, 16)), torch.full((4, 16), -3.0), torch.randn(4)

    given: dict[str, Any] = {"advantages": advantages, "old_logprobs": old, "mask": torch.ones(4, 16), "config": config}

    def run() -> None:
        hidden.grad = weight.grad = None
        if "loss" in name:
            fused_linear_grpo_loss(hidden, weight, targets, **given, **options).loss.backward()
        elif name == "no gradient":
            with torch.no_grad():
                linear_logprobs(hidden, weight, targets, **options)
        else:
            linear_logprobs(hidden, weight, targets, **options).backward(old)

    return run


@pytest.mark.parametrize(("name", "most"), [("no gradient", 390), ("frozen", 480), ("trainable", 630), ("loss", 770)])
def test_a_call_runs_little_python(name: str, most: int) -> None:
    count = calls_of(run_of(name, None))
    print(count)
    assert count <= most


def test_the_default_options_are_not_checked_again() -> None:
    given = GRPOLossConfig()
    assert abs(calls_of(run_of("loss", None)) - calls_of(run_of("loss", given))) < 10


@dataclass
class Launches(TorchDispatchMode):
    """What a call on a GPU would launch: operations of torch, and kernels, which do not run here."""

    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fused_grpo":
            with self:  # the operations inside
                return getattr(registered_ops, f"_{func._opname}")(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        copies = name == "contiguous" and not args[0].is_contiguous()
        if copies or not (func.is_view or "empty" in name or name in ("_unsafe_view", "scalar_tensor")):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "first", "operations", "kernels"),
    [
        ("no gradient", 2, 2, 3),
        ("frozen", 3, 13, 3),
        ("trainable", 2, 13, 5),
        ("loss", 9, 16, 5),
        ("loss, frozen", 9, 15, 5),
    ],
)
def test_a_call_on_a_gpu_launches_little(
    name: str, first: int, operations: int, kernels: int, monkeypatch: Any
) -> None:
    """`first` is the number of launches before the first product, for which the GPU waits."""
    launches, run = Launches(), run_of(name, None, impl="triton")
    monkeypatch.setattr(checks, "FEW_ROWS", 64)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        InterpretedFunction, "run", lambda self, *args, **kwargs: launches.names.append(self.fn.__name__)
    )
    with launches:
        run()
    launched = [kernel for kernel in launches.names if kernel.endswith("_kernel")]
    product = next(i for i, it in enumerate(launches.names) if it in ("mm", "_logprob_forward_kernel"))
    print(launches.names)
    assert product <= first
    assert len(launches.names) - len(launched) <= operations
    assert len(launched) <= kernels
