"""Speculative gradients: for any upstream gradient, the results are the gradients of the log-probs."""

import dataclasses

import pytest
import torch

from fused_grpo import GRPOLossConfig, grpo_loss, linear_logprobs_and_entropy
from fused_grpo.head.checks import HeadOptions, LossArguments, loss_inputs
from fused_grpo.head.head import flatten_head
from fused_grpo.integrations import speculative as module
from fused_grpo.integrations.speculative import speculative_logprobs

B, T, D, V = 3, 5, 6, 13
OPTIONS = {"temperature": 0.7, "logit_scale": 1.3, "softcap": 4.0}
CONFIGS = {
    "dapo": GRPOLossConfig(beta=0.1),
    "of sequences": GRPOLossConfig(loss_type="grpo", importance_sampling_level="sequence"),
    "with an entropy bonus": GRPOLossConfig(entropy_coef=0.3),
}


@pytest.fixture
def recomputed(monkeypatch) -> list:
    """The calls whose upstream gradient was not the speculative one."""
    calls, from_scratch = [], module._from_scratch
    monkeypatch.setattr(module, "_from_scratch", lambda *args: calls.append(args) or from_scratch(*args))
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

    def speculative(self, hidden, weight, bias):
        head = flatten_head(hidden, weight, self.targets, HeadOptions(bias, **OPTIONS))
        given, where = LossArguments(**self.inputs), {"dtype": hidden.dtype, "device": hidden.device}
        inputs = loss_inputs(given, self.targets.shape, self.config, **where)
        return speculative_logprobs(head, inputs, self.config, chunk_bytes=8 * 4 * V)

    def run(self, path: str, loss_of, *, frozen: bool = False):
        """(loss, gradients) with log-probs that were "speculative", or are those of the "op"."""
        leaves = [x.clone().requires_grad_(not (frozen and k)) for k, x in enumerate(self.leaves)]
        if path == "op":
            values = linear_logprobs_and_entropy(*leaves[:2], self.targets, bias=leaves[2], **OPTIONS)
        else:
            values = self.speculative(*leaves)
        loss = loss_of(*values)
        return loss, torch.autograd.grad(loss, leaves[: 1 if frozen else 3])

    def loss(self, logprobs, entropy):
        entropy = {"entropy": entropy} if self.config.entropy_coef else {}
        return grpo_loss(logprobs, **self.inputs, **entropy, config=self.config).loss

    def both(self, loss_of, *, frozen: bool = False) -> None:
        (one, ours), (other, expected) = (self.run(path, loss_of, frozen=frozen) for path in ("speculative", "op"))
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)
        for gradient, wanted in zip(ours, expected, strict=True):
            assert wanted.abs().max() > 0
            torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("factor", [1.0, -3.5])
def test_the_speculated_loss(config, frozen, factor, recomputed):
    case = Case(config)
    case.both(lambda *values: factor * case.loss(*values), frozen=frozen)
    assert not recomputed


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("frozen", [False, True])
def test_another_loss(config, frozen, recomputed, caplog):
    case = Case(config)
    with caplog.at_level("INFO", "fused_grpo"):
        case.both(lambda logprobs, entropy: (logprobs.square() * case.mask).sum() + entropy[0], frozen=frozen)
    assert len(recomputed) == 1
    assert "not the speculative one" in caplog.text


OTHER_TERMS = {
    # The factor of all other tokens is not that of this one.
    "one token": lambda case, logprobs, entropy: 1e-3 * logprobs[4],
    "the entropy": lambda case, logprobs, entropy: 1e-3 * (entropy * case.mask).sum(),
    "a masked token": lambda case, logprobs, entropy: -0.1 * logprobs[1].exp(),
}


@pytest.mark.parametrize("term", OTHER_TERMS)
def test_another_term_in_the_loss_is_noticed(term, recomputed):
    case = Case(CONFIGS["dapo"])
    case.both(lambda *values: case.loss(*values) + OTHER_TERMS[term](case, *values))
    assert len(recomputed) == 1


def test_a_speculated_loss_of_zero(recomputed):
    case = Case(GRPOLossConfig())
    case.inputs["advantages"] = torch.zeros(B, dtype=torch.float64)
    _, gradients = case.run("speculative", case.loss)
    assert all(not gradient.any() for gradient in gradients)
    assert not recomputed
    case.both(lambda logprobs, entropy: (logprobs * case.mask).sum())
    assert len(recomputed) == 1


def test_masked_rows_are_scored_too(recomputed):
    """The loss of a caller may read them."""
    case, seen = Case(CONFIGS["dapo"]), {}
    for path in ("speculative", "op"):
        case.run(path, lambda *values, path=path: case.loss(*seen.setdefault(path, values)))
    for actual, expected in zip(seen["speculative"], seen["op"], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert not recomputed


def test_a_token_with_a_huge_ratio_does_not_hide_the_others(recomputed):
    case = Case(GRPOLossConfig())
    case.inputs["advantages"] = -torch.ones(B, dtype=torch.float64)
    case.inputs["old_logprobs"] = case.old.index_fill(0, torch.tensor([7]), -16.0)
    case.both(case.loss)
    assert not recomputed
    case.both(lambda logprobs, entropy: case.loss(logprobs, entropy) - 0.01 * (entropy * case.mask).mean())
    assert len(recomputed) == 1


def test_speculative_gradients_are_freed_before_others_are_computed(monkeypatch):
    held, from_scratch = [], module._from_scratch
    monkeypatch.setattr(
        module, "_from_scratch", lambda ctx, *args: held.append(ctx.gradients) or from_scratch(ctx, *args)
    )
    Case(CONFIGS["dapo"]).run("speculative", lambda logprobs, entropy: logprobs.square().sum())
    assert held == [None]


def test_backward_twice_needs_a_retained_graph():
    case = Case(CONFIGS["dapo"])
    loss = case.loss(*case.speculative(case.leaves[0].requires_grad_(), *case.leaves[1:]))
    loss.backward(retain_graph=True)
    once = case.leaves[0].grad.clone()
    loss.backward()
    torch.testing.assert_close(case.leaves[0].grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_autocast_in_the_backward_pass_alone_rounds_nothing(recomputed):
    case, gradients = Case(CONFIGS["dapo"]), []
    case.leaves = [x.float().requires_grad_() for x in case.leaves]
    for enabled in (False, True):
        loss = case.speculative(*case.leaves).logprobs.square().sum()
        with torch.autocast(case.leaves[0].device.type, torch.bfloat16, enabled=enabled):
            gradients.append(torch.autograd.grad(loss, case.leaves))
    assert len(recomputed) == 2
    torch.testing.assert_close(*gradients)


@pytest.mark.cpu_only(reason="the ops are given copies there")
def test_targets_that_have_changed_since_are_found_out():
    case = Case(CONFIGS["dapo"])
    loss = case.speculative(case.leaves[0].requires_grad_(), *case.leaves[1:]).logprobs.square().sum()
    case.targets.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.cpu_only(reason="the ops are given copies there")
def test_logits_are_recomputed_from_what_hooks_give_back(recomputed):
    case, gradients = Case(CONFIGS["dapo"]), []
    leaves = [x.requires_grad_() for x in case.leaves]
    for changes in (False, True):
        hidden, weight, bias = (x * 1 for x in leaves)
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
            loss = case.speculative(hidden, weight, bias).logprobs.square().sum()
        for x in (hidden, weight, bias, case.targets) if changes else ():
            x.data.zero_()
        gradients.append(torch.autograd.grad(loss, leaves))
    assert len(recomputed) == 2
    torch.testing.assert_close(*gradients)
