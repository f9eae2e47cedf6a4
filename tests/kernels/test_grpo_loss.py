"""The one-pass loss against autograd of plain torch in fp64, option by option, through Triton's interpreter."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_grpo.kernels import grpo_token_loss

CONFIG: dict[str, Any] = {"epsilon_low": 0.2, "epsilon_high": 0.28, "beta": 0.1, "bias_correction_kl": False}
OPTIONAL = ("old_logprobs", "ref_logprobs", "sampling_logprobs", "entropy")


def problem(N: int, *, spread: float = 0.4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(N)
    logprobs = -3 * torch.rand(N, generator=generator)
    near = {name: logprobs + spread * torch.randn(N, generator=generator) for name in OPTIONAL[:3]}
    return near | {
        "logprobs": logprobs,
        "entropy": torch.rand(N, generator=generator),
        "advantages": torch.randn(N, generator=generator) * (torch.rand(N, generator=generator) > 0.1),
        "weights": torch.rand(N, generator=generator),
        "mask": torch.rand(N, generator=generator) > 0.3,
    }


def plain(inputs: dict[str, Tensor], dtype: torch.dtype, **config: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The formulas of the kernel's docstring on the unmasked tokens alone, differentiated by autograd."""
    on = inputs["mask"]
    x = {name: value[on].to(dtype) for name, value in inputs.items() if name != "mask"}
    lp, A = x["logprobs"].requires_grad_(), x["advantages"]
    ratio = torch.exp(lp - x.get("old_logprobs", lp.detach()))
    low, high = 1 - config["epsilon_low"], 1 + config["epsilon_high"]
    policy = -torch.minimum(ratio * A, ratio.clamp(low, high) * A)
    q = x.get("ref_logprobs", lp.detach()) - lp
    kl = torch.expm1(q) - q if "ref_logprobs" in x else torch.zeros_like(lp)
    loss = (x["weights"] * (policy + config["beta"] * kl * (ratio if config["bias_correction_kl"] else 1))).sum()
    (grad,) = torch.autograd.grad(loss, lp)
    full = torch.zeros(len(on), dtype=dtype).masked_scatter(on, grad)
    difference = (lp - x.get("sampling_logprobs", lp)).abs()
    clipped = {"clip_low": (A < 0) & (ratio < low), "clip_high": (A > 0) & (ratio > high)}
    sums = {
        "kl": kl,
        "entropy": x.get("entropy", torch.zeros_like(lp)),
        "ratio": ratio,
        "num_tokens": torch.ones_like(lp),
    }
    sums |= {"policy_loss": x["weights"] * policy, "sampling_difference": difference} | clipped
    statistics = {"loss": loss} | {name: value.to(dtype).sum() for name, value in sums.items()}
    largest = {"sampling_difference_max": difference, "ratio_max": ratio}
    statistics |= {name: value.max() for name, value in largest.items()} | {"ratio_min": ratio.min()}
    return full, {name: value.detach() for name, value in statistics.items()}


def check(oracle: Any, inputs: dict[str, Tensor], **config: Any) -> None:
    grad, statistics = grpo_token_loss(**inputs, **config)
    rough_grad, rough = plain(inputs, torch.float32, **config)
    exact_grad, exact = plain(inputs, torch.float64, **config)
    oracle.assert_as_exact_as_torch(grad, rough_grad, exact_grad)
    assert statistics.keys() == exact.keys()
    for name, value in statistics.items():
        assert value.dtype == torch.float32
        oracle.assert_as_exact_as_torch(value, rough[name], exact[name])


@pytest.mark.parametrize("given", [set(c) for n in range(5) for c in itertools.combinations(OPTIONAL, n)], ids=str)
@pytest.mark.parametrize("bias_correction_kl", [False, True])
def test_every_set_of_inputs_matches_autograd(oracle: Any, given: set[str], bias_correction_kl: bool) -> None:
    inputs = {name: value for name, value in problem(33).items() if name not in OPTIONAL or name in given}
    check(oracle, inputs, **CONFIG | {"bias_correction_kl": bias_correction_kl})


@pytest.mark.parametrize("N", [1, 1024, 1025, 2500])
def test_tokens_beyond_one_program_are_counted_once(oracle: Any, N: int) -> None:
    inputs = problem(N) | {"mask": torch.arange(N) % 3 != 1}
    check(oracle, inputs, **CONFIG)


@pytest.mark.parametrize(("advantage", "ratio", "slope"), [(1, 1.3, 0), (1, 0.7, -0.7), (-1, 0.7, 0), (-1, 1.3, 1.3)])
def test_only_the_side_that_would_overshoot_is_clipped(advantage: float, ratio: float, slope: float) -> None:
    one = torch.ones(1)
    old = -torch.log(torch.tensor([ratio]))
    inputs = {"advantages": advantage * one, "weights": one, "mask": one.bool(), "old_logprobs": old}
    grad, statistics = grpo_token_loss(torch.zeros(1), **inputs, **CONFIG)
    assert grad.item() == pytest.approx(slope, abs=1e-6)
    assert statistics["clip_low"].item() == (advantage < 0 and ratio < 1)
    assert statistics["clip_high"].item() == (advantage > 0 and ratio > 1)


def test_zero_clip_range_on_policy_still_learns() -> None:
    # r is exactly 1: on the edge of [1, 1], where torch.min and clamp let the gradient through.
    one = torch.ones(3)
    config = CONFIG | {"epsilon_low": 0.0, "epsilon_high": 0.0}
    advantages = torch.tensor([1.0, -1.0, 0.0])
    grad, _ = grpo_token_loss(-one, advantages=advantages, weights=one, mask=one.bool(), **config)
    assert torch.equal(grad, -advantages)


def test_masked_tokens_are_nothing_even_where_inputs_are_not_numbers() -> None:
    clean = problem(33)
    poisoned = dict(clean)
    for name, bad in zip(clean.keys() - {"mask"}, itertools.cycle([float("nan"), float("inf"), -float("inf")])):
        poisoned[name] = torch.where(clean["mask"], clean[name], bad)
    grad, statistics = grpo_token_loss(**poisoned, **CONFIG)
    wanted_grad, wanted = grpo_token_loss(**clean, **CONFIG)
    assert torch.equal(grad, wanted_grad)
    assert torch.equal(grad[~clean["mask"]], torch.zeros((~clean["mask"]).sum()))
    assert all(torch.equal(statistics[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("N", [0, 5])
def test_nothing_unmasked_sums_to_zero_and_has_no_extremes(N: int) -> None:
    grad, statistics = grpo_token_loss(**problem(N) | {"mask": torch.zeros(N, dtype=torch.bool)}, **CONFIG)
    assert torch.equal(grad, torch.zeros(N))
    assert statistics.pop("ratio_min").item() == float("inf")
    assert statistics.pop("ratio_max").item() == -float("inf")
    assert {name: value.item() for name, value in statistics.items()} == dict.fromkeys(statistics, 0.0)


def test_kl_of_nearly_equal_policies_does_not_cancel() -> None:
    one = torch.ones(1)
    ref = torch.tensor([-1.0 + 2.0**-12])
    inputs = {"advantages": 0 * one, "weights": one, "mask": one.bool(), "ref_logprobs": ref}
    grad, statistics = grpo_token_loss(-one, **inputs, **CONFIG)
    q = torch.tensor([2.0**-12]).double()
    torch.testing.assert_close(statistics["kl"].double(), (q**2 / 2 + q**3 / 6)[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(grad.double(), -CONFIG["beta"] * torch.expm1(q), rtol=1e-6, atol=0)


def test_counts_beyond_fp32_integers_stay_exact() -> None:
    from fused_grpo.kernels.grpo_loss import STATISTICS, _statistics

    # 2^24 + 4096 is an fp32, but adding 1 to 2^24 in fp32 gives 2^24.
    partials = torch.ones(4097, STATISTICS)
    partials[0, 2] = 2**24
    assert _statistics(partials)["num_tokens"].item() == 2**24 + 4096


def test_reruns_are_bitwise_equal() -> None:
    first, again = (grpo_token_loss(**problem(2500), **CONFIG) for _ in range(2))
    assert torch.equal(first[0], again[0])
    assert all(torch.equal(first[1][name], again[1][name]) for name in first[1])
