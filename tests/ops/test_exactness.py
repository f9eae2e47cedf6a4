"""Every path against fp64: outputs and all gradients, with an error of at most twice that of plain fp32 torch."""

import pytest
import torch
from torch import Tensor

from fused_grpo import GRPOLossConfig, fused_linear_grpo_loss, linear_logprobs_and_entropy
from fused_grpo.passes import buffers

pytestmark = pytest.mark.grid

RAGGED = [(1, 1, 3), (7, 2, 5), (13, 127, 16), (33, 130, 40), (64, 257, 24)]
full = pytest.mark.full
# Interpreted, the larger shapes take seconds.
IMPLS = [("torch", shape) for shape in RAGGED] + [("triton", shape) for shape in RAGGED[:3]]
IMPLS += [pytest.param("triton", shape, marks=full) for shape in RAGGED[3:]]
PROBLEMS = 4  # together: a single one may come out right by luck in plain fp32
CONFIG = GRPOLossConfig(loss_type="grpo", epsilon=0.2, epsilon_high=0.28, beta=0.1)


def logprobs_and_gradients(problem, dtype: torch.dtype, impl: str) -> dict[str, Tensor]:
    leaves = problem.leaves(dtype)
    out = linear_logprobs_and_entropy(targets=problem.targets, **leaves, **problem.head, impl=impl)
    # Upstream gradients that differ from row to row, as a loss would send.
    slope = torch.linspace(-1, 1, len(problem.targets), dtype=out.logprobs.dtype)
    slope[1::7] = 0.0  # for these rows only the entropy has a gradient
    gradients = torch.autograd.grad((out.logprobs * slope + out.entropy * slope.flip(0)).sum(), list(leaves.values()))
    return {**out._asdict(), **dict(zip(leaves, gradients, strict=True))}


def loss_and_gradients(problem, dtype: torch.dtype, impl: str, chunk_bytes: int | None = None) -> dict[str, Tensor]:
    leaves = problem.leaves(dtype)
    out = fused_linear_grpo_loss(
        targets=problem.targets,
        **leaves,
        **problem.head,
        **problem.loss,
        config=CONFIG,
        impl=impl,
        chunk_bytes=chunk_bytes,
    )
    gradients = torch.autograd.grad(out.loss * 3, list(leaves.values()))
    return {"loss": out.loss, **out.metrics, "logprobs": out.logprobs, **dict(zip(leaves, gradients, strict=True))}


def assert_all_as_exact(assert_as_exact, ours, plain, exact) -> None:
    """Each number of each problem, and each tensor over all problems."""
    assert ours[0].keys() == exact[0].keys()
    for name in exact[0]:
        values = [[answer[name] for answer in answers] for answers in (ours, plain, exact)]
        if exact[0][name].ndim:
            values = [[torch.cat([x.flatten() for x in tensors])] for tensors in values]
        for one, other, right in zip(*values, strict=True):
            assert_as_exact(one, other, right, what=name)


@pytest.mark.parametrize(("impl", "shape"), IMPLS)
@pytest.mark.parametrize("options", [False, True])
def test_logprobs_are_as_exact_as_fp32_allows(make_problem, assert_as_exact, monkeypatch, impl, options, shape):
    for name in ("DEFAULT_TILE_BYTES", "CPU_CHUNK_BYTES"):
        monkeypatch.setattr(buffers, name, 4 * 4 * shape[1])  # four rows: ragged chunks too
    monkeypatch.setattr(buffers, "total_memory", lambda device: buffers.MEMORY_SHARE * 4 * 4 * shape[1])
    problems = [make_problem(*shape, options=options, seed=seed) for seed in range(PROBLEMS)]
    exact = [logprobs_and_gradients(problem, torch.float64, "reference") for problem in problems]
    plain = [logprobs_and_gradients(problem, torch.float32, "reference") for problem in problems]
    ours = [logprobs_and_gradients(problem, torch.float32, impl) for problem in problems]
    assert_all_as_exact(assert_as_exact, ours, plain, exact)
    assert all((answer["logprobs"] <= 0).all() for answer in ours)


@pytest.mark.parametrize(("impl", "shape"), IMPLS)
@pytest.mark.parametrize("options", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_the_fused_loss_is_as_exact_as_fp32_allows(make_problem, assert_as_exact, impl, options, shape, rows):
    problems = [make_problem(*shape, options=options, seed=seed) for seed in range(PROBLEMS)]
    exact = [loss_and_gradients(problem, torch.float64, "reference") for problem in problems]
    plain = [loss_and_gradients(problem, torch.float32, "reference") for problem in problems]
    ours = [loss_and_gradients(x, torch.float32, impl, chunk_bytes=rows * 4 * shape[1]) for x in problems]
    assert_all_as_exact(assert_as_exact, ours, plain, exact)


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_gradcheck_of_logprobs_and_entropy(make_problem, impl):
    problem = make_problem(6, 11, 4)
    leaves = problem.leaves(torch.float64)

    def op(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return tuple(linear_logprobs_and_entropy(hidden, weight, problem.targets, bias=bias, **problem.head, impl=impl))

    assert torch.autograd.gradcheck(op, tuple(leaves.values()))


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("loss_type", ["grpo", pytest.param("dapo", marks=full)])
@pytest.mark.parametrize("bias_correction", [False, True])
def test_gradcheck_of_the_fused_loss(make_problem, impl, loss_type, bias_correction):
    problem = make_problem(6, 11, 4)
    config = GRPOLossConfig(loss_type=loss_type, beta=0.3, use_bias_correction_kl=bias_correction)

    def op(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        options = {**problem.head, **problem.loss, "config": config, "impl": impl, "chunk_bytes": 4 * 8 * 11}
        return fused_linear_grpo_loss(hidden, weight, problem.targets, bias=bias, **options).loss

    assert torch.autograd.gradcheck(op, tuple(problem.leaves(torch.float64).values()))


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_two_runs_are_bitwise_equal(make_problem, impl):
    first, second = (loss_and_gradients(make_problem(33, 257, 24), torch.float32, impl) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_frozen_tensors_get_no_gradient(make_problem):
    problem = make_problem(12, 31, 8)
    leaves = problem.leaves(torch.float32)
    leaves["weight"].requires_grad_(False)
    leaves["bias"].requires_grad_(False)
    fused_linear_grpo_loss(targets=problem.targets, **leaves, **problem.head, **problem.loss).loss.backward()
    both = problem.leaves(torch.float32)
    fused_linear_grpo_loss(targets=problem.targets, **both, **problem.head, **problem.loss).loss.backward()
    assert leaves["weight"].grad is None
    assert torch.equal(leaves["hidden"].grad, both["hidden"].grad)
