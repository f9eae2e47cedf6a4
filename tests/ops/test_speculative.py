"""Speculative gradients: whatever comes from upstream, what comes out is the gradient of the log-probs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fused_grpo import GRPOLossConfig, grpo_loss, linear_logprobs_and_entropy
from fused_grpo import speculative as module
from fused_grpo._loss_inputs import loss_inputs
from fused_grpo.head import flatten_head
from fused_grpo.speculative import speculative_logprobs

B, T, D, V = 3, 5, 6, 13
OPTIONS = {"temperature": 0.7, "logit_scale": 1.3, "softcap": 4.0}
CONFIGS = {
    "dapo": GRPOLossConfig(beta=0.1),
    "of sequences": GRPOLossConfig(loss_type="grpo", importance_sampling_level="sequence"),
    "with an entropy bonus": GRPOLossConfig(entropy_coef=0.3),
}


@pytest.fixture
def recomputed(monkeypatch) -> list:
    """The calls that did not come as speculative."""
    calls, theirs = [], module._from_scratch
    monkeypatch.setattr(module, "_from_scratch", lambda *args: calls.append(args) or theirs(*args))
    return calls


@dataclasses.dataclass
class Case:
    config: GRPOLossConfig

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
        self.leaves = [normal(B * T, D), normal(V, D), normal(V)]
        self.targets = torch.randint(0, V, (B * T,), generator=generator)
        self.old = -2.5 + 0.3 * normal(B * T)
        self.mask = torch.ones(B * T).index_fill(0, torch.tensor([1, 2, 14]), 0)
        self.inputs = {"advantages": normal(B), "mask": self.mask, "cu_seqlens": torch.tensor([0, 6, 6 + 4, B * T])}
        self.inputs |= {"old_logprobs": self.old, "ref_logprobs": self.old + 0.1}

    def run(self, how: str, loss_of, *, frozen: bool = False):
        """(loss, gradients) with log-probs that were "speculative", or are those of the "op"."""
        leaves = [x.clone().requires_grad_(not (frozen and k)) for k, x in enumerate(self.leaves)]
        hidden, weight, bias = leaves
        if how == "op":
            values = linear_logprobs_and_entropy(hidden, weight, self.targets, bias=bias, **OPTIONS)
        else:
            head = flatten_head(hidden, weight, self.targets, bias=bias, **OPTIONS)
            names = ("sampling_logprobs", "entropy_threshold", "num_tokens", "num_sequences", "num_entropy_tokens")
            named = {**dict.fromkeys(names), **self.inputs, "config": self.config}
            inputs = loss_inputs(self.targets.shape, dtype=hidden.dtype, device=hidden.device, **named)
            values = speculative_logprobs(head, inputs, self.config, chunk_bytes=8 * 4 * V)
        loss = loss_of(*values)
        return loss, torch.autograd.grad(loss, leaves[: 1 if frozen else 3])

    def loss(self, logprobs, entropy):
        entropy = {"entropy": entropy} if self.config.entropy_coef else {}
        return grpo_loss(logprobs, **self.inputs, **entropy, config=self.config).loss

    def both(self, loss_of, *, frozen: bool = False) -> None:
        (one, ours), (other, expected) = (self.run(how, loss_of, frozen=frozen) for how in ("speculative", "op"))
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)
        for gradient, wanted in zip(ours, expected, strict=True):
            assert wanted.abs().max() > 0
            torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("factor", [1.0, -3.5])
def test_the_loss_that_was_foreseen(config, frozen, factor, recomputed):
    case = Case(config)
    case.both(lambda *values: factor * case.loss(*values), frozen=frozen)
    assert not recomputed


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_loss_that_was_not(config, frozen, recomputed, caplog):
    case = Case(config)
    with caplog.at_level("INFO", "fused_grpo"):
        case.both(lambda logprobs, entropy: (logprobs.square() * case.mask).sum() + entropy[0], frozen=frozen)
    assert len(recomputed) == 1
    assert "not the speculative one" in caplog.text


def test_one_token_more_is_noticed(recomputed):
    """The factor of all others does not speak for it."""
    case = Case(CONFIGS["dapo"])
    case.both(lambda logprobs, entropy: case.loss(logprobs, entropy) + 1e-3 * logprobs[4])
    assert len(recomputed) == 1


def test_an_entropy_that_was_not_foreseen_is_noticed(recomputed):
    case = Case(CONFIGS["dapo"])
    case.both(lambda logprobs, entropy: case.loss(logprobs, entropy) + 1e-3 * (entropy * case.mask).sum())
    assert len(recomputed) == 1


def test_a_loss_foreseen_as_nothing(recomputed):
    case = Case(GRPOLossConfig())
    case.inputs["advantages"] = torch.zeros(B, dtype=torch.float64)
    _, gradients = case.run("speculative", case.loss)
    assert all(not gradient.any() for gradient in gradients)
    assert not recomputed
    case.both(lambda logprobs, entropy: (logprobs * case.mask).sum())
    assert len(recomputed) == 1


def test_masked_rows_are_scored_too(recomputed):
    """A loss of somebody else's may read them."""
    case, seen = Case(CONFIGS["dapo"]), {}
    for how in ("speculative", "op"):
        case.run(how, lambda *values, how=how: case.loss(*seen.setdefault(how, values)))
    for mine, expected in zip(seen["speculative"], seen["op"], strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)
    assert not recomputed
    case.both(lambda logprobs, entropy: case.loss(logprobs, entropy) - 0.1 * logprobs[1].exp())
    assert len(recomputed) == 1


def test_a_token_with_a_huge_ratio_does_not_hide_the_others(recomputed):
    case = Case(GRPOLossConfig())
    case.inputs["advantages"] = -torch.ones(B, dtype=torch.float64)
    case.inputs["old_logprobs"] = case.old.index_fill(0, torch.tensor([7]), -16.0)
    case.both(case.loss)
    assert not recomputed
    case.both(lambda logprobs, entropy: case.loss(logprobs, entropy) - 0.01 * (entropy * case.mask).mean())
    assert len(recomputed) == 1


def test_gradients_that_were_not_wanted_are_gone_before_others_are_made(monkeypatch):
    held, theirs = [], module._from_scratch
    monkeypatch.setattr(module, "_from_scratch", lambda ctx, *args: held.append(ctx.gradients) or theirs(ctx, *args))
    Case(CONFIGS["dapo"]).run("speculative", lambda logprobs, entropy: logprobs.square().sum())
    assert held == [None]


def test_backward_twice_needs_a_retained_graph():
    case = Case(CONFIGS["dapo"])
    head = flatten_head(case.leaves[0].requires_grad_(), case.leaves[1], case.targets, bias=None, **OPTIONS)
    names = ("sampling_logprobs", "entropy_threshold", "num_tokens", "num_sequences", "num_entropy_tokens")
    named = {**dict.fromkeys(names), **case.inputs, "config": case.config}
    inputs = loss_inputs(case.targets.shape, dtype=torch.float64, device=torch.device("cpu"), **named)
    loss = case.loss(*speculative_logprobs(head, inputs, case.config))
    loss.backward(retain_graph=True)
    once = case.leaves[0].grad.clone()
    loss.backward()
    torch.testing.assert_close(case.leaves[0].grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
