"""The training phase where completions share their prompts, against whole sequences: prompt : completion 4 : 1, G = 8.

One learner makes both kinds of steps in interleaved rounds, after a check that their gradients are equal.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fused_grpo.bench.interleaved import interleaved_seconds, quotient
from fused_grpo.bench.memory import allocations_of
from fused_grpo.bench.trainers.training_step import Problem, TrainingStep, no_reward, no_rollouts, our_trainer
from fused_grpo.trainer import GRPOTrainer
from fused_grpo.trainer.types import Sample

FULL = Problem(vocab=8000, hidden=256, layers=4, completions=32, longest=64)
SMALL = Problem(vocab=500, hidden=32, layers=2, completions=16, longest=6)
ROUNDS, LEAST, MEMBERS = 5, 1.5, 8
GROUP = "training phase, prompts four times as long as completions"
SHARED, WHOLE = "shared prompts", "whole sequences (share_prompts=False)"

pytestmark = pytest.mark.trainer


@pytest.fixture(scope="session")
def problem(pytestconfig: pytest.Config) -> Problem:
    return SMALL if pytestconfig.getoption("--tiny") else FULL


@pytest.fixture(scope="session")
def trainer(problem: Problem) -> GRPOTrainer:
    return our_trainer(problem, no_reward, rollout_func=no_rollouts)


@pytest.fixture(scope="session")
def actions(trainer: GRPOTrainer, problem: Problem) -> dict[str, Callable[[], object]]:
    learner, batch = trainer.learner, rollouts(problem)

    def step(*, share: bool) -> object:
        learner.packing = replace(learner.packing, share_prompts=share)
        return learner.learn(batch)

    return {SHARED: lambda: step(share=True), WHOLE: lambda: step(share=False)}


@pytest.fixture(scope="session")
def seconds(trainer: GRPOTrainer, actions: dict[str, Callable[[], object]], problem: Problem) -> dict[str, list[float]]:
    optimizer: torch.optim.Optimizer = trainer.learner.optimizer.optimizer
    steps = (TrainingStep(step=action, model=trainer.model, optimizer=optimizer) for action in actions.values())
    mine, full = (step.gradients() for step in steps)
    for name, gradient in full.items():
        assert (mine[name] - gradient).abs().max() <= 1e-5 * max(1.0, gradient.abs().max().item()), name
    interleaved_seconds(actions, rounds=1)
    return interleaved_seconds(actions, rounds=2 if problem is SMALL else ROUNDS)


def rollouts(problem: Problem) -> list[Sample]:
    """Groups of 8 completions of `longest` tokens, a quarter of their prompt."""
    generator, samples = torch.Generator().manual_seed(0), problem.batch()

    def draw(length: int) -> list[int]:
        ids: list[int] = torch.randint(2, problem.vocab, (length,), generator=generator).tolist()
        return ids

    prompts = [draw(4 * problem.longest) for _ in range(len(samples) // MEMBERS)]
    return [
        replace(sample, prompt_ids=prompts[place // MEMBERS], completion_ids=draw(problem.longest))
        for place, sample in enumerate(samples)
    ]


@pytest.mark.parametrize("prompts", [SHARED, WHOLE])
def test_shared_prompts(
    benchmark: Any,
    replay: Any,
    actions: dict[str, Callable[[], object]],
    seconds: dict[str, list[float]],
    problem: Problem,
    prompts: str,
) -> None:
    benchmark.group = GROUP
    replay.into(benchmark, seconds[prompts])
    tokens = problem.completions * problem.longest
    benchmark.extra_info |= {
        "implementation": prompts,
        "completion_tokens_per_second": tokens / statistics.median(seconds[prompts]),
        "peak_bytes": allocations_of(actions[prompts], "cpu").peak,
        **vars(problem),
        "threads": torch.get_num_threads(),
    }


def test_promise_of_shared_prompts(figures: Any, seconds: dict[str, list[float]], problem: Problem) -> None:
    """A step takes at most two thirds of its time."""
    if problem is SMALL:
        pytest.skip("promised at full size")
    value = quotient(seconds, WHOLE, SHARED)
    entry = {"group": GROUP, "value": value, "bound": f">= {LEAST}", "met": value >= LEAST}
    figures.note("promises", what="training phase: seconds of whole sequences / shared prompts", **entry)
    assert value >= LEAST
