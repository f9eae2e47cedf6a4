"""The kernel from which no logit reaches memory: products of 16-bit numbers, against fp64."""

from typing import Any

import pytest
import torch
from device_under_test import DEVICE
from gpu_problems import SIZES, Problem, assert_as_exact, make_problem
from torch.testing import assert_close

from fused_grpo import kernels
from fused_grpo._maths import distributions
from fused_grpo._maths.statistics import full_precision
from fused_grpo.head.head import multiply_into

pytestmark = pytest.mark.dry_run


def options_of(names: str, N: int, V: int) -> dict[str, Any]:
    """A temperature for each row; with "all" every other option, too."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    temperature = 0.5 + torch.rand(N, generator=generator, device=DEVICE)
    if names == "none":
        return {"temperature": temperature, "bias": None, "logit_scale": 1.0, "softcap": None}
    bias = torch.randn(V, generator=generator, device=DEVICE)
    return {"temperature": temperature, "bias": bias, "logit_scale": 0.7, "softcap": 9.0}


def check(problem: Problem, options: dict[str, Any], *, entropy: bool) -> None:
    targets = problem.targets.clamp_min(0)
    ours = kernels.logprob_forward(problem.hidden, problem.weight, targets, entropy=entropy, **options)[:2]
    plain, exact = (
        distributions.logprobs_and_entropy(x.hidden, x.weight, targets, **options)
        for x in (problem.to(torch.float32), problem.to(torch.float64))
    )
    assert (ours[0] <= 0).all()
    magnitude = (problem.hidden.double() @ problem.weight.double().t()).abs().max().item()
    for name, actual, torchs, wanted in zip(("log p", "entropy"), ours, plain, exact, strict=True):
        if actual is not None:
            assert_as_exact(actual, torchs, wanted, problem, magnitude=magnitude, what=name)


@pytest.mark.parametrize(("D", "V"), SIZES.heads)
@pytest.mark.parametrize("dtypes", [name for name in SIZES.dtypes if "and" not in name])
@pytest.mark.parametrize("names", ["none", "all"])
def test_products_of_16_bits_are_as_exact_as_fp32(D, V, dtypes, names):
    for N in SIZES.rows:
        problem = make_problem(N, D, V, dtypes, off_policy=False)
        check(problem, options_of(names, N, V), entropy=names == "all")


@pytest.mark.parametrize(("D", "V"), SIZES.heads)
@pytest.mark.parametrize("names", ["none", "all"])
def test_softmax_weights_without_logits_are_those_of_logits(D, V, names):
    """Row by row: a token that is almost certain has small weights, which are as exact as any. Some rows are far."""
    for N in SIZES.rows:
        problem, options = make_problem(N, D, V, off_policy=False), options_of(names, N, V)
        if not kernels.prefers_softmax_weights(problem.hidden, problem.weight, 10**9):
            continue
        targets = problem.targets.clamp_min(0)
        problem.hidden[N // 2] *= 40
        logits, out = (kernels.empty_tile(N, V, dtype=dtype, device=DEVICE) for dtype in (torch.float32, problem.dtype))
        with full_precision(logits):
            multiply_into(logits, problem.hidden, problem.weight.t())
        given = {"entropy": True, **options}
        expected = kernels.softmax_weights_(logits, targets, dtype=problem.dtype, **given)
        rows = problem.hidden, problem.weight, targets
        out, scale, statistics = kernels.softmax_weights_forward(*rows, out=out, **given)
        for actual, others in zip(statistics[:2], expected[2][:2], strict=True):
            assert_close(actual, others, rtol=1e-4, atol=1e-4)
        ours, wanted = scale[:, None] * out.float(), expected[1][:, None] * expected[0].float()
        wrong, size = (ours - wanted).abs().amax(1), wanted.abs().amax(1)
        assert (wrong <= 2e-2 * size).all()
        again = kernels.empty_tile(N, V, dtype=problem.dtype, device=DEVICE)
        assert torch.equal(kernels.softmax_weights_forward(*rows, out=again, **given)[0], out)


def test_hidden_states_beyond_the_reach_of_32_bits_are_read_where_they_are():
    D = SIZES.heads[0][0]
    N, V, last = SIZES.reach // D + 77, 257, slice(-50, None)
    problem = make_problem(N, D, V, off_policy=False)
    options = options_of("none", N, V)
    logprobs = kernels.logprob_forward(problem.hidden, problem.weight, problem.targets.clamp_min(0), **options)[0]
    logits = problem.hidden[last].double() @ problem.weight.double().t() / options["temperature"][last, None].double()
    exact = logits.log_softmax(1).gather(1, problem.targets[last, None].clamp_min(0))[:, 0]
    assert (logprobs[last].double() - exact).abs().max() <= 1e-3
    assert logprobs.isfinite().all()
