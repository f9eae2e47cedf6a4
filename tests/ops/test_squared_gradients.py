"""`squared_gradients` of the loss: the squared norms of d loss / d logits are those of autograd through full logits."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fused_grpo import GRPOLossConfig, fused_linear_grpo_loss, grpo_loss
from fused_grpo._maths.moments import score_norms
from fused_grpo.config import LOSS_TYPES
from fused_grpo.divergence import Distillation
from fused_grpo.errors import InputError, UnsupportedError

pytestmark = [pytest.mark.grid, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

N, V, D = 40, 33, 8
CONFIGS: dict[str, dict[str, Any]] = {
    "tokens": {},
    "means of sequences": {"loss_type": "grpo", "beta": 0.1},
    "ratios of sequences": {"importance_sampling_level": "sequence"},
    "an entropy bonus": {"entropy_coef": 0.1},
    "centred": {"score_centering": "topk"},
    "centred in two phases": {"score_centering": "topk", "importance_sampling_level": "sequence"},
}
PATHS = [("torch", torch.float64), ("torch", torch.float32), ("triton", torch.float32), ("reference", torch.float64)]
PLANS: dict[str, dict[str, Any]] = {
    "trainable": {},
    "frozen head": {"trained": ("hidden",)},
    "no gradient": {"trained": ()},
    "chunks": {"chunk_bytes": 7 * V * 8},
    "needed": {"score": "needed"},
}
Problem = dict[str, Any]


def make_problem(config: dict[str, Any], dtype: torch.dtype = torch.float64, *, supports: bool = False) -> Problem:
    """Three sequences, the last without an advantage; two tokens masked; every fifth token without a restriction."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, D, generator=generator).to(dtype) for size in (N, V))
    targets, mask = torch.randint(V, (N,), generator=generator), torch.arange(N) % 21 != 3
    sampler = (0.9 * hidden @ weight.t()).log_softmax(1)
    problem: Problem = {"hidden": hidden, "weight": weight, "targets": targets, "mask": mask}
    problem |= {"advantages": torch.tensor([1.0, -0.5, 0.0]), "cu_seqlens": torch.tensor([0, 10, 25, N])}
    problem |= {"sampling_logprobs": sampler.gather(1, targets[:, None])[:, 0], "config": GRPOLossConfig(**config)}
    problem |= {"ref_logprobs": problem["sampling_logprobs"] - 0.3} if "beta" in config else {}
    if "score_centering" in config:
        problem["sampling_topk_logprobs"], problem["sampling_topk_ids"] = sampler.topk(4)
    if supports:
        keeps = torch.rand(N, V, generator=generator) < 0.3
        keeps[torch.arange(N), targets], keeps[::5] = True, False
        problem["support"] = keeps.nonzero()[:, 1], torch.cat([torch.zeros(1), keeps.sum(1).cumsum(0)]).long()
    return problem


def of_autograd(problem: Problem) -> Tensor:
    """The squared norms [N] from full logits in fp64, of the loss without entropies and centering."""
    z = (problem["hidden"].double() @ problem["weight"].double().t()).requires_grad_()
    kept = torch.ones(N, V, dtype=torch.bool)
    if "support" in problem:
        ids, offsets = problem["support"]
        kept = (offsets.diff() == 0)[:, None].expand(N, V).clone()
        kept[torch.arange(N).repeat_interleave(offsets.diff()), ids] = True
    logprobs = z.masked_fill(~kept, -torch.inf).log_softmax(1).gather(1, problem["targets"][:, None])[:, 0]
    config = dataclasses.replace(problem["config"], score_centering="off", entropy_coef=0.0)
    names = ("advantages", "cu_seqlens", "mask", "ref_logprobs", "sampling_logprobs")
    given = {name: problem[name] for name in names if name in problem}
    loss = grpo_loss(logprobs, **given, config=config, impl="reference").loss
    return torch.autograd.grad(loss, z)[0].square().sum(1)


def solve(problem: Problem, *, trained: tuple[str, ...] = ("hidden", "weight"), **options: Any) -> Tensor:
    leaves = {name: problem[name].clone().requires_grad_(name in trained) for name in ("hidden", "weight")}
    out = torch.full(
        (N,), torch.nan, dtype=torch.float64 if problem["hidden"].dtype == torch.float64 else torch.float32
    )
    with_it = fused_linear_grpo_loss(**problem | leaves, squared_gradients=out, **options)
    alone = fused_linear_grpo_loss(**problem | leaves, **options)
    assert torch.equal(with_it.loss, alone.loss)
    for name in trained:
        assert torch.equal(*(torch.autograd.grad(x.loss, leaves[name], retain_graph=True)[0] for x in (with_it, alone)))
    return out


@pytest.mark.parametrize(("impl", "dtype"), PATHS)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("plan", PLANS)
def test_they_are_those_of_autograd(config, plan, impl, dtype):
    problem, limit = make_problem(CONFIGS[config], dtype), 1e-10 if dtype == torch.float64 else 2e-5
    expected = of_autograd(problem)
    assert (expected == 0).sum() >= 2
    actual = solve(problem, impl=impl, **PLANS[plan]).double()
    torch.testing.assert_close(actual, expected, rtol=limit, atol=limit * float(expected.max()))


@pytest.mark.parametrize(("impl", "dtype"), PATHS)
@pytest.mark.parametrize("config", [name for name in CONFIGS if "centred" not in name])
def test_over_kept_tokens_too(config, impl, dtype):
    problem, limit = make_problem(CONFIGS[config], dtype, supports=True), 1e-10 if dtype == torch.float64 else 2e-5
    expected = of_autograd(problem)
    actual = solve(problem, impl=impl).double()
    torch.testing.assert_close(actual, expected, rtol=limit, atol=limit * float(expected.max()))


@given(st.sampled_from(LOSS_TYPES), st.sampled_from([None, 5, 50]), st.booleans())
@settings(deadline=None, max_examples=40)
def test_every_loss_type_has_them(loss_type, rows, supports):
    needed = {"dr_grpo": {"max_completion_length": 30}, "dro": {"log_ratio_penalty": 0.05}}
    problem = make_problem({"loss_type": loss_type, **needed.get(loss_type, {})}, supports=supports)
    actual = solve(problem, chunk_bytes=None if rows is None else rows * V * 8, impl="torch")
    torch.testing.assert_close(actual, of_autograd(problem), rtol=1e-9, atol=1e-16)


def test_padded_tokens_have_the_shape_of_the_targets():
    problem, shapes = make_problem({}), {"hidden": (4, 10, D), "targets": (4, 10), "mask": (4, 10)}
    del problem["sampling_logprobs"], problem["cu_seqlens"]
    problem["advantages"] = torch.tensor([1.0, -0.5, 0.0, 2.0])
    padded, flat = torch.empty(4, 10).double(), torch.empty(N).double()
    rows = {name: x.view(shapes[name]) if name in shapes else x for name, x in problem.items()}
    fused_linear_grpo_loss(**rows, squared_gradients=padded)
    fused_linear_grpo_loss(**problem, cu_seqlens=torch.arange(0, 41, 10), squared_gradients=flat)
    torch.testing.assert_close(padded.flatten(), flat)
    assert (padded[2] == 0).all()
    assert (padded[3] > 0).any()


def test_norms_of_almost_certain_tokens_do_not_cancel():
    """In fp32, 1 - 2 p + sum p^2 would be off by 1e-7 either way."""
    others = torch.tensor([1e-3, 1e-5, 1e-9, 1e-15]).double()  # shared by two tokens
    exact, squares = 1.5 * others.square(), (1 - others).square() + others.square() / 2
    norms = score_norms(torch.log1p(-others).float(), squares.float()).double()
    assert (norms >= others.square() * (1 - 1e-5)).all()
    assert (norms <= exact + 2e-7).all()


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.empty(N - 1), r"\(39,\) .* want \(40,\) torch.float32"),
        (torch.empty(N).double(), "want .* torch.float32"),
        (torch.empty(N, requires_grad=True), "requires_grad=True"),
        (torch.empty(1).expand(N), "want .* a plain tensor"),
    ],
)
def test_tensors_that_cannot_take_them_are_refused(out, message):
    with pytest.raises(InputError, match=message):
        fused_linear_grpo_loss(**make_problem({}, torch.float32), squared_gradients=out)


def test_what_has_none_is_refused():
    problem, teacher = make_problem({}, torch.float32), Distillation(torch.ones(N, D), torch.ones(V, D), coef=1.0)
    with pytest.raises(UnsupportedError, match="squared_gradients with a distillation"):
        fused_linear_grpo_loss(**problem, squared_gradients=torch.empty(N), distillation=teacher)
