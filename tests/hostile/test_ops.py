"""6,000 calls of the ops with random arguments: each gives the result of the reference, or an error of fused_grpo."""

import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fused_grpo
from fused_grpo import GRPOLossConfig
from fused_grpo.config import CORRECTIONS, KL_ESTIMATORS, LEVELS, LOSS_TYPES

Arguments = dict[str, Any]
CALLS = {"linear_logprobs": 1500, "linear_logprobs_and_entropy": 1000, "grpo_loss": 1500}
CALLS |= {"fused_linear_grpo_loss": 1500, "GRPOLossConfig": 500}
HEAD = ("hidden", "weight", "targets", "bias", "temperature", "logit_scale", "softcap", "ignore_index")
PLAN = ("chunk_bytes", "impl")
TOKENS = ("old_logprobs", "ref_logprobs", "sampling_logprobs", "mask")
LOSS = (*TOKENS, "advantages", "cu_seqlens", "num_tokens", "num_sequences", "num_entropy_tokens", "entropy_threshold")
GIVEN = ("weight_main_grad", "squared_gradients")  # written to
TAKES = {
    "linear_logprobs": (*HEAD, *PLAN, "batch_invariant", "process_group"),
    "linear_logprobs_and_entropy": (*HEAD, *PLAN, "batch_invariant", "process_group"),
    "grpo_loss": ("logprobs", "entropy", "impl", *LOSS, "config"),
    "fused_linear_grpo_loss": (*HEAD, *PLAN, *LOSS, *GIVEN, "config", "score", "entropy", "process_group"),
    "GRPOLossConfig": tuple(GRPOLossConfig.__dataclass_fields__),
}
LEAVES = ("hidden", "weight", "bias", "logprobs", "entropy")


class Subclass(Tensor):
    """A tensor of another class."""


def with_value(value: float) -> Callable[[Tensor], Tensor]:
    """The tensor with one element of this value."""

    def put(tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        changed.view(-1)[:1] = value
        return changed

    return put


BENT: list[Callable[[Tensor], Any]] = [
    *(lambda x, dtype=dtype: x.to(dtype) for dtype in (torch.int32, torch.int64, torch.bool, torch.uint8)),
    *(lambda x, dtype=dtype: x.to(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64)),
    *(lambda x, dtype=dtype: x.to(dtype) for dtype in (torch.complex64, torch.float8_e4m3fn)),
    *map(with_value, (float("nan"), float("inf"), float("-inf"), 3e38, -3e38, 1e-45, -1.0, 2.0**31, 2.0**62, -101.0)),
    lambda x: x.flatten(),
    lambda x: x[None],
    lambda x: x[..., :0],
    lambda x: x[:0],
    lambda x: x.flatten()[0],
    lambda x: torch.cat([x, x]),
    lambda x: x.flatten()[:1].expand(x.shape),
    lambda x: x.t() if x.ndim == 2 else x.flip(0),
    lambda x: x.repeat_interleave(2, -1)[..., ::2],
    lambda x: torch.zeros_like(x),
    lambda x: torch.empty_like(x, device="meta"),
    lambda x: x.to_sparse(),
    lambda x: x.to_sparse_csr() if x.ndim == 2 else x.to_sparse(),
    lambda x: torch.nested.nested_tensor([x.flatten()[:1], x.flatten()]),
    lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    lambda x: x.as_subclass(Subclass),
    lambda x: x.float().clone().requires_grad_(),
    lambda x: x.float().clone().requires_grad_() * 2,
    lambda x: x.numpy(),
    lambda x: x.tolist(),
]
STRAY: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e-320, 1e308, 2**31, 2**63, 2**70, -(2**70), 1j, "", "1", b"1"),
    *(float("nan"), float("inf"), float("-inf"), Fraction(1, 3), np.float32(0.5), np.int64(3), np.array([1.0, 2.0])),
    *((), [], [1.0], {}, {1}, object(), int, len, torch.float32, torch.device("cpu"), slice(None)),
    *(torch.tensor(0.5), torch.tensor([0.5, 1.0]), torch.tensor(2), torch.tensor(float("nan")), torch.zeros(0)),
    *(torch.empty((), device="meta"), *LOSS_TYPES[:3], *LEVELS, *KL_ESTIMATORS, "torch", "reference", "needed"),
]


def good(rng: random.Random, function: str) -> Arguments:
    """Arguments that are right, drawn from all that the function takes."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    lengths, width, vocabulary = [rng.randint(0, 3) for _ in range(rng.randint(1, 3))], rng.randint(1, 4), 5
    packed = rng.random() < 0.6 or function.startswith("linear")
    shape = (sum(lengths),) if packed else (len(lengths), rng.randint(0, 3))
    rand: Callable[..., Tensor] = lambda *size: torch.randn(size, generator=generator)  # noqa: E731
    arguments: Arguments = {
        "hidden": rand(*shape, width).requires_grad_(rng.random() < 0.4),
        "weight": rand(vocabulary, width).requires_grad_(rng.random() < 0.4),
        "bias": rng.choice([None, rand(vocabulary)]),
        "targets": torch.randint(0, vocabulary, shape, generator=generator),
        "temperature": rng.choice([1.0, 0.7, rand(*shape).abs() + 0.1]),
        "logprobs": -rand(*shape).abs().requires_grad_(),
        "entropy": rand(*shape).abs(),
        "advantages": rand(len(lengths)) if rng.random() < 0.5 else rand(*shape),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int() if packed else None,
        "mask": rng.choice([None, rand(*shape) > 0]),
        **{name: rng.choice([None, -rand(*shape).abs()]) for name in TOKENS[:3]},
    }
    return {name: value for name, value in arguments.items() if name in TAKES[function]} | options_of(rng, function)


def options_of(rng: random.Random, function: str) -> Arguments:
    """Plain options, and in place of a config one that may be refused."""
    if function == "GRPOLossConfig":
        return {"loss_type": rng.choice(LOSS_TYPES), "sampling_correction": rng.choice(CORRECTIONS)}
    options: Arguments = {"impl": rng.choice(["auto", "torch", "reference"])}
    if function == "fused_linear_grpo_loss":
        options["entropy"] = rng.random() < 0.5
    if "config" in TAKES[function]:
        options["config"] = GRPOLossConfig(
            loss_type=rng.choice(["dapo", "grpo", "luspo", "cispo", "sapo", "vespo"]),
            importance_sampling_level=rng.choice(LEVELS),
            entropy_coef=rng.choice([0.0, 0.1]),
            # Not of entropies that are computed: equal ones may round to either side of the quantile.
            top_entropy_quantile=rng.choice([1.0, 0.5]) if function == "grpo_loss" else 1.0,
        )
    return options


def bent(rng: random.Random, function: str) -> Arguments:
    """The same with up to three of them replaced, bent, or one taken away or added."""
    arguments = good(rng, function)
    for name in rng.sample(TAKES[function], rng.randint(0, 3)):
        present = arguments.get(name)
        if isinstance(present, Tensor) and rng.random() < 0.8:
            try:
                arguments[name] = rng.choice(BENT)(present.detach())
            except (RuntimeError, TypeError, IndexError):  # not every tensor can be bent in every way
                continue
        else:
            arguments[name] = rng.choice(STRAY)
    return arguments


def solve(function: str, arguments: Arguments) -> list[Tensor]:
    """Results and gradients."""
    leaves = [x for name in LEAVES if isinstance(x := arguments.get(name), Tensor) and x.requires_grad and x.is_leaf]
    output = getattr(fused_grpo, function)(**arguments)
    if isinstance(output, GRPOLossConfig):
        return []
    results = [output] if isinstance(output, Tensor) else [x for x in output if isinstance(x, Tensor)]
    total = sum(x.sum() for x in results if x.requires_grad)
    gradients = torch.autograd.grad(total, leaves, allow_unused=True) if isinstance(total, Tensor) and leaves else ()
    return [*(x.detach() for x in results), *(x for x in gradients if x is not None)]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Equal, NaN included. Rows without a target may hold one: autograd makes 0 * NaN of it, where ours is 0."""
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        mine, other = mine.double(), other.double()
        assert mine.shape == other.shape
        same = torch.isclose(mine, other, rtol=1e-3, atol=1e-3, equal_nan=True)
        assert (same | ((mine == 0) & other.isnan())).all(), (mine, other)


def is_tame(value: Any) -> bool:
    """Whether fp32 sums and products of it stay in fp32, in any order."""
    return not isinstance(value, Tensor | int | float) or not (torch.as_tensor(value).double().abs() > 1e18).any()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", CALLS)
def test_any_arguments_give_the_reference_or_an_error_of_ours(hostile, function):
    def call(rng: random.Random) -> None:
        arguments = bent(rng, function)
        ours = solve(function, arguments)
        if ours and all(map(is_tame, arguments.values())):
            assert_same(ours, solve(function, {**arguments, "impl": "reference"}))

    assert min(hostile(call, CALLS[function])) > 0.03
