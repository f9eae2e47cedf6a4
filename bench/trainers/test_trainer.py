"""The training phase, from scored rollouts to updated weights, and whole steps of ours and TRL's loop, interleaved.

Both use the same model, the same rollouts and the same AdamW without gradient checkpointing, in fp32, on a GPU in bf16
autocast. Completions have uneven lengths. Before anything is timed, the gradients of a step and the parameters after it
have to agree (not on a GPU, where both round to bf16). The learning rate is 0 in timed steps, so that all are equal.

On a CPU TRL scores every position. "completions scored" is TRL that scores the positions which it scores where it has
Triton, and "fused-grpo ops" is TRL's trainer with `fused_grpo.integrations.trl`. Liger has no trainer: "Liger's loss"
is the same step with its GRPO loss. With `-m long` the model has SmolLM2's shape, with gradient checkpointing.
"""

from __future__ import annotations

import functools
import gc
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fused_grpo.bench.interleaved import interleaved_seconds, quotient
from fused_grpo.bench.memory import allocations_of
from fused_grpo.bench.trainers import training_step
from fused_grpo.bench.trainers.training_step import Problem, TrainingStep
from fused_grpo.bench.trainers.whole_steps import SteppedTrainer

FULL = Problem(vocab=32000, hidden=256, layers=4, completions=8, longest=256)
ON_GPU = Problem(vocab=151936, hidden=1024, layers=12, completions=32, longest=1024)
SMOLLM2 = Problem(
    vocab=49152,
    hidden=576,
    layers=30,
    completions=8,
    longest=612,  # 2,050 tokens in sum
    config={
        "model_type": "llama",
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    },
    gradient_checkpointing=True,
)
SMALL = Problem(vocab=500, hidden=32, layers=2, completions=8, longest=24)
ROUNDS = 2
OURS, COMPACT = "fused-grpo trainer", "TRL, completions scored"
MAKERS: dict[str, Callable[..., TrainingStep]] = {
    OURS: training_step.ours,
    "TRL, fused-grpo ops": functools.partial(training_step.trl, fused=True),
    COMPACT: functools.partial(training_step.trl, compact=True),
    "TRL": training_step.trl,
}
if not torch.cuda.is_available():
    MAKERS["Liger's loss"] = training_step.liger
DAPO, LONG = "training phase, dapo", "training phase, SmolLM2's shape, 2,050 tokens"
WHOLE_STEPS = (OURS, "TRL")

pytestmark = pytest.mark.trainer


@pytest.fixture(scope="session")
def problem(pytestconfig: pytest.Config) -> Problem:
    full = ON_GPU if torch.cuda.is_available() else FULL
    return SMALL if pytestconfig.getoption("--tiny") else full


class Phase:
    """The training phase of one loss type, measured on first use."""

    def __init__(self, problem: Problem, small: Problem) -> None:
        self.problem, self.small, self.tokens = problem, small, sum(sample.num_own for sample in problem.batch())

    @functools.cached_property
    def seconds(self) -> dict[str, list[float]]:
        return {name: [seconds for seconds, _ in steps] for name, steps in self._measured.items()}

    @property
    def bytes(self) -> dict[str, int]:
        """The most bytes of a step beside weights and optimizer state, gradients included."""
        return {name: max(size for _, size in steps) for name, steps in self._measured.items()}

    @functools.cached_property
    def _measured(self) -> dict[str, list[tuple[float, int]]]:
        if not torch.cuda.is_available():
            check_that_steps_agree(self.small)
        names, steps = list(MAKERS), {name: list[tuple[float, int]]() for name in MAKERS}
        for number in range(ROUNDS):
            for name in names[number:] + names[:number]:
                steps[name].append(measured_step(MAKERS[name], self.problem))
                gc.collect()
        return steps


def measured_step(make: Callable[..., TrainingStep], problem: Problem) -> tuple[float, int]:
    """Seconds and bytes of a step. Its trainer is made for it: five of a real model do not fit beside each other."""
    trainer = make(problem, learning_rate=0.0)
    if torch.cuda.is_available():
        trainer.step()  # bytes of a first step would have workspaces in them
    size = allocations_of(trainer.step, "cuda" if torch.cuda.is_available() else "cpu").peak
    return interleaved_seconds({"": trainer.step}, rounds=1)[""][0], size


@pytest.fixture(scope="session")
def phases(problem: Problem) -> dict[str, Phase]:
    small = replace(SMOLLM2, vocab=500, hidden=36, layers=2, longest=24)
    return {DAPO: Phase(problem, SMALL), LONG: Phase(small if problem is SMALL else SMOLLM2, small)}


@pytest.mark.parametrize("trainer", MAKERS)
@pytest.mark.parametrize("name", [DAPO, pytest.param(LONG, marks=pytest.mark.long)])
def test_training_phase(benchmark: Any, replay: Any, phases: dict[str, Phase], name: str, trainer: str) -> None:
    benchmark.group, phase = name, phases[name]
    replay.into(benchmark, phase.seconds[trainer])
    median = statistics.median(phase.seconds[trainer])
    benchmark.extra_info |= {
        "implementation": trainer,
        "completion_tokens_per_second": phase.tokens / median,
        "peak_bytes": phase.bytes[trainer],
        **described(phase.problem),
    }


@pytest.mark.parametrize("what", ["seconds", "bytes"])
@pytest.mark.parametrize("trainer", ["TRL", COMPACT])
def test_promise_of_the_training_phase(figures: Any, phases: dict[str, Phase], trainer: str, what: str) -> None:
    """Twice as fast as TRL on the CPU, in no more memory."""
    phase = phases[DAPO]
    if phase.problem is not FULL:
        pytest.skip("promised of a CPU, at full size")
    over, under, bound = (trainer, OURS, ">= 2.0") if what == "seconds" else (OURS, trainer, "<= 1.0")
    value = quotient(phase.seconds, over, under) if what == "seconds" else phase.bytes[over] / phase.bytes[under]
    figures.promise(f"training phase: {what} of {over} / {under}", DAPO, value, bound)


@pytest.fixture(scope="session")
def steps(problem: Problem) -> dict[str, list[float]]:
    """Seconds of the steps of each trainer's `train()`, with given completions."""
    makers = dict(zip(WHOLE_STEPS, (training_step.our_trainer, training_step.trl_trainer), strict=True))
    trainers = {name: SteppedTrainer(problem, make) for name, make in makers.items()}
    actions = {name: trainer.step for name, trainer in trainers.items()}
    interleaved_seconds(actions, rounds=1)
    seconds = interleaved_seconds(actions, rounds=2)
    for trainer in trainers.values():
        trainer.stop()
    return seconds


@pytest.mark.parametrize("trainer", WHOLE_STEPS)
def test_whole_steps(benchmark: Any, replay: Any, steps: Any, problem: Problem, trainer: str) -> None:
    benchmark.group = "whole steps, given completions"
    replay.into(benchmark, steps[trainer])
    benchmark.extra_info |= {"implementation": trainer, **described(problem)}


def check_that_steps_agree(small: Problem) -> None:
    """Compare the gradients of each parameter, relative to their norm, and the parameters afterwards."""
    training_steps = {name: make(small, learning_rate=1e-3) for name, make in MAKERS.items()}
    gradients = {name: trainer.gradients() for name, trainer in training_steps.items()}
    for name in training_steps.keys() - {OURS}:
        peer_state, whole = training_steps[name].model.state_dict(), norm(gradients[name].values())
        for key, parameter in training_steps[OURS].model.state_dict().items():
            torch.testing.assert_close(parameter, peer_state[key], rtol=1e-4, atol=1e-4)
        for key in gradients[OURS]:  # a tied head has none of its own
            gradient, other = gradients[OURS][key], gradients[name][key]
            # Relative to its own norm; the norm of a key's bias is zero but for rounding.
            assert norm([gradient - other]) <= 1e-4 * max(norm([other]), 1e-2 * whole), (name, key)


def norm(tensors: Any) -> float:
    return float(torch.stack([tensor.norm() for tensor in tensors]).norm())


def described(problem: Problem) -> dict[str, Any]:
    lengths = [sample.num_own for sample in problem.batch()]
    dtype = "bfloat16 autocast" if torch.cuda.is_available() else "float32"
    return {**vars(problem), "completion_lengths": lengths, "threads": torch.get_num_threads(), "dtype": dtype}
