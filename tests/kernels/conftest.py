"""What kernels are compared with: explicit softmax maths in plain torch, in any dtype, and the error rule in fp64."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_grpo._maths.distributions import transform_logits

EPS = torch.finfo(torch.float32).eps


def statistics(raw: Tensor, targets: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """(logprobs, entropy) through a full log_softmax."""
    options = {"bias": None, "logit_scale": 1.0, "softcap": None} | options
    log_p = torch.log_softmax(transform_logits(raw, **options), dim=-1)
    entropy = -torch.where(log_p.exp() > 0, log_p.exp() * log_p, 0.0).sum(-1)
    return log_p.gather(1, targets[:, None])[:, 0], entropy


def gradient(raw: Tensor, targets: Tensor, grad_logprobs: Tensor, grad_entropy: Tensor, **options: Any) -> Tensor:
    """d(sum(g * logprobs) + sum(g_H * entropy)) / d raw, by autograd."""
    raw = raw.detach().requires_grad_()
    logprobs, entropy = statistics(raw, targets, **options)
    ((grad_logprobs.to(raw.dtype) * logprobs).sum() + (grad_entropy.to(raw.dtype) * entropy).sum()).backward()
    assert raw.grad is not None
    return raw.grad


def assert_as_exact_as_torch(ours: Tensor, torch_fp32: Tensor, exact: Tensor, *, magnitude: float = 1.0) -> None:
    """Max and RMS error against fp64 at most twice that of plain fp32 torch, plus 4 fp32 eps of the magnitude."""
    assert ours.shape == exact.shape
    if ours.numel() == 0:
        return
    floor = 4 * EPS * max(magnitude, exact.abs().max().item())
    error, allowed = (ours.double() - exact).abs(), (torch_fp32.double() - exact).abs()
    assert error.max() <= 2 * allowed.max() + floor
    assert error.square().mean().sqrt() <= 2 * allowed.square().mean().sqrt() + floor


@pytest.fixture
def independent() -> SimpleNamespace:
    return SimpleNamespace(statistics=statistics, gradient=gradient, assert_as_exact_as_torch=assert_as_exact_as_torch)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is NaN, so that a value no program wrote cannot pass for a result."""
    for name in ("empty", "empty_like"):
        allocate = getattr(torch, name)

        def poisoned(*args: Any, _allocate: Any = allocate, **kwargs: Any) -> Tensor:
            out = _allocate(*args, **kwargs)
            return out.fill_(float("nan")) if out.is_floating_point() else out

        monkeypatch.setattr(torch, name, poisoned)


@pytest.fixture
def head_options() -> Any:
    """head_options(N, V, names): the options of that name with awkward values, and a temperature per row."""

    def build(N: int, V: int, names: str = "") -> dict[str, Any]:
        generator = torch.Generator().manual_seed(N * 1000 + V)
        options: dict[str, Any] = {"temperature": torch.ones(N)}
        if "temperature" in names:
            options["temperature"] = 0.3 + 2 * torch.rand(N, generator=generator)
        if "bias" in names:
            options["bias"] = torch.randn(V, generator=generator)
        if "softcap" in names:
            options["softcap"] = 3.0
        if "scale" in names:
            options["logit_scale"] = 0.7
        return options

    return build
