"""Bar 3: logits as large, as equal, as lopsided or as forbidden as they come give no NaN and lose no precision."""

from typing import Any

import pytest
import torch
from device_under_test import assert_rounded, rounds
from torch import Tensor

from fused_grpo import GRPOLossConfig, grpo_loss, linear_logprobs_and_entropy

# NumPy, under Triton's interpreter, warns of the infinities here and of a NaN that `where` then leaves out.
pytestmark = [pytest.mark.grid, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

N, V, D = 7, 37, 4
PLANS = {"no gradient": (), "frozen head": ("hidden",), "trainable": ("hidden", "weight", "bias")}
# 300 bytes cut these logits into tiles of a few rows and columns.
PATHS = [
    (impl, dtype, chunk_bytes)
    for impl, dtype in (
        ("torch", torch.float32),
        ("torch", torch.bfloat16),
        ("triton", torch.float32),
        ("triton", torch.float16),
        ("triton", torch.bfloat16),
    )
    for chunk_bytes in (None, 300)
]
# Interpreted, small tiles take a hundred launches.
RARE = [("triton", dtype, 300) for dtype in (torch.float16, torch.bfloat16)]
SLOW = [pytest.param(*path, marks=pytest.mark.full if path in RARE else ()) for path in PATHS]
Inputs = dict[str, Any]


def quarters(*size: int) -> Tensor:
    """Random multiples of 1/4 from -1 to 1, which every dtype holds, and fp32 products and sums of them, too."""
    return torch.randint(-4, 5, size, generator=torch.Generator().manual_seed(sum(size))) / 4


def cycle(*values: float) -> Tensor:
    return torch.tensor(values).repeat(N)[:N]


def bias_of(default: float, special: float, *at: int) -> Tensor:
    return torch.full((V,), default).index_fill(0, torch.tensor(at), special)


BANNED = bias_of(0.0, -torch.inf, *range(0, V, 3))
SCENARIOS: dict[str, Inputs] = {
    "logits up to 1e4 and down to -1e4": {"hidden": 128 * quarters(N, D), "weight": 32 * quarters(V, D)},
    "all logits near 1e4": {"bias": bias_of(8192.0, 8192.0, 0)},
    "all logits near -1e4": {"bias": bias_of(-8192.0, -8192.0, 0)},
    "all logits equal": {"weight": torch.zeros(V, D), "bias": None},
    "all logits equal to 1e4": {"weight": torch.zeros(V, D), "bias": bias_of(8192.0, 8192.0, 0)},
    "one logit far above": {"bias": bias_of(0.0, 8192.0, 5)},
    "one logit far below": {"bias": bias_of(0.0, -8192.0, 5)},
    "banned tokens": {"bias": BANNED},
    "one token allowed": {"bias": bias_of(-torch.inf, 0.5, 5)},
    "a cold distribution": {"temperature": cycle(1e-3, 1e-2)},
    "a hot distribution": {"temperature": cycle(1e3, 1e6)},
    "a saturated soft cap": {"hidden": 128 * quarters(N, D), "softcap": 2.0},
    "banned tokens under a soft cap": {"bias": BANNED, "softcap": 2.0},
    "hidden states of zero": {"hidden": quarters(N, D) * (torch.arange(N) % 2)[:, None]},
}
TARGETS = torch.tensor([5, 0, V - 1, 9, -100, 5, 20])  # hot or banned, banned, the last, banned, ignored, ...


def inputs_of(scenario: str, dtype: torch.dtype) -> Inputs:
    inputs: Inputs = {"hidden": quarters(N, D), "weight": quarters(V, D), "bias": quarters(V), "targets": TARGETS}
    inputs |= SCENARIOS[scenario]
    return {name: x.to(dtype) if name in PLANS["trainable"] and x is not None else x for name, x in inputs.items()}


def solve(inputs: Inputs, plan: str, *, upstream: float = 1.0, entropy: bool = True, **options: Any) -> Inputs:
    leaves = {name: inputs[name] for name in PLANS["trainable"] if inputs[name] is not None}
    leaves = {name: x.detach().requires_grad_(name in PLANS[plan]) for name, x in leaves.items()}
    out = linear_logprobs_and_entropy(**{**inputs, **leaves}, **options)
    results = {"logprobs": out.logprobs.detach(), "entropy": out.entropy.detach()}
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    if wanted:
        values = out.logprobs * cycle(1, -2, 0.5) + (out.entropy * cycle(0.5, 1) if entropy else 0.0)
        # What is -inf would make the sum so, and keeps its gradient.
        gradients = torch.autograd.grad(values, list(wanted.values()), torch.full_like(values, upstream))
        results |= dict(zip(wanted, gradients, strict=True))
    return results


def assert_at_most_twice(ours: Tensor, plain: Tensor, exact: Tensor, what: str) -> None:
    assert torch.equal(ours.isinf(), exact.isinf()), f"{what}: infinite in other places"
    ours, plain, exact = (x.double().masked_fill(exact.isinf(), 0.0) for x in (ours, plain, exact))
    # A few numbers are all that plain torch needs to be right by luck: two units in the last place of the largest.
    luck = 2 * torch.finfo(torch.float32).eps * exact.abs().max()
    for norm in (torch.linalg.vector_norm, lambda x: x.abs().max()):
        error, plain_error = norm(ours - exact), norm(plain - exact)
        assert error <= 2 * plain_error + luck, f"{what}: error {error:.3e}, of plain torch {plain_error:.3e}"


@pytest.mark.parametrize(("impl", "dtype", "chunk_bytes"), SLOW)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_extreme_logits_are_as_exact_as_any(scenario, impl, dtype, chunk_bytes):
    inputs = inputs_of(scenario, dtype)
    for plan, entropy in (("no gradient", True), ("frozen head", False), ("frozen head", True), ("trainable", True)):
        ours = solve(inputs, plan, entropy=entropy, impl=impl, chunk_bytes=chunk_bytes)
        plain, exact = (
            solve(inputs_of(scenario, to), plan, entropy=entropy, impl="reference")
            for to in (torch.float32, torch.float64)
        )
        assert (ours["logprobs"] <= 0).all()
        for name, value in ours.items():
            assert not value.isnan().any(), f"{name} of {plan}"
            if name in PLANS["trainable"] and rounds(dtype):
                assert_rounded(value, exact[name], dtype=dtype, what=f"{name} of {plan}")
                continue
            assert_at_most_twice(value, plain[name].to(value.dtype), exact[name], f"{name} of {plan}")


@pytest.mark.parametrize(("impl", "dtype", "chunk_bytes"), PATHS)
@pytest.mark.parametrize("plan", PLANS)
def test_confident_tokens_keep_their_logprob_entropy_and_gradient(plan, impl, dtype, chunk_bytes):
    """1 - p is from 7e-8 to 1e-9, below what fp32 can tell from 1; plain torch gives 0."""
    weight = quarters(V, D).clamp_max(0.0)
    weight[:, 0] = torch.eye(V)[5]
    inputs = {"hidden": quarters(N, D) / 4, "weight": weight, "bias": None, "targets": torch.full((N,), 5)}
    inputs["hidden"][:, 0] = cycle(20.0, 21.0, 22.0, 24.0)
    # An upstream gradient that keeps the products within the range of fp16.
    exact = solve(inputs_with(inputs, torch.float64), plan, upstream=2.0**14, impl="reference")
    ours = solve(inputs_with(inputs, dtype), plan, upstream=2.0**14, impl=impl, chunk_bytes=chunk_bytes)
    for name, value in ours.items():
        rtol = 1e-5 if value.dtype == torch.float32 else 1.01 * torch.finfo(dtype).eps
        atol = 1e-6 * exact[name].abs().max().item() + (1e-7 if value.dtype == torch.float16 else 0.0)
        if name in PLANS["trainable"] and rounds(dtype):
            assert_rounded(value, exact[name], dtype=dtype, what=name)
        else:
            torch.testing.assert_close(value.double(), exact[name], rtol=rtol, atol=atol)
        assert value.abs().amax() > 0


def inputs_with(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return {name: x.to(dtype) if name in ("hidden", "weight") else x for name, x in inputs.items()}


@pytest.mark.parametrize(("impl", "dtype", "chunk_bytes"), PATHS)
@pytest.mark.parametrize("plan", PLANS)
def test_all_rows_ignored_give_zeros_and_no_gradient(plan, impl, dtype, chunk_bytes):
    for count in (0, N):
        inputs = inputs_of("banned tokens", dtype)
        inputs |= {"hidden": inputs["hidden"][:count], "targets": torch.full((count,), -100)}
        leaves = {name: inputs[name].detach().requires_grad_(name in PLANS[plan]) for name in PLANS["trainable"]}
        out = linear_logprobs_and_entropy(**{**inputs, **leaves}, impl=impl, chunk_bytes=chunk_bytes)
        assert all(torch.equal(value, torch.zeros(count)) for value in out)
        if PLANS[plan]:
            (out.logprobs + out.entropy).sum().backward()
        for name, leaf in leaves.items():
            assert leaf.grad is None if name not in PLANS[plan] else torch.equal(leaf.grad, torch.zeros_like(leaf))


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_banned_target_has_no_probability_and_a_gradient(impl):
    """Its log-prob is -inf; the gradient, target less mean, is finite, and so is the gradient of its neighbours."""
    inputs = inputs_of("banned tokens", torch.float32)
    ours = solve(inputs, "trainable", impl=impl)
    banned = BANNED[TARGETS.clamp_min(0)].isinf() & (TARGETS >= 0)
    assert torch.equal(ours["logprobs"] == -torch.inf, banned)
    assert all(value.isfinite().all() for name, value in ours.items() if name != "logprobs")
    assert (ours["hidden"][banned].abs().amax(1) > 0).all()


@pytest.mark.parametrize("impl", ["reference", "torch", "triton"])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("q", [-200.0, 50.0, 80.0, 88.0, 88.7, 89.0, 300.0])
@pytest.mark.parametrize("count", [1, 3])
def test_a_kl_is_infinite_only_where_its_sum_is_no_number_of_fp32(impl, corrected, q, count):
    """And the gradient of a bias-corrected loss, -r q, is finite at any q."""
    config, results = GRPOLossConfig(beta=0.04, use_bias_correction_kl=corrected), {}
    for name, dtype in ((impl, torch.float32), ("reference", torch.float64)):
        logprobs = torch.full((1, count), -300.0, dtype=dtype, requires_grad=True)
        given = {"advantages": torch.ones(1, dtype=dtype), "impl": name}
        given["ref_logprobs"] = torch.full((1, count), -300.0 + q).to(dtype)
        out = grpo_loss(logprobs, config=config, **given)
        out.loss.backward()
        results[dtype] = out.metrics["kl"].double(), logprobs.grad.double()
    (kl, gradient), (exact_kl, exact) = results.values()
    is_too_large = exact_kl * count > torch.finfo(torch.float32).max
    torch.testing.assert_close(kl, torch.where(is_too_large, torch.inf, exact_kl), rtol=2e-5, atol=0.0)
    if corrected or not is_too_large:
        torch.testing.assert_close(gradient, exact, rtol=2e-5, atol=0.0)
