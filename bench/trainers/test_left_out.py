"""The training phase with fewer tokens and the same gradients, against all of them.

    equal rewards     every completion is there twice, the second half without an advantage: it is left out of the
                      forward pass
    shared prompts    groups of 8 whose prompts are four times as long as completions have each prompt once

One learner makes all steps of a comparison in interleaved rounds, after a check that the gradients are equal.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pytest
import torch

from fused_grpo.bench.interleaved import interleaved_seconds, quotient
from fused_grpo.bench.memory import allocations_of
from fused_grpo.bench.trainers.training_step import Problem, TrainingStep, no_reward, no_rollouts, our_trainer
from fused_grpo.trainer import GRPOTrainer
from fused_grpo.trainer.batching.micro_batches import skip_zero_advantages
from fused_grpo.trainer.types import Sample

ROUNDS, MEMBERS = 5, 8
NONE, HALF, KEPT = "no group with equal rewards", "left out", "kept (skip_zero_advantages=False)"
SHARED, WHOLE = "shared prompts", "whole sequences (share_prompts=False)"
Steps = Mapping[str, Callable[[], object]]
"""By name, the first two with the same gradients."""

pytestmark = pytest.mark.trainer


@dataclass
class Comparison:
    """Steps of one learner from one batch."""

    group: str
    full: Problem
    small: Problem
    batch: Callable[[Problem], list[Sample]]
    make: Callable[[GRPOTrainer, list[Sample]], Steps]
    within: float
    """The largest error of a gradient, as a share of its largest element, or of 1."""
    promise: tuple[str, str, str, str]
    """What, over, under, bound."""
    is_tiny: bool = False

    @property
    def problem(self) -> Problem:
        return self.small if self.is_tiny else self.full

    @cached_property
    def trainer(self) -> GRPOTrainer:
        return our_trainer(self.problem, no_reward, rollout_func=no_rollouts)

    @cached_property
    def steps(self) -> Steps:
        return self.make(self.trainer, self.batch(self.problem))

    @cached_property
    def seconds(self) -> dict[str, list[float]]:
        optimizer: torch.optim.Optimizer = self.trainer.learner.optimizer.optimizer
        model: Any = self.trainer.model
        steps = [TrainingStep(step=step, model=model, optimizer=optimizer) for step in self.steps.values()]
        reduced, full = (step.gradients() for step in steps[:2])
        for name, gradient in full.items():
            off = (reduced[name] - gradient).abs().max()
            assert off <= self.within * max(1.0, gradient.abs().max().item()), name
        interleaved_seconds(self.steps, rounds=1)
        return interleaved_seconds(self.steps, rounds=2 if self.is_tiny else ROUNDS)


def twice(problem: Problem) -> list[Sample]:
    return 2 * replace(problem, completions=problem.completions // 2).batch()


def equal_rewards(trainer: GRPOTrainer, batch: list[Sample]) -> Steps:
    learner, middle = trainer.learner, len(batch) // 2
    half = batch[:middle] + [replace(sample, advantage=0.0) for sample in batch[middle:]]
    return {
        HALF: lambda: learner.learn(skip_zero_advantages(half)),
        KEPT: lambda: learner.learn(half),
        NONE: lambda: learner.learn(skip_zero_advantages(batch)),
    }


def shared_prompts(trainer: GRPOTrainer, batch: list[Sample]) -> Steps:
    learner = trainer.learner

    def step(*, share: bool) -> object:
        learner.packing = replace(learner.packing, share_prompts=share)
        return learner.learn(batch)

    return {SHARED: lambda: step(share=True), WHOLE: lambda: step(share=False)}


def grouped(problem: Problem) -> list[Sample]:
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


FULL = Problem(vocab=8000, hidden=256, layers=4, completions=16, longest=96)
SMALL = Problem(vocab=500, hidden=32, layers=2, completions=16, longest=24)
COMPARISONS = {
    "equal rewards": Comparison(
        "training phase, half of the groups with equal rewards",
        FULL,
        SMALL,
        twice,
        equal_rewards,
        1e-7,
        ("half of the groups left out / none", HALF, NONE, "<= 0.6"),
    ),
    "shared prompts": Comparison(
        "training phase, prompts four times as long as completions",
        replace(FULL, completions=32, longest=64),
        replace(SMALL, longest=6),
        grouped,
        shared_prompts,
        1e-5,
        ("whole sequences / shared prompts", WHOLE, SHARED, ">= 1.5"),
    ),
}
CASES = [("equal rewards", name) for name in (HALF, KEPT, NONE)]
CASES += [("shared prompts", name) for name in (SHARED, WHOLE)]


@pytest.fixture
def comparison(kind: str, pytestconfig: pytest.Config) -> Comparison:
    comparison = COMPARISONS[kind]
    comparison.is_tiny = bool(pytestconfig.getoption("--tiny"))
    return comparison


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_left_out(benchmark: Any, replay: Any, comparison: Comparison, kind: str, name: str) -> None:
    seconds, tokens = comparison.seconds, sum(sample.num_own for sample in comparison.batch(comparison.problem))
    benchmark.group = comparison.group
    replay.into(benchmark, seconds[name])
    benchmark.extra_info |= {
        "implementation": name,
        "completion_tokens_per_second": tokens / statistics.median(seconds[name]),
        "peak_bytes": allocations_of(comparison.steps[name], "cpu").peak,
        **vars(comparison.problem),
        "threads": torch.get_num_threads(),
    }


@pytest.mark.parametrize("kind", COMPARISONS)
def test_promise_of_what_is_left_out(figures: Any, comparison: Comparison, kind: str) -> None:
    """With half of the groups left out a step takes 0.6 of its time, with shared prompts two thirds."""
    if comparison.is_tiny:
        pytest.skip("promised at full size")
    label, over, under, bound = comparison.promise
    value = quotient(comparison.seconds, over, under)
    figures.promise(f"training phase: seconds of {label}", comparison.group, value, bound)
