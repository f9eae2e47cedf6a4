"""The one-pass loss against the reference and autograd in fp64, option by option, through Triton's interpreter."""

import itertools
import os
from typing import Any

import pytest
import torch
from exp_of_gpus import SIGNS, make_exp_noisy
from torch import Tensor

from fused_grpo._maths import formulas
from fused_grpo.config import TokenTerms
from fused_grpo.kernels import grpo_token_loss, token_statistics
from fused_grpo.passes import torch_passes

pytestmark = pytest.mark.grid
ON_GPU = os.environ.get("FUSED_GRPO_TEST_DEVICE") == "cuda"

# In the order in which the launcher takes them.
CONFIG: dict[str, Any] = {
    "form": "clipped",
    "epsilon_low": 0.2,
    "epsilon_high": 0.28,
    "delta": None,
    "sapo_temperatures": (1.0, 1.05),
    "beta": 0.1,
    "kl_estimator": "k3",
    "bias_correction_kl": False,
    "correction": None,
    "clip_min": None,
    "clip_max": None,
    "log_ratio_penalty": 0.0,
}
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


def run(inputs: dict[str, Tensor], **config: Any) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    rest = {name: x for name, x in inputs.items() if name not in ("logprobs", "log_ratio")}
    terms = tuple((CONFIG | config).values())
    *gradients, sums = grpo_token_loss(inputs["logprobs"], log_ratio=inputs.get("log_ratio"), inputs=rest, terms=terms)
    return *gradients, token_statistics([sums])


def plain(inputs: dict[str, Tensor], dtype: torch.dtype, **config: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    """By the reference and autograd, in `dtype`."""
    inputs = {name: x if x.dtype == torch.bool else x.to(dtype) for name, x in inputs.items()}
    leaves = {name: inputs.pop(name).detach() for name in ("logprobs", "log_ratio") if name in inputs}
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    loss, statistics = formulas.token_loss(**leaves, **inputs, terms=TokenTerms(**CONFIG | config))
    gradients = list(torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True))
    statistics["zero_gradient"] = (inputs["mask"] & (gradients[0] == 0)).sum().to(dtype)
    return gradients, formulas.token_statistics([statistics])


def check(independent: Any, inputs: dict[str, Tensor], *, exp_of_a_gpu: bool = ON_GPU, **config: Any) -> None:
    """With `exp_of_a_gpu` the three exps of a term (ratio, KL, correction) may each be off by 2^-22 of the term."""
    *gradients, statistics = run(inputs, **config)
    rough_gradients, rough = plain(inputs, torch.float32, **config)
    exact_gradients, exact = plain(inputs, torch.float64, **config)
    given = [gradient for gradient in gradients if gradient is not None]

    def magnitude(exact: Tensor, name: str = "") -> float:
        if not exp_of_a_gpu:
            return 1.0
        # Terms of both signs add up to the loss, and what moves each moves the sum.
        size = terms_of(inputs) if name in ("loss", "policy_term") else exact.abs().max().item()
        return max(1.0, size) * (4 + 3 * 2) / 4  # in units of 4 roundings of fp32, 2^-23 each

    for ours, other, wanted in zip(given, rough_gradients, exact_gradients, strict=True):
        independent.assert_as_exact_as_torch(ours, other, wanted, magnitude=magnitude(wanted))
    assert statistics.keys() == exact.keys()
    for name, value in statistics.items():
        assert value.dtype == torch.float32
        independent.assert_as_exact_as_torch(value, rough[name], exact[name], magnitude=magnitude(exact[name], name))


def terms_of(inputs: dict[str, Tensor]) -> float:
    """The sum of |weight * ratio * advantage| over the tokens in the mask."""
    ratio = (inputs["logprobs"] - inputs.get("old_logprobs", inputs["logprobs"])).exp()
    return (inputs["weights"] * ratio * inputs["advantages"].abs())[inputs["mask"]].sum().item()


VARIANTS = {
    "cispo": {"form": "cispo", "epsilon_high": 1.1},
    "sapo": {"form": "sapo"},
    "reinforce": {"form": "reinforce"},
    "dro": {"form": "reinforce", "correction": "sampler", "log_ratio_penalty": 0.3},
    "penalty, truncate": {"log_ratio_penalty": 0.3, "correction": "truncate", "clip_max": 1.2},
    "gmpo": {"form": "gmpo"},
    "dppo_tv": {"form": "dppo_tv", "epsilon_low": 0.05, "epsilon_high": 0.1},
    "dppo_kl, corrected kl": {"form": "dppo_kl", "epsilon_low": 0.02, "epsilon_high": 0.05, "bias_correction_kl": True},
    "ipo": {"form": "ipo", "epsilon_low": 0.05, "epsilon_high": 0.1},
    "ipo, of the sampler": {"form": "ipo", "correction": "sampler", "delta": 1.1, "epsilon_low": 0.05},
    "dppo_tv, of the sampler": {"form": "dppo_tv", "correction": "sampler", "delta": 1.1, "epsilon_low": 0.05},
    "dppo_kl, of the sampler": {"form": "dppo_kl", "correction": "sampler", "epsilon_high": 0.03},
    "delta below the clip": {"delta": 1.1},
    "delta above the clip": {"delta": 1.5},
    "k1": {"kl_estimator": "k1"},
    "k2, corrected": {"kl_estimator": "k2", "bias_correction_kl": True},
    "k1, corrected": {"kl_estimator": "k1", "bias_correction_kl": True},
    "truncate": {"correction": "truncate", "clip_min": 0.8, "clip_max": 1.2},
    "mask": {"correction": "mask", "clip_min": 0.8, "clip_max": 1.2},
    "sapo, mask": {"form": "sapo", "correction": "mask", "clip_max": 1.2},
    "without bounds": {"correction": "truncate"},
}


def of_every_kind(*, per_sequence: bool) -> dict[str, Tensor]:
    inputs, generator = problem(65), torch.Generator().manual_seed(1)
    inputs["sampling_logprobs"][3] = float("nan")
    inputs["policy_weights"] = torch.rand(65, generator=generator) * (torch.arange(65) % 4 > 0)
    inputs["entropy_weights"] = torch.rand(65, generator=generator)
    inputs["kl_cov_weights"] = torch.rand(65, generator=generator) * (torch.arange(65) % 3 > 0)
    if per_sequence:
        inputs["log_ratio"] = 0.3 * torch.randn(65, generator=generator)
    return inputs


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("per_sequence", [False, True])
def test_every_variant_matches_autograd(independent: Any, name: str, per_sequence: bool) -> None:
    check(independent, of_every_kind(per_sequence=per_sequence), **VARIANTS[name])


# NumPy, under the interpreter, warns of the infinity that this test is about.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_infinite_kl_without_beta_is_a_metric_and_nothing_else() -> None:
    one = torch.ones(1)
    inputs = {"logprobs": -200 * one, "advantages": one, "weights": one, "mask": one.bool(), "ref_logprobs": -one}
    gradient, _, statistics = run(inputs, beta=0.0)
    assert gradient.item() == -1.0
    assert statistics["loss"].item() == -1.0
    assert statistics["kl"].item() == float("inf")


@pytest.mark.parametrize("given", [c for n in range(5) for c in itertools.combinations(OPTIONAL, n)], ids=str)
@pytest.mark.parametrize("bias_correction_kl", [False, True])
def test_every_set_of_inputs_matches_autograd(
    independent: Any, given: tuple[str, ...], bias_correction_kl: bool
) -> None:
    inputs = {name: value for name, value in problem(33).items() if name not in OPTIONAL or name in given}
    check(independent, inputs, bias_correction_kl=bias_correction_kl)


@pytest.mark.parametrize("N", [1, 1024, 1025, 2500])
def test_tokens_beyond_one_program_are_counted_once(independent: Any, N: int) -> None:
    inputs = problem(N) | {"mask": torch.arange(N) % 3 != 1}
    check(independent, inputs)


@pytest.mark.cpu_only(reason="a GPU has its own exp")
@pytest.mark.parametrize("sign", SIGNS)
def test_the_exp_of_a_gpu_is_no_other_loss(independent: Any, monkeypatch: pytest.MonkeyPatch, sign: str) -> None:
    make_exp_noisy(monkeypatch, sign)
    for per_sequence in (False, True):
        for variant in VARIANTS.values():
            check(independent, of_every_kind(per_sequence=per_sequence), exp_of_a_gpu=True, **variant)
    for count in (1, 33, 1024, 2500):
        for bias_correction_kl in (False, True):
            check(independent, problem(count), exp_of_a_gpu=True, bias_correction_kl=bias_correction_kl)


@pytest.mark.parametrize(("advantage", "ratio", "slope"), [(1, 1.3, 0), (1, 0.7, -0.7), (-1, 0.7, 0), (-1, 1.3, 1.3)])
def test_only_the_side_that_would_overshoot_is_clipped(advantage: float, ratio: float, slope: float) -> None:
    one = torch.ones(1)
    old = -torch.log(torch.tensor([ratio]))
    inputs = {"logprobs": 0 * one, "advantages": advantage * one, "weights": one, "mask": one.bool()}
    grad, _, statistics = run(inputs | {"old_logprobs": old})
    assert grad.item() == pytest.approx(slope, abs=1e-6)
    assert statistics["clip_ratio_low"].item() == (advantage < 0 and ratio < 1)
    assert statistics["clip_ratio_high"].item() == (advantage > 0 and ratio > 1)
    assert statistics["zero_gradient_fraction"].item() == (slope == 0)


def test_zero_clip_range_on_policy_still_learns() -> None:
    # r is exactly 1: on the edge of [1, 1], where torch.min and clamp let the gradient through.
    one = torch.ones(3)
    advantages = torch.tensor([1.0, -1.0, 0.0])
    inputs = {"logprobs": -one, "advantages": advantages, "weights": one, "mask": one.bool()}
    grad, *_ = run(inputs, epsilon_low=0.0, epsilon_high=0.0)
    assert torch.equal(grad, -advantages)


def test_masked_tokens_are_nothing_even_where_inputs_are_not_numbers() -> None:
    clean = problem(33)
    poisoned = dict(clean)
    for name, bad in zip(clean.keys() - {"mask"}, itertools.cycle([float("nan"), float("inf"), -float("inf")])):
        poisoned[name] = torch.where(clean["mask"], clean[name], bad)
    grad, _, statistics = run(poisoned)
    wanted_grad, _, wanted = run(clean)
    assert torch.equal(grad, wanted_grad)
    assert torch.equal(grad[~clean["mask"]], torch.zeros((~clean["mask"]).sum()))
    assert all(torch.equal(statistics[name], wanted[name]) for name in wanted)


LOGPROBS = (-float("inf"), -200.0, -1.0, float("nan"))
WITHOUT_KL = {name: CONFIG | {"beta": 0.0} | options for name, options in {"clipped": {}, **VARIANTS}.items()}


def differences(config: dict[str, Any], **values: float) -> dict[str, tuple[float, float]]:
    """What the kernel and plain torch say of one token with these values, where they differ.

    A loss that is not finite has no gradient to compare.
    """
    inputs = {name: torch.tensor([value]) for name, value in values.items()}
    inputs |= {"weights": torch.ones(1), "mask": torch.ones(1, dtype=torch.bool)}
    gradient, _, statistics = run(inputs, **config)
    logprobs = inputs.pop("logprobs")
    wanted_gradient, _, sums = torch_passes.grpo_token_loss(logprobs, inputs=inputs, terms=TokenTerms(**config))
    wanted = {"gradient": wanted_gradient[0], **formulas.token_statistics([sums])}
    pairs = {name: (x.item(), wanted[name].item()) for name, x in {"gradient": gradient[0], **statistics}.items()}
    if not wanted["loss"].isfinite():
        del pairs["gradient"], pairs["zero_gradient_fraction"]
    return {name: pair for name, pair in pairs.items() if pair != pytest.approx(pair[::-1], rel=1e-5, nan_ok=True)}


# NumPy, under the interpreter, warns of what these tests are about.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("name", WITHOUT_KL)
def test_infinite_logprobs_and_nan_are_what_torch_makes_of_them(name: str, advantage: float) -> None:
    """One token at a time, so that nothing is hidden in the sum over others."""
    wrong = {}
    for current, old, sampled in itertools.product(LOGPROBS, repeat=3):
        token = {"logprobs": current, "old_logprobs": old, "sampling_logprobs": sampled, "advantages": advantage}
        wrong[current, old, sampled] = differences(WITHOUT_KL[name], **token)
    assert not {values: names for values, names in wrong.items() if names}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("name", WITHOUT_KL)
def test_without_an_advantage_or_a_weight_there_is_no_term(name: str, per_sequence: bool) -> None:
    """However far apart the policies are: nothing times infinity is nothing."""
    terms = WITHOUT_KL[name] | {"log_ratio_penalty": 0.0}
    for current, old, sampled in itertools.product((-200.0, -1.0), repeat=3):
        given = {"logprobs": current, "old_logprobs": old, "sampling_logprobs": sampled, "weights": 1.0}
        given |= {"log_ratio": current - old} if per_sequence else {}
        for left_out in ({"advantages": 0.0}, *({"advantages": A, "policy_weights": 0.0} for A in (1.0, -1.0))):
            token = {x: torch.tensor([value]) for x, value in (given | left_out).items()}
            token["mask"] = torch.ones(1, dtype=torch.bool)
            values, kernel = dict(token), run(token, **terms)
            current_and_ratio = {x: values.pop(x) for x in ("logprobs", "log_ratio") if x in values}
            *plain, sums = torch_passes.grpo_token_loss(**current_and_ratio, inputs=values, terms=TokenTerms(**terms))
            for *gradients, statistics in (kernel, (*plain, formulas.token_statistics([sums]))):
                results = [x for x in (*gradients, statistics["loss"], statistics["policy_term"]) if x is not None]
                assert all((x == 0).all() for x in results), (current, old, sampled, left_out, results)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", ["clipped", "k1", "k2, corrected", "k1, corrected", "dro"])
def test_an_infinite_reference_and_nan_are_what_torch_makes_of_them(name: str) -> None:
    wrong = {}
    for current, old, ref in itertools.product(LOGPROBS, repeat=3):
        token = {"logprobs": current, "old_logprobs": old, "ref_logprobs": ref, "advantages": 1.0}
        wrong[current, old, ref] = differences(WITHOUT_KL[name] | {"beta": 0.1}, **token)
    assert not {values: names for values, names in wrong.items() if names}


@pytest.mark.parametrize("N", [0, 5])
def test_nothing_unmasked_sums_to_zero_and_has_no_extremes(N: int) -> None:
    grad, _, statistics = run(problem(N) | {"mask": torch.zeros(N, dtype=torch.bool)})
    assert torch.equal(grad, torch.zeros(N))
    assert statistics.pop("ratio_min").item() == float("inf")
    assert statistics.pop("ratio_max").item() == -float("inf")
    assert {name: value.item() for name, value in statistics.items()} == dict.fromkeys(statistics, 0.0)


def test_kl_of_nearly_equal_policies_does_not_cancel() -> None:
    one = torch.ones(1)
    ref = torch.tensor([-1.0 + 2.0**-12])
    inputs = {"logprobs": -one, "advantages": 0 * one, "weights": one, "mask": one.bool(), "ref_logprobs": ref}
    grad, _, statistics = run(inputs)
    q = torch.tensor([2.0**-12]).double()
    torch.testing.assert_close(statistics["kl"].double(), (q**2 / 2 + q**3 / 6)[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(grad.double(), -CONFIG["beta"] * torch.expm1(q), rtol=1e-6, atol=0)


def test_counts_beyond_fp32_integers_stay_exact() -> None:
    from fused_grpo.kernels.grpo_loss import STATISTICS

    # 2^24 + 4096 is an fp32, but adding 1 to 2^24 in fp32 gives 2^24.
    partials = torch.ones(4097 * STATISTICS + 15)
    partials[2] = 2**24
    assert token_statistics([partials])["loss_tokens"].item() == 2**24 + 4096
