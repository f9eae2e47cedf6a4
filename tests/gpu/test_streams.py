"""When a call waits for the device, and what can be captured, replayed and compiled."""

import contextlib
import sys
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from device_under_test import DEVICE, NAME
from gpu_problems import (
    PLANS,
    SIZES,
    Problem,
    assert_gradient,
    fused_linear_grpo_loss,
    linear_logprobs_and_entropy,
    logprobs_of,
    loss_of,
    make_problem,
    report,
)

from fused_grpo import GRPOLossConfig
from fused_grpo.kernels import tuning

N, D, V = SIZES.shape
OPS = torch.ops.fused_grpo
SEQUENCE = GRPOLossConfig(importance_sampling_level="sequence")
# Three chunks: no number of them makes a call wait more often.
CHUNKS = {"impl": "triton", "chunk_bytes": 4 * (V + 256) * (N // 3)}
ENTROPY = GRPOLossConfig(entropy_coef=0.1)
# Only where a kernel writes the weights without logits are they kept.
KEPT = 2 if NAME == "cuda" and tuning.architecture(DEVICE) not in tuning.WEIGHTS_FROM else 3


def keeping_weights(problem: Problem) -> dict[str, torch.Tensor]:
    with mock.patch.dict(tuning.WEIGHTS_FROM, dict.fromkeys(tuning.WEIGHTS_FROM, 0)):
        return logprobs_of(problem, "trainable", impl="triton")


def recomputing(problem: Problem, **options: Any) -> dict[str, torch.Tensor]:
    with mock.patch.dict(tuning.WEIGHTS_FROM, dict.fromkeys(tuning.WEIGHTS_FROM, 2**62)):
        return logprobs_of(problem, "trainable", impl="triton", **options)


# Log-probs wait for the rows that are not ignored, and again for those with a gradient; an entropy, for whether it has
# one at all. Kept weights are of the rows that are not ignored, whose number is asked for again.
WAITS: dict[str, tuple[Callable[[Problem], Any], int]] = {
    "log-probs without gradient": (lambda x: logprobs_of(x, "no gradient", impl="triton"), 0),
    "log-probs and entropy without gradient": (lambda x: logprobs_of(x, "no gradient", entropy=True, impl="triton"), 0),
    "log-probs, frozen head": (lambda x: logprobs_of(x, "frozen head", impl="triton"), 1),
    "log-probs, trainable": (recomputing, 2),
    "log-probs and entropy, trainable": (lambda x: recomputing(x, entropy=True), 3),
    "log-probs, trainable, from kept weights": (keeping_weights, KEPT),
    "loss": (lambda x: loss_of(x, impl="triton"), 1),
    "loss, frozen head": (lambda x: loss_of(x, "frozen head", impl="triton"), 1),
    "loss in chunks": (lambda x: loss_of(x, **CHUNKS), 1),
    "loss in two phases": (lambda x: loss_of(x, config=SEQUENCE, **CHUNKS), 2),
    "loss with an entropy bonus": (lambda x: loss_of(x, config=ENTROPY, impl="triton"), 1),
    "loss without gradient": (lambda x: loss_of(x, "no gradient", impl="triton"), 1),
}


CHECKS = ("check_normaliser", "sequences_of")  # each reads what is on a CPU alone


def waits_of(call: Callable[[], Any]) -> list[str]:
    """What CUDA says of each wait in a call."""
    call()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    said = [str(warning.message) for warning in caught]
    return [text for text in said if "synchronizing CUDA operation" in text]


def reads_of(call: Callable[[], Any]) -> list[str]:
    """Its dry run: where plans read values. Checks of arguments, elsewhere or in CHECKS, read none on a GPU."""
    reads: list[str] = []

    def counting(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def read(*args: Any, **kwargs: Any) -> Any:
            reader = sys._getframe(1).f_code
            if "/fused_grpo/head/" in reader.co_filename and reader.co_name not in CHECKS:
                reads.append(name)
            return original(*args, **kwargs)

        return mock.patch.object(torch.Tensor, name, read)

    with contextlib.ExitStack() as patches:
        for name in ("__bool__", "item", "nonzero", "tolist"):
            patches.enter_context(counting(name))
        call()
    return reads


@pytest.mark.dry_run
@pytest.mark.parametrize("name", WAITS)
def test_a_call_waits_for_the_device_as_often_as_is_promised(name):
    call, promised = WAITS[name]
    problem = make_problem(N, D, V)
    waits = (waits_of if NAME == "cuda" else reads_of)(lambda: call(problem))
    report(f"waits of {name}", len(waits), "waits", promised=promised)
    assert len(waits) == promised, waits


@pytest.mark.gpu
def test_the_counter_counts_waits():
    x = torch.ones(3, device=DEVICE)
    assert len(waits_of(lambda: x.sum().item())) == 1
    assert len(waits_of(lambda: x.nonzero())) >= 1


def captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


def put(problem: Problem, into: Problem, leaves: dict[str, torch.Tensor]) -> None:
    """Other numbers where those of the captured calls were."""
    into.targets.copy_(problem.targets)
    for name, value in problem.loss.items():
        into.loss[name].copy_(value)
    with torch.no_grad():
        for name, leaf in leaves.items():
            leaf.copy_(getattr(problem, name))


@pytest.mark.gpu
@pytest.mark.parametrize("chunk_bytes", [None, 4 * 128 * V])
def test_captured_log_probs_are_those_of_new_inputs(chunk_bytes):
    problem, others = (make_problem(N, D, V, seed=seed) for seed in (0, 1))
    leaves = problem.leaves("no gradient")
    options = {"targets": problem.targets, "impl": "triton", "chunk_bytes": chunk_bytes}
    graph, out = captured(lambda: linear_logprobs_and_entropy(**leaves, **options))
    put(others, problem, leaves)
    graph.replay()
    expected = logprobs_of(others, "no gradient", entropy=True, impl="triton", chunk_bytes=chunk_bytes)
    assert torch.equal(out.logprobs, expected["logprobs"])
    assert torch.equal(out.entropy, expected["entropy"])


@pytest.mark.gpu
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_captured_loss_is_that_of_new_inputs(beta):
    """With other masks and other rows without an advantage: none of it may be part of what was captured."""
    problem, others = (make_problem(N, D, V, seed=seed) for seed in (0, 1))
    others.loss["advantages"][1] = 0.0
    leaves, config = problem.leaves("trainable"), GRPOLossConfig(beta=beta)

    def call() -> tuple[torch.Tensor, ...]:
        loss = fused_linear_grpo_loss(**leaves, targets=problem.targets, **problem.loss, config=config, **CHUNKS).loss
        return loss.detach(), *torch.autograd.grad(loss, list(leaves.values()))

    graph, (loss, *gradients) = captured(call)
    put(others, problem, leaves)
    for _ in range(2):
        graph.replay()
        exact = loss_of(others.to(torch.float64), config=config, impl="reference")
        assert (loss.double() - exact["loss"]).abs() <= 5e-5 * exact["loss"].abs().clamp_min(1.0)
        for name, gradient in zip(leaves, gradients, strict=True):
            assert_gradient(gradient, exact[name], others, what=name)


def step(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Work of others on both sides, as in a model."""
    out = linear_logprobs_and_entropy(hidden * 2, weight, targets, temperature=0.7)
    return out.logprobs.exp().sum() + out.entropy.square().mean()


@pytest.fixture
def compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.dry_run
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("compiler")
def test_a_compiled_call_equals_an_eager_one_and_is_not_compiled_again():
    backend = "inductor" if NAME == "cuda" else "aot_eager"
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    for count in (N, N - 3, N // 2 + 1):
        problem = make_problem(count, D, V, off_policy=False)
        results = []
        with torch._dynamo.config.patch(error_on_recompile=count != N):
            for function in (step, compiled):
                leaves = problem.leaves("trainable")
                value = function(*leaves.values(), problem.targets)
                results.append([value.detach(), *torch.autograd.grad(value, list(leaves.values()))])
        for name, eager, ours in zip(("value", *PLANS["trainable"]), *results, strict=True):
            assert_gradient(ours, eager.double(), problem, what=name)


@pytest.mark.dry_run
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("plan", ["frozen head", "trainable"])
def test_opcheck_finds_nothing(plan):
    problem = make_problem(N, D, V, off_policy=False)
    leaves = problem.leaves(plan)
    temperature = torch.full((N,), 0.7, device=DEVICE)
    wanted = [True, plan == "trainable", False]
    inputs = (leaves["hidden"], leaves["weight"], None, problem.targets, temperature)
    options = (1.5, 4.0, -100, True, "triton", None, False, True, wanted)
    # Not its comparison with a compiled call: that is the test above.
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(OPS.linear_logprobs.default, (*inputs, True, *options), test_utils=utils)
