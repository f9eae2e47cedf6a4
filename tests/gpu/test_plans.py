"""Log-probs and their gradients on the device: every plan and dtype, odd vocabularies, and more logits than 2^31."""

from dataclasses import replace

import pytest
import torch
from device_under_test import DEVICE, rounds
from gpu_problems import (
    DTYPE,
    PLANS,
    SIZES,
    Problem,
    assert_as_exact,
    assert_gradient,
    logprobs_of,
    loss_of,
    make_problem,
    report,
)

from fused_grpo import kernels
from fused_grpo.head import head, logprob_plans

pytestmark = [pytest.mark.dry_run, pytest.mark.grid, pytest.mark.usefixtures("weights_from")]


def check(problem: Problem, plan: str, *, entropy: bool = False, **options: object) -> None:
    ours = logprobs_of(problem, plan, entropy=entropy, impl="triton", **options)
    plain, exact = (
        logprobs_of(problem.to(dtype), plan, entropy=entropy, impl="reference")
        for dtype in (torch.float32, torch.float64)
    )
    for name, value in ours.items():
        if name in PLANS["trainable"]:
            assert_gradient(value, exact[name], problem, what=f"{name} of {plan}")
        else:
            assert_as_exact(value, plain[name], exact[name], problem, magnitude=16.0, what=f"{name} of {plan}")


@pytest.mark.parametrize("dtypes", SIZES.dtypes)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("entropy", [False, True])
def test_every_plan_and_dtype(dtypes, plan, entropy):
    N, _, V = SIZES.shape
    problem = make_problem(*SIZES.shape, dtypes, off_policy=False)
    for chunk_bytes in (None, 2 * N * V):  # of half of the logits
        check(problem, plan, entropy=entropy, chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("dtypes", SIZES.dtypes)
@pytest.mark.parametrize("plan", PLANS)
def test_several_targets_per_row(dtypes, plan):
    N, _, V = SIZES.shape
    problem = make_problem(*SIZES.shape, dtypes, off_policy=False)
    others = torch.arange(5 * N, device=DEVICE).view(N, 5) * 7 % V
    problem = replace(problem, targets=torch.cat([problem.targets[:, None], others, others[:, :2]], 1))
    for entropy, chunk_bytes in ((False, None), (True, 2 * N * V)):
        check(problem, plan, entropy=entropy, chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("V", SIZES.odd)
@pytest.mark.parametrize("plan", PLANS)
def test_odd_vocabularies(V, plan):
    check(make_problem(*SIZES.odd_shape, V, off_policy=False), plan)


@pytest.mark.parametrize("V", SIZES.odd)
def test_the_loss_over_odd_vocabularies(V):
    problem = make_problem(*SIZES.odd_shape, V, off_policy=False)
    ours, exact = loss_of(problem, impl="triton"), loss_of(problem.to(torch.float64), impl="reference")
    for name in PLANS["trainable"]:
        assert_gradient(ours[name], exact[name], problem, what=name)


@pytest.mark.parametrize("plan", PLANS)
def test_batch_invariant_rows_have_the_same_bits_in_any_company(plan):
    problem = make_problem(*SIZES.shape, off_policy=False)
    everyone = logprobs_of(problem, plan, batch_invariant=True, impl="triton")["logprobs"]
    # From a multiple of 16 on: the interpreter multiplies with BLAS, whose bits depend on the place within the tile.
    for rows in (slice(0, 1), slice(16, 19)):
        selected = Problem(problem.hidden[rows], problem.weight, problem.targets[rows])
        assert torch.equal(logprobs_of(selected, plan, batch_invariant=True, impl="triton")["logprobs"], everyone[rows])


def test_rounded_weights_cost_at_most_half_more_than_rounded_d_logits(monkeypatch):
    """RMS, of dH and dW; in a dry run, where nothing is rounded, the same."""
    problem = make_problem(*SIZES.shape, off_policy=False)
    exact = logprobs_of(problem.to(torch.float64), "trainable", impl="reference")
    as_weights = logprobs_of(problem, "trainable", impl="triton")
    monkeypatch.setattr(head.Head, "gemm_on_softmax", False)
    monkeypatch.setattr(logprob_plans, "power_of_two_scale", lambda *arguments, **options: None)
    as_dlogits = logprobs_of(problem, "trainable", impl="triton")
    for name in PLANS["trainable"]:
        error, allowed = ((x[name].double() - exact[name]).square().mean().sqrt() for x in (as_weights, as_dlogits))
        relative = exact[name].square().mean().sqrt()
        figures = ((error / relative).item(), (allowed / relative).item())
        report(f"error of rounded weights beside d-logits, {name}", figures[0], "of RMS", promised=figures[1])
        assert error <= (1.5 if rounds(problem.dtype) else 3) * allowed


def sampled(count: int) -> torch.Tensor:
    """The first and the last rows, and some between."""
    return torch.tensor([0, 1, count // 2, count - 2, count - 1], device=DEVICE)


def test_passes_over_more_logits_than_32_bits_count():
    V = SIZES.vocab
    R, generator = SIZES.reach // V + 5, torch.Generator(DEVICE).manual_seed(0)
    memory = kernels.empty_tile(R, V, dtype=torch.float32, device=DEVICE)
    targets, ones = torch.randint(V, (R,), generator=generator, device=DEVICE), torch.ones(R, device=DEVICE)
    at = sampled(R)
    for run in ("softmax_weights_", "logits_gradient_"):
        memory.normal_(generator=generator)
        rows = memory[at].double()
        log_p = rows.log_softmax(1)
        exact = torch.nn.functional.one_hot(targets[at], V) - log_p.exp()
        statistics = kernels.finish_rows([kernels.row_statistics(memory, targets, temperature=ones)], entropy=False)
        assert (statistics[0][at].double() - log_p.gather(1, targets[at, None])[:, 0]).abs().max() <= 1e-5
        options = {"temperature": ones, "dtype": SIZES.dtypes[DTYPE][0]}
        if run == "softmax_weights_":
            weights, scale, _ = kernels.softmax_weights_(memory, targets, **options)
            ours = weights[at].double() * scale[at, None].double()
        else:
            options |= {"statistics": statistics, "grad_logprobs": ones, "grad_entropy": None}
            ours = kernels.logits_gradient_(memory, targets, **options)[at].double()
        assert (ours - exact).norm() <= 4e-3 * exact.norm(), run
    whole = memory.as_strided((R, memory.stride(0)), memory.stride()).normal_(generator=generator)
    rows = whole[at]
    kernels.scale_(whole, torch.tensor(2.0, device=DEVICE))
    assert torch.equal(whole[at], 2 * rows)


def test_a_loss_of_more_logits_than_32_bits_count():
    """In one chunk, which is more than 2^31 of them although some rows are masked, and in many."""
    V, D = SIZES.vocab, 64
    N = SIZES.reach * 5 // 4 // V
    problem = make_problem(N, D, V, off_policy=False)
    one, many = (
        loss_of(problem, impl="triton", chunk_bytes=4 * (V + 256) * rows + 2 * N * D * 8) for rows in (N + 128, N // 6)
    )
    at = sampled(N)
    logits = (problem.hidden[at].double() @ problem.weight.double().t()).log_softmax(1)
    targets = problem.targets[at]
    exact = logits.gather(1, targets.clamp_min(0)[:, None])[:, 0]
    scored = (targets >= 0) & problem.loss["mask"][at]
    assert (one["logprobs"][at].double() - torch.where(scored, exact, 0.0)).abs().max() <= 1e-4
    for name in PLANS["trainable"]:
        assert_gradient(one[name], many[name].double(), problem, what=name)


@pytest.mark.gpu
def test_tf32_that_a_user_allows_elsewhere_rounds_nothing_here():
    """As trainers do for the rest of a model: with TF32 the error would be a thousand times as large."""
    problem = make_problem(*SIZES.shape, "fp32", off_policy=False)
    torch.set_float32_matmul_precision("high")
    try:
        for plan in PLANS:
            check(problem, plan)
            check(problem, plan, chunk_bytes=2**20)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
