"""How much Python a call runs. With few tokens on a GPU, that and not the kernels is the time of an op."""

import cProfile
import pstats
from collections.abc import Callable

import pytest
import torch

from fused_grpo import GRPOLossConfig, fused_linear_grpo_loss, linear_logprobs

pytestmark = pytest.mark.cpu_only(reason="it counts calls of functions, the same on any device")


def calls_of(run: Callable[[], object]) -> int:
    """Functions that are called, after what is done once."""
    for _ in range(2):
        run()
    with cProfile.Profile() as profile:
        run()
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def run_of(name: str, config: GRPOLossConfig | None) -> Callable[[], object]:
    hidden, weight = torch.randn(4, 16, 8, requires_grad=True), torch.randn(32, 8, requires_grad=name != "frozen")
    targets, old, advantages = torch.randint(32, (4, 16)), torch.full((4, 16), -3.0), torch.randn(4)

    def run() -> None:
        if name == "loss":
            given = {"advantages": advantages, "old_logprobs": old, "mask": torch.ones(4, 16), "config": config}
            fused_linear_grpo_loss(hidden, weight, targets, **given).loss.backward()
        elif name == "no gradient":
            with torch.no_grad():
                linear_logprobs(hidden, weight, targets)
        else:
            linear_logprobs(hidden, weight, targets).sum().backward()

    return run


@pytest.mark.parametrize(("name", "most"), [("no gradient", 500), ("frozen", 650), ("trainable", 1000), ("loss", 1150)])
def test_a_call_runs_little_python(name: str, most: int) -> None:
    count = calls_of(run_of(name, None))
    print(count)
    assert count <= most


def test_the_default_options_are_not_checked_again() -> None:
    given = GRPOLossConfig()
    assert abs(calls_of(run_of("loss", None)) - calls_of(run_of("loss", given))) < 10
