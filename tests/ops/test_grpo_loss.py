"""What the loss means: layouts, normalisers, clipping, masks. Expected values are written out, not taken from us."""

import math
from dataclasses import dataclass

import pytest
import torch

from fused_grpo import FusedLinearGRPOLoss, GRPOLossConfig, fused_linear_grpo_loss, grpo_loss

LENGTHS = [3, 1, 4]


@pytest.fixture
def batch():
    """Three sequences, padded [3, 4], and their advantages."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(4)[None] < torch.tensor(LENGTHS)[:, None]
    padded = {
        name: -torch.rand(3, 4, generator=generator, dtype=torch.float64) - 0.5
        for name in ("logprobs", "old_logprobs", "ref_logprobs")
    }
    advantages = torch.tensor([0.7, -1.2, 0.4], dtype=torch.float64)
    return {**padded, "mask": mask}, advantages


def by_hand(lp, old, ref, A, *, low=0.2, high=0.28, beta=0.1):
    """One token, in Python floats."""
    r = math.exp(lp - old)
    kl = math.exp(ref - lp) - (ref - lp) - 1
    return -min(r * A, min(max(r, 1 - low), 1 + high) * A) + beta * kl * r


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_the_loss_is_the_papers_formula(batch, loss_type):
    padded, advantages = batch
    config = GRPOLossConfig(loss_type=loss_type, epsilon=0.2, epsilon_high=0.28, beta=0.1)
    rows = zip(*(padded[name].tolist() for name in ("logprobs", "old_logprobs", "ref_logprobs")), strict=True)
    sums = [
        [by_hand(*token, A) for token in zip(*sequence, strict=True)][:n]
        for sequence, A, n in zip(rows, advantages.tolist(), LENGTHS, strict=True)
    ]
    expected = {"grpo": sum(sum(s) / len(s) for s in sums) / 3, "dapo": sum(map(sum, sums)) / sum(LENGTHS)}
    assert grpo_loss(**padded, advantages=advantages, config=config).loss.item() == pytest.approx(expected[loss_type])


def test_on_policy_is_old_equal_to_current(batch):
    padded, advantages = batch
    del padded["ref_logprobs"]
    padded["old_logprobs"] = padded["logprobs"].clone()
    gradients = []
    for old in (padded["old_logprobs"], None):
        leaf = padded["logprobs"].clone().requires_grad_()
        out = grpo_loss(**{**padded, "logprobs": leaf, "old_logprobs": old}, advantages=advantages)
        gradients.append(torch.autograd.grad(out.loss, leaf)[0])
        assert out.metrics["ratio_min"] == out.metrics["ratio_max"] == 1
    torch.testing.assert_close(*gradients, rtol=1e-14, atol=0)
    assert gradients[0].abs().sum() > 0


@pytest.mark.parametrize(
    ("difference", "advantage", "flows"), [(0.5, 1.0, False), (0.5, -1.0, True), (-0.5, 1.0, True), (-0.5, -1.0, False)]
)
def test_clipping_stops_the_gradient_on_the_right_side(difference, advantage, flows):
    leaf = torch.full((1, 1), difference, requires_grad=True)
    out = grpo_loss(leaf, old_logprobs=torch.zeros(1, 1), advantages=torch.tensor([advantage]))
    out.loss.backward()
    expected = -advantage * math.exp(difference) if flows else 0.0
    assert leaf.grad.item() == pytest.approx(expected)
    assert out.metrics["clip_ratio_high"].item() == float(difference > 0 and not flows)
    assert out.metrics["clip_ratio_low"].item() == float(difference < 0 and not flows)


@pytest.mark.parametrize("impl", ["reference", "torch", "triton"])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("moved", [0.5, -0.5])
def test_ipo_clips_on_the_side_that_the_policy_moved_to(impl, advantage, moved):
    """Whatever the sign of the advantage is; a token without one loses nothing."""
    old, config = torch.full((1, 1), -1.0), GRPOLossConfig(loss_type="ipo", epsilon=0.1)
    metrics = grpo_loss(old + moved, old_logprobs=old, advantages=torch.tensor([advantage]), config=config, impl=impl)
    sides = {"low": moved < 0, "high": moved > 0, "region": True}
    for side, is_clipped in sides.items():
        assert metrics.metrics[f"clip_ratio_{side}"].item() == float(is_clipped and advantage != 0)


@pytest.mark.parametrize("impl", ["reference", "torch", "triton"])
def test_masked_rows_may_hold_anything(make_problem, impl):
    problem = make_problem(12, 17, 8)
    masked = problem.targets == -100
    clean = {name: fused_gradients(problem, impl)[name] for name in ("loss", "weight")}
    for name in ("old_logprobs", "ref_logprobs", "sampling_logprobs"):
        problem.loss[name] = torch.where(masked, torch.nan, problem.loss[name])
    dirty = fused_gradients(problem, impl)
    for name, value in clean.items():
        assert torch.equal(value, dirty[name]), name


@pytest.mark.parametrize("impl", ["reference", "torch", "triton"])
def test_no_tokens_at_all(make_problem, impl):
    problem = make_problem(6, 17, 8)
    problem.hidden, problem.targets = problem.hidden[:0], problem.targets[:0]
    problem.head["temperature"] = 1.0
    problem.loss = {"cu_seqlens": torch.zeros(3, dtype=torch.int32), "advantages": torch.ones(2)}
    gradients = fused_gradients(problem, impl)
    assert gradients["loss"] == 0
    assert (gradients["weight"] == 0).all()


def fused_gradients(problem, impl):
    leaves = problem.leaves(torch.float32)
    out = fused_linear_grpo_loss(targets=problem.targets, **leaves, **problem.head, **problem.loss, impl=impl)
    gradients = torch.autograd.grad(out.loss, list(leaves.values()))
    return {"loss": out.loss, **dict(zip(leaves, gradients, strict=True))}


def test_the_module_is_the_function(make_problem):
    problem = make_problem(12, 17, 8)
    leaves, config = problem.leaves(torch.float32), GRPOLossConfig(beta=0.2)
    arguments = {"targets": problem.targets, **leaves, **problem.head, **problem.loss}
    module = FusedLinearGRPOLoss(config, chunk_bytes=4096)
    assert torch.equal(module(**arguments).loss, fused_linear_grpo_loss(**arguments, config=config).loss)


def test_a_dataclass_of_a_users_own_over_the_config_is_the_config(batch):
    """Python makes such a class unhashable: nothing may look a config up by its hash."""

    @dataclass(kw_only=True)
    class Mine(GRPOLossConfig):
        name: str = "mine"

    given, advantages = batch
    for options in ({}, {"importance_sampling_level": "sequence"}, {"loss_type": "gmpo"}, {"clip_cov_ratio": 0.5}):
        loss, own = (
            grpo_loss(advantages=advantages, config=kind(**options), **given) for kind in (GRPOLossConfig, Mine)
        )
        assert torch.equal(loss.loss, own.loss)
