"""The problems of tests/gpu: their sizes on a GPU and in its dry run, how they are made, how answers are judged.

Tensors are made on the device, and the ops are those that a user calls: `install` has wrapped others.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from device_under_test import DEVICE, NAME, assert_rounded, rounds
from torch import Tensor

import fused_grpo

linear_logprobs, linear_logprobs_and_entropy, fused_linear_grpo_loss = (
    inspect.unwrap(getattr(fused_grpo, name))
    for name in ("linear_logprobs", "linear_logprobs_and_entropy", "fused_linear_grpo_loss")
)
EPS = torch.finfo(torch.float32).eps
PLANS = {"no gradient": (), "frozen head": ("hidden",), "trainable": ("hidden", "weight")}


@dataclass(frozen=True)
class Sizes:
    """Letters: N rows, D hidden size, V vocabulary."""

    dtypes: dict[str, tuple[torch.dtype, torch.dtype]]
    """Of hidden states and weight. The first is that of most tests."""
    shape: tuple[int, int, int]
    """(N, D, V) of most tests; in several chunks where a test says so."""
    heads: tuple[tuple[int, int], ...]
    """(D, V) for the forward kernel: with D a multiple of its tile and not, through descriptors and pointers."""
    rows: tuple[int, ...]
    odd: tuple[int, ...]
    """Vocabularies after a resize, whose rows no GEMM likes."""
    odd_shape: tuple[int, int]
    """(N, D) for them."""
    repeats: int
    reach: int
    """Elements that a 32-bit index cannot count."""
    vocab: int
    """Of a model, for what needs `reach` logits or much memory."""
    memory_shape: tuple[int, int]
    """(N, D) for counting bytes under `vocab`."""
    gemm_vocabs: tuple[int, ...]


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FULL = Sizes(
    dtypes={"bf16": (BF16, BF16), "fp16": (FP16, FP16), "fp32": (FP32, FP32), "bf16 and fp32": (BF16, FP32)},
    shape=(384, 256, 5003),
    heads=((4096, 3001), (1024, 151936), (1000, 50257), (1001, 3001), (64, 257)),
    rows=(1, 7, 64, 129, 1000),
    odd=(151665, 50257, 100277),
    odd_shape=(200, 512),
    repeats=30,
    reach=2**31,
    vocab=151936,
    memory_shape=(8192, 1024),
    gemm_vocabs=(3001, 151936),
)
TINY = Sizes(
    dtypes=FULL.dtypes,
    shape=(19, 16, 67),
    heads=((16, 67), (15, 67)),
    rows=(1, 5),
    odd=(257,),
    odd_shape=(9, 16),
    repeats=3,
    reach=2**10,
    vocab=257,
    memory_shape=(64, 16),
    gemm_vocabs=(),
)
SIZES = FULL if NAME == "cuda" else TINY
DTYPE = next(iter(SIZES.dtypes))


@dataclass(frozen=True)
class Problem:
    """Inputs of the ops."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    loss: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden.dtype

    def to(self, dtype: torch.dtype) -> Problem:
        """The same values; those of a wider weight as GEMMs take them, rounded to the dtype of the hidden states."""
        loss = {k: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in self.loss.items()}
        weight = self.weight.to(self.dtype).to(dtype)
        return replace(self, hidden=self.hidden.to(dtype), weight=weight, loss=loss)

    def leaves(self, plan: str) -> dict[str, Tensor]:
        both = {"hidden": self.hidden, "weight": self.weight}
        return {name: x.detach().clone().requires_grad_(name in PLANS[plan]) for name, x in both.items()}


def make_problem(N: int, D: int, V: int, dtypes: str = DTYPE, *, seed: int = 0, off_policy: bool = True) -> Problem:
    """Logits with a standard deviation of 2.5; sequences of uneven lengths, one without an advantage; masked tokens."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=DEVICE)

    hidden_dtype, weight_dtype = SIZES.dtypes[dtypes]
    hidden, weight = normal(N, D).to(hidden_dtype), normal(V, D).mul_(2.5 / D**0.5).to(weight_dtype)
    targets = torch.randint(V, (N,), generator=generator, device=DEVICE)
    targets[0], targets[-1], targets[N // 3] = 0, V - 1, -100
    edges = torch.tensor([0, N // 5, N // 2, N // 2, N], dtype=torch.int32, device=DEVICE)
    loss: dict[str, Any] = {"cu_seqlens": edges, "advantages": torch.tensor([1.0, -1.5, 0.7, 0.4], device=DEVICE)}
    if N > 8:
        loss["advantages"][0] = 0.0
    loss["mask"] = torch.rand(N, generator=generator, device=DEVICE) > 0.1
    problem = Problem(hidden, weight, targets, loss)
    if off_policy:
        near = linear_logprobs(*problem.leaves("no gradient").values(), targets, impl="reference")
        loss |= {name: near + 0.3 * normal(N) for name in ("old_logprobs", "ref_logprobs", "sampling_logprobs")}
    return problem


def loss_of(problem: Problem, plan: str = "trainable", **options: Any) -> dict[str, Tensor]:
    """Loss, log-probs, metrics, and the gradients of the plan."""
    leaves = problem.leaves(plan)
    out = fused_linear_grpo_loss(**leaves, targets=problem.targets, **{**problem.loss, **options})
    wanted = {name: leaves[name] for name in PLANS[plan]}
    gradients = torch.autograd.grad(out.loss, list(wanted.values())) if wanted else ()
    values = {"loss": out.loss.detach(), "logprobs": out.logprobs, **out.metrics}
    return values | dict(zip(wanted, gradients, strict=True))


def logprobs_of(problem: Problem, plan: str, *, entropy: bool = False, **options: Any) -> dict[str, Tensor]:
    """Log-probs, the entropy if asked for, and the gradients of the plan under upstream ones that differ by row."""
    leaves, steps = problem.leaves(plan), torch.arange(len(problem.targets), device=DEVICE)
    places = torch.arange(problem.targets.numel(), device=DEVICE).view(problem.targets.shape)
    if entropy:
        outputs = linear_logprobs_and_entropy(**leaves, targets=problem.targets, **options)._asdict()
    else:
        outputs = {"logprobs": linear_logprobs(**leaves, targets=problem.targets, **options)}
    wanted = {name: leaves[name] for name in PLANS[plan]}
    if not wanted:
        return outputs
    total = (outputs["logprobs"] * torch.sin(1 + places)).sum()
    if entropy:
        total = total + (outputs["entropy"] * torch.cos(3 * steps)).sum()
    gradients = torch.autograd.grad(total, list(wanted.values()))
    return {name: x.detach() for name, x in outputs.items()} | dict(zip(wanted, gradients, strict=True))


def report(figure: str, value: float, unit: str, *, promised: float) -> None:
    """A line that scripts/gpu_first.py takes for a figure."""
    ratio = value / promised if promised else None
    print(json.dumps({"figure": figure, "value": value, "unit": unit, "predicted": promised, "ratio": ratio}))


def assert_gradient(ours: Tensor, exact: Tensor, problem: Problem, *, what: str) -> None:
    """To what the operands of GEMMs are rounded to, or to fp32."""
    if rounds(problem.dtype):
        assert_rounded(ours, exact, dtype=problem.dtype, what=what)
        return
    error, length = (torch.linalg.vector_norm(x.double()).item() for x in (ours.double() - exact, exact))
    assert error <= 2e-5 * length, f"{what}: error {error:.2e} of {length:.2e}"


def assert_as_exact(
    ours: Tensor, plain: Tensor, exact: Tensor, problem: Problem, *, magnitude: float, what: str
) -> None:
    """An output in fp32: at most twice the error of plain torch, and four roundings of numbers of that magnitude.

    Tensor cores truncate their sums, once for 16 products: of numbers that size, half a unit each time. In fp32 the
    kernel adds D products one after the other, and the roundings are a random walk.
    """
    assert ours.dtype == FP32
    error, plain_error = ((x.double() - exact).abs().max().item() for x in (ours, plain))
    D = problem.hidden.shape[1]
    sum_errors = D / 16 / 2 if rounds(problem.dtype) else D**0.5 / 4
    allowed = 2 * plain_error + (4 + sum_errors) * EPS * max(1.0, magnitude)
    print(f"{what}: error {error:.2e}, of plain torch {plain_error:.2e}, allowed {allowed:.2e}")
    assert error <= allowed, f"{what}: error {error:.2e}, of plain torch {plain_error:.2e}, allowed {allowed:.2e}"
