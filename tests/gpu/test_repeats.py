"""Two runs give the same bits, and so do thirty."""

from collections.abc import Callable

import pytest
import torch
from gpu_problems import SIZES, logprobs_of, loss_of, make_problem

from fused_grpo import GRPOLossConfig

pytestmark = pytest.mark.dry_run

N, D, V = SIZES.shape
CHUNK = 4 * (V + 256) * (N // 3)
SEQUENCE = GRPOLossConfig(importance_sampling_level="sequence", beta=0.1)
RUNS: dict[str, Callable[..., dict[str, torch.Tensor]]] = {
    "loss": lambda problem: loss_of(problem, impl="triton"),
    "loss in chunks": lambda problem: loss_of(problem, impl="triton", chunk_bytes=CHUNK),
    "loss in two phases": lambda problem: loss_of(problem, impl="triton", chunk_bytes=CHUNK, config=SEQUENCE),
    "log-probs without gradient": lambda problem: logprobs_of(problem, "no gradient", impl="triton", entropy=True),
    "log-probs, frozen head": lambda problem: logprobs_of(problem, "frozen head", impl="triton"),
    "log-probs, trainable": lambda problem: logprobs_of(problem, "trainable", impl="triton", entropy=True),
    "torch path": lambda problem: loss_of(problem, impl="torch", chunk_bytes=CHUNK),
}


@pytest.mark.parametrize("name", RUNS)
def test_every_run_gives_the_same_bits(name):
    problem = make_problem(N, D, V)
    first = RUNS[name](problem)
    for _ in range(SIZES.repeats - 1):
        for key, value in RUNS[name](problem).items():
            assert torch.equal(value, first[key]), key
