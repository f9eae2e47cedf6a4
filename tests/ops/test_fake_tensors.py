"""Under FakeTensorMode and in torch.export a call is right, or a clear error: never one of the tracer's alone."""

import re
from typing import Any

import pytest
import torch
from torch._dynamo.exc import Unsupported
from torch._subclasses.fake_tensor import FakeTensorMode

from fused_grpo import (
    Distillation,
    GRPOLossConfig,
    fused_linear_divergence,
    fused_linear_grpo_loss,
    grpo_loss,
    linear_logprobs,
    linear_logprobs_and_entropy,
)
from fused_grpo.errors import UnsupportedError

pytestmark = pytest.mark.cpu_only(reason="fake tensors are of no device")
B, T, V, D = 2, 3, 20, 8
PLAIN = GRPOLossConfig()
GIVEN: dict[str, Any] = {"hidden": (B, T, D), "weight": (V, D), "old": (B, T), "advantages": (B,)}


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, generator=generator) for name, shape in GIVEN.items()}
    made["old"] = -made["old"].abs()
    return made | {"targets": torch.arange(B * T).view(B, T) % V}


def loss(given: dict[str, torch.Tensor], config: GRPOLossConfig = PLAIN, **options: Any) -> torch.Tensor:
    return fused_linear_grpo_loss(
        given["hidden"],
        given["weight"],
        given["targets"],
        advantages=given["advantages"],
        old_logprobs=given["old"],
        config=config,
        **options,
    ).loss


def loss_of_logprobs(given: dict[str, torch.Tensor], config: GRPOLossConfig = PLAIN, **options: Any) -> torch.Tensor:
    logprobs = -given["hidden"].square().mean(-1)
    options |= {"advantages": given["advantages"], "old_logprobs": given["old"], "entropy": given["old"].abs()}
    return grpo_loss(logprobs, config=config, **options).loss


def kept(given: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {"support": (torch.arange(V).repeat(B * T), torch.arange(B * T + 1) * V)}


CALLED = "fused_linear_grpo_loss|grpo_loss|fused_linear_divergence|support"  # what a user calls or passes
HEAD = ("hidden", "weight", "targets")
LOGPROBS = {
    "linear_logprobs": lambda x: linear_logprobs(*(x[name] for name in HEAD)),
    "several targets": lambda x: linear_logprobs(x["hidden"], x["weight"], torch.stack([x["targets"]] * 2, -1)),
    "outputs": lambda x: linear_logprobs(*(x[name] for name in HEAD), outputs=("mean_logit",)).mean_logit,
    "entropy": lambda x: linear_logprobs_and_entropy(*(x[name] for name in HEAD)).entropy,
}
CONFIGS = {
    name: GRPOLossConfig(**options)
    for name, options in {
        "dapo": {},
        "sequences": {"importance_sampling_level": "sequence"},
        "vespo": {"loss_type": "vespo"},
        "quantile": {"top_entropy_quantile": 0.5},
        "covariances": {"kl_cov_ratio": 0.3},
        "bonus": {"entropy_coef": 0.1},
    }.items()
}
LOSSES = {f"loss, {name}": lambda x, config=config: loss(x, config) for name, config in CONFIGS.items()}
LOSSES |= {
    f"grpo_loss, {name}": lambda x, config=config: loss_of_logprobs(x, config) for name, config in CONFIGS.items()
}
LOSSES |= {
    "the reference": lambda x: loss(x, impl="reference"),
    "a teacher": lambda x: loss(x, distillation=Distillation(x["hidden"].detach(), x["weight"].detach(), coef=0.1)),
    "kept tokens": lambda x: loss(x, **kept(x)),
    "log-probs of kept tokens": lambda x: linear_logprobs(*(x[name] for name in HEAD), **kept(x)).sum(),
    "fused_linear_divergence": lambda x: (
        fused_linear_divergence(x["hidden"], x["weight"], x["hidden"].detach() * 2, x["weight"].detach()).loss
    ),
}


@pytest.mark.parametrize("name", [*LOGPROBS, *LOSSES])
def test_fake_tensors_give_the_shape_or_a_clear_error(name):
    compute = (LOGPROBS | LOSSES)[name]
    expected = compute(tensors())
    with FakeTensorMode():
        given = {key: torch.empty_like(value, device="cpu") for key, value in tensors().items()}
        given["hidden"].requires_grad_()
        try:
            result = compute(given)
            if result.requires_grad:
                result.sum().backward()
                assert given["hidden"].grad.shape == given["hidden"].shape
            assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
            error = ""
        except UnsupportedError as refused:
            error = str(refused)
    assert name not in LOGPROBS or not error
    called = re.fullmatch(r"got (\w+) in torch.export or with fake tensors, want .*; fix: .*", error)
    assert not error or (called and called[1] in CALLED.split("|"))
    assert torch.equal(compute(tensors()), expected)  # nothing fake is left in a cache


class Calls(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        return (LOGPROBS | LOSSES)[self.name](given)


@pytest.mark.filterwarnings("ignore")  # of the tracer's
@pytest.mark.parametrize("name", LOGPROBS)
@pytest.mark.parametrize("strict", [False, True])
def test_exported_logprobs_are_those_of_an_eager_call(name, strict):
    module, others = Calls(name), tensors()
    exported = torch.export.export(module, (tensors(),), strict=strict)
    others["hidden"] = others["hidden"] + 1
    assert torch.equal(exported.module()(others), module(others))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("strict", [False, True])
def test_a_loss_in_an_export_is_a_clear_error(name, strict):
    with pytest.raises(Unsupported if strict else UnsupportedError, match=f"got ({CALLED}) in .*want .*fix: "):
        torch.export.export(Calls(name), (tensors(),), strict=strict)
