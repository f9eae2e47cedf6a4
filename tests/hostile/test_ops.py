"""6,000 calls of the ops with random arguments: each gives the result of the reference, or an error of fused_grpo."""

import random
from collections.abc import Callable

import pytest
import torch
from bent_arguments import Arguments, assert_same, bend, is_tame, results
from torch import Tensor

import fused_grpo
from fused_grpo import GRPOLossConfig
from fused_grpo.config import CORRECTIONS, LEVELS, LOSS_TYPES

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
    """The same, but for up to three of them."""
    return bend(rng, good(rng, function), TAKES[function])


def solve(function: str, arguments: Arguments) -> list[Tensor]:
    """Results and gradients."""
    output = getattr(fused_grpo, function)(**arguments)
    return [] if isinstance(output, GRPOLossConfig) else results(output, arguments, LEAVES)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", CALLS)
def test_any_arguments_give_the_reference_or_an_error_of_ours(hostile, function):
    def call(rng: random.Random) -> None:
        arguments = bent(rng, function)
        ours = solve(function, arguments)
        if ours and all(map(is_tame, arguments.values())):
            assert_same(ours, solve(function, {**arguments, "impl": "reference"}))

    assert min(hostile(call, CALLS[function])) > 0.03
