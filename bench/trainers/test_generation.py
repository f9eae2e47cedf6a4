"""One generate call per effective batch against one per micro-batch, with the same completions and vLLM engine.

An engine fills its batch from the prompts of a call. With a call per micro-batch it waits for the longest completion of
each micro-batch; with one call it waits once. Lengths are sampled: one token in 64 ends a completion.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fused_grpo.bench.interleaved import interleaved_seconds
from fused_grpo.trainer.types import SamplingParams

CALLS = {"once per effective batch": 1, "once per micro-batch, 4 of them": 4, "once per micro-batch, 16 of them": 16}
PROMPTS, GROUP, LONGEST = 16, 8, 64

pytestmark = pytest.mark.trainer


@pytest.fixture(scope="session")
def engine() -> Iterator[Any]:
    """vLLM in a process of its own, with a tiny model of random weights."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed; fix: pip install 'fused-grpo[vllm]'")
    import torch

    from fused_grpo.bench.trainers.training_step import Problem
    from fused_grpo.trainer.engines.vllm.inprocess import VLLMEngine, VLLMOptions

    problem = Problem(vocab=64, hidden=128, layers=2, completions=8, longest=LONGEST)
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    model: Any = problem.model()
    model = model.to(dtype)
    engine = VLLMEngine(model, problem.tokenizer(), VLLMOptions(max_model_len=2 * LONGEST, dtype=dtype))
    engine.load_weights(((name, tensor) for name, tensor in model.state_dict().items()), version=0)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def seconds(engine: Any, pytestconfig: pytest.Config) -> dict[str, list[float]]:
    tiny = pytestconfig.getoption("--tiny")
    prompts = [[2 + number, 3 + number] for number in range(PROMPTS)]
    actions = {name: generate(engine, prompts, parts) for name, parts in CALLS.items()}
    interleaved_seconds(actions, rounds=1)
    return interleaved_seconds(actions, rounds=1 if tiny else 2)


def generate(engine: Any, prompts: list[list[int]], parts: int) -> Callable[[], None]:
    """Generate for all prompts, in so many calls."""
    sampling = SamplingParams(n=GROUP, max_tokens=LONGEST, temperature=1.0)
    size = len(prompts) // parts

    def run() -> None:
        for start in range(0, len(prompts), size):
            engine.generate(prompts[start : start + size], sampling)

    return run


@pytest.mark.parametrize("calls", CALLS)
def test_generation(benchmark: Any, replay: Any, seconds: dict[str, list[float]], calls: str) -> None:
    benchmark.group = f"generation, {PROMPTS} prompts x {GROUP} completions"
    replay.into(benchmark, seconds[calls])
    benchmark.extra_info |= {
        "implementation": calls,
        "calls": CALLS[calls],
        "completions": PROMPTS * GROUP,
        "longest": LONGEST,
    }
