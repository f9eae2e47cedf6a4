"""The kernel from which no logit reaches memory: products of 16-bit numbers, against fp64."""

from typing import Any

import pytest
import torch
from device_under_test import DEVICE
from gpu_problems import SIZES, Problem, assert_as_exact, make_problem

from fused_grpo import kernels
from fused_grpo._maths import distributions

pytestmark = pytest.mark.rehearsed


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
    for name, mine, torchs, wanted in zip(("log p", "entropy"), ours, plain, exact, strict=True):
        if mine is not None:
            assert_as_exact(mine, torchs, wanted, problem, magnitude=magnitude, what=name)


@pytest.mark.parametrize(("D", "V"), SIZES.heads)
@pytest.mark.parametrize("dtypes", [name for name in SIZES.dtypes if "and" not in name])
@pytest.mark.parametrize("names", ["none", "all"])
def test_products_of_16_bits_are_as_exact_as_fp32(D, V, dtypes, names):
    for N in SIZES.rows:
        problem = make_problem(N, D, V, dtypes, off_policy=False)
        check(problem, options_of(names, N, V), entropy=names == "all")


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
