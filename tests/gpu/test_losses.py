"""All losses and options on the device, by its kernels and in several chunks, against fp64."""

import functools
from typing import Any

import pytest
import torch
from device_under_test import DEVICE
from gpu_problems import SIZES, Problem, assert_gradient, fused_linear_grpo_loss, loss_of, make_problem

from fused_grpo import GRPOLossConfig
from fused_grpo.config import CORRECTIONS, DPPO, LEVELS, TRL_LOSS_TYPES

pytestmark = [pytest.mark.dry_run, pytest.mark.grid, pytest.mark.usefixtures("weights_from")]

OPTIONS: dict[str, dict[str, Any]] = {
    "high": {"epsilon_high": 0.28},
    "delta": {"delta": 1.1},
    "kl": {"beta": 0.1, "use_bias_correction_kl": False},
    "k1": {"beta": 0.1, "kl_estimator": "k1"},
    "k2": {"beta": 0.1, "kl_estimator": "k2"},
    "bonus": {"entropy_coef": 0.1},
    "quantile and bonus": {"top_entropy_quantile": 0.4, "entropy_coef": 0.1},
    "off-policy mask": {"off_policy_mask_threshold": 0.1},
    "clip-cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.01},
    "kl-cov": {"kl_cov_ratio": 0.2},
    "rejection": {"sequence_rejection": "ratio", "sequence_rejection_max": 1.05},
    **{name: {"sampling_correction": name, "sampling_clip_max": 1.3, "sampling_clip_min": 0.7} for name in CORRECTIONS},
}


def config_of(loss_type: str, level: str, **options: Any) -> GRPOLossConfig:
    options = {"max_completion_length": 99, "importance_sampling_level": level, **options}
    return GRPOLossConfig(loss_type=loss_type, **({"epsilon_high": 1.1} if loss_type == "cispo" else {}) | options)


CONFIGS = {f"{loss}, {level}": config_of(loss, level) for loss in TRL_LOSS_TYPES for level in LEVELS}
CONFIGS |= {f"{loss}, token": config_of(loss, "token") for loss in ("gmpo", "gpg", *DPPO)}
CONFIGS |= {
    f"{loss}, {name}": config_of(loss, "token", **OPTIONS[name])
    for loss in ("dapo", "vespo")
    for name in OPTIONS
    if loss == "dapo" or not name.startswith(("sequence", "delta"))
}


@functools.cache
def problem_of(dtypes: str) -> Problem:
    return make_problem(*SIZES.shape, dtypes)


def in_chunks() -> dict[str, Any]:
    """By kernels, in chunks of a third of the rows."""
    N, _, V = SIZES.shape
    return {"impl": "triton", "chunk_bytes": 4 * (V + 2 * 64) * (N // 3)}


def check(
    ours: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], problem: Problem, *, vespo: bool = False
) -> None:
    for name, value in ours.items():
        if name in ("hidden", "weight"):
            assert_gradient(value, exact[name], problem, what=name)
        elif name != "recomputed_fraction":
            # Means of a few hundred terms of log-probs that are off by 1e-6. VESPO's weight is of their sum over a
            # sequence, and tensor cores, which truncate, make all of them err the same way.
            allowed = (5e-3 if vespo else 5e-5) * exact[name].abs().clamp_min(1.0)
            assert ((value.double() - exact[name]).abs() <= allowed).all(), name


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_metrics_and_gradients_are_those_of_fp64(name):
    problem = problem_of(next(iter(SIZES.dtypes)))
    exact = loss_of(problem.to(torch.float64), config=CONFIGS[name], impl="reference")
    vespo = CONFIGS[name].loss_type == "vespo"
    check(loss_of(problem, config=CONFIGS[name], **in_chunks()), exact, problem, vespo=vespo)


@pytest.mark.parametrize("dtypes", SIZES.dtypes)
@pytest.mark.parametrize("plan", ["no gradient", "frozen head", "trainable"])
@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_every_dtype_and_plan(dtypes, plan, impl):
    problem, config = problem_of(dtypes), config_of("grpo", "token", beta=0.1)
    exact = loss_of(problem.to(torch.float64), plan, config=config, impl="reference")
    check(loss_of(problem, plan, config=config, **in_chunks() | {"impl": impl}), exact, problem)


def test_dw_goes_to_a_main_gradient_in_fp32():
    problem = problem_of(next(iter(SIZES.dtypes)))
    exact = loss_of(problem.to(torch.float64), impl="reference")["weight"]
    leaves = problem.leaves("trainable")
    main = torch.ones(leaves["weight"].shape, device=DEVICE)
    given = {**problem.loss, "targets": problem.targets, "weight_main_grad": main, **in_chunks()}
    (2.5 * fused_linear_grpo_loss(**leaves, **given).loss).backward()
    assert leaves["weight"].grad is None
    assert_gradient(main - 1, 2.5 * exact, problem, what="main gradient")


@pytest.mark.parametrize("chunk_bytes", [None, in_chunks()["chunk_bytes"]])
def test_inputs_stay_as_they_are(chunk_bytes):
    problem = problem_of(next(iter(SIZES.dtypes)))
    leaves = problem.leaves("trainable")
    given = {**problem.loss, "targets": problem.targets}
    kept = {name: x.detach().clone() for name, x in {**leaves, **given}.items()}
    fused_linear_grpo_loss(**leaves, **given, impl="triton", chunk_bytes=chunk_bytes).loss.backward()
    for name, x in {**leaves, **given}.items():
        assert torch.equal(x, kept[name]), name


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("retained", [False, True])
def test_the_upstream_gradient_is_not_rounded_to_16_bits(impl, retained):
    """A GPU would round a 0-d factor to the dtype of what it multiplies."""
    problem, third = problem_of("fp16"), torch.tensor(1 / 3, device=DEVICE)
    leaves = problem.leaves("trainable")
    given = {**problem.loss, "targets": problem.targets, "impl": impl}
    expected = loss_of(problem, impl=impl)
    out = fused_linear_grpo_loss(**leaves, **given)
    ours = torch.autograd.grad(out.loss, list(leaves.values()), third, retain_graph=retained)
    for name, gradient in zip(leaves, ours, strict=True):
        assert torch.equal(gradient, (expected[name].float() * third).to(gradient.dtype)), name
