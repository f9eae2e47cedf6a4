"""The training phase where half of the groups have equal rewards: their completions are not in the forward pass.

Every completion is there twice, and the second half has no advantage, so that half of the tokens are left out. The
three batches go through one learner in interleaved rounds, after a check that the gradients with and without are equal.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fused_grpo.bench.interleaved import interleaved_seconds, quotient
from fused_grpo.bench.trainers.training_step import Problem, TrainingStep, no_reward, no_rollouts, our_trainer
from fused_grpo.trainer import GRPOTrainer
from fused_grpo.trainer.batching.micro_batches import skip_zero_advantages

FULL = Problem(vocab=8000, hidden=256, layers=4, completions=8, longest=96)
SMALL = Problem(vocab=500, hidden=32, layers=2, completions=8, longest=24)
ROUNDS, MOST = 5, 0.6
GROUP = "training phase, half of the groups with equal rewards"
NONE, HALF, KEPT = "no group with equal rewards", "left out", "kept (skip_zero_advantages=False)"

pytestmark = pytest.mark.trainer


@pytest.fixture(scope="session")
def problem(pytestconfig: pytest.Config) -> Problem:
    return SMALL if pytestconfig.getoption("--tiny") else FULL


@pytest.fixture(scope="session")
def seconds(problem: Problem) -> dict[str, list[float]]:
    trainer = our_trainer(replace(problem, completions=2 * problem.completions), no_reward, rollout_func=no_rollouts)
    actions = steps(trainer, problem)
    optimizer: torch.optim.Optimizer = trainer.learner.optimizer.optimizer
    kinds = (TrainingStep(step=actions[name], model=trainer.model, optimizer=optimizer) for name in (HALF, KEPT))
    mine, full = (kind.gradients() for kind in kinds)
    for name, gradient in full.items():
        assert (mine[name] - gradient).abs().max() <= 1e-7 * max(1.0, gradient.abs().max().item()), name
    interleaved_seconds(actions, rounds=1)
    return interleaved_seconds(actions, rounds=2 if problem is SMALL else ROUNDS)


def steps(trainer: GRPOTrainer, problem: Problem) -> dict[str, Callable[[], object]]:
    once = problem.batch()
    whole = once + once
    half = once + [replace(sample, advantage=0.0) for sample in once]
    learner = trainer.learner
    return {
        NONE: lambda: learner.learn(skip_zero_advantages(whole, trainer.accelerator)),
        HALF: lambda: learner.learn(skip_zero_advantages(half, trainer.accelerator)),
        KEPT: lambda: learner.learn(half),
    }


@pytest.mark.parametrize("groups", [NONE, HALF, KEPT])
def test_equal_rewards(
    benchmark: Any, replay: Any, seconds: dict[str, list[float]], problem: Problem, groups: str
) -> None:
    benchmark.group = GROUP
    replay.into(benchmark, seconds[groups])
    tokens = 2 * sum(sample.num_own for sample in problem.batch())
    benchmark.extra_info |= {
        "implementation": groups,
        "completion_tokens_per_second": tokens / statistics.median(seconds[groups]),
        **vars(problem),
        "completions": 2 * problem.completions,
        "threads": torch.get_num_threads(),
    }


def test_promise_of_equal_rewards(figures: Any, seconds: dict[str, list[float]], problem: Problem) -> None:
    """With half of the groups left out, a step takes at most 0.6 of its time."""
    if problem is SMALL:
        pytest.skip("promised at full size")
    value = quotient(seconds, HALF, NONE)
    entry = {"group": GROUP, "value": value, "bound": f"<= {MOST}", "met": value <= MOST}
    figures.note("promises", what="training phase: seconds of half of the groups left out / none", **entry)
    assert value <= MOST
