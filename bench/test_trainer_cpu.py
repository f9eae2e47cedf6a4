"""The training phase, from scored rollouts to moved weights, on the CPU in fp32: against TRL's trainer, taking turns.

    pytest bench/test_trainer_cpu.py --benchmark-json FILE

Same model, same rollouts, same AdamW, no gradient checkpointing on either side. Completions are of uneven length, as
sampled ones are; neither trainer is told more than the other. Before anything is timed the gradients of a step, and the
parameters after it, have to agree. The learning rate is 0 while the clock runs: all the work, and every turn the same.

What comes out has two parts, and says so: `trl` is what its users have on a CPU, where it scores every position;
`trl, completions scored` is TRL with the positions that it scores where it has Triton. Neither says anything of a GPU.
The last test counts bytes, not seconds. With `--benchmark-disable` all of this runs once, at a small size.

On a machine with other work threads wait for each other, and most where operations are small: look at `spread` before
believing a ratio, or run with OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import trainer_peers
import whole_steps
from test_loss_cpu import allocations, check_ratios, quotient
from trainer_peers import Contender, Problem
from turns import summary, take_turns

FULL = Problem(vocab=32000, hidden=256, layers=4, completions=16, longest=256)
SMALL = Problem(vocab=500, hidden=32, layers=2, completions=8, longest=24)
ROUNDS = 5
LEAST = {"trl/ours": 2.0, "trl, completions scored/ours": 2.0}
LEAST_OF_WHOLE_STEPS = {"trl/ours": 1.0}
MOST_BYTES = {"ours/trl": 1.0, "ours/trl, completions scored": 1.0}


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_training_phase(benchmark, loss_type):
    check_that_steps_agree(loss_type)
    problem = SMALL if benchmark.disabled else FULL
    contenders = contenders_of(problem, loss_type, learning_rate=0.0)
    for contender in contenders.values():
        contender.step()
    if benchmark.disabled:
        benchmark(contenders["ours"].step)
        return
    turns = {name: contender.step for name, contender in contenders.items()}
    seconds = take_turns(benchmark, turns, timed="ours", rounds=ROUNDS)
    figures = summary(seconds)
    ratios = {ratio: quotient(figures["median_seconds"], ratio) for ratio in LEAST}
    tokens = sum(map(len, problem.batch().completion_ids))
    speeds = {name: tokens / median for name, median in figures["median_seconds"].items()}
    benchmark.extra_info |= {**described(problem), "loss_type": loss_type, "completion_tokens_per_second": speeds}
    benchmark.extra_info |= {**ratios, **figures, "seconds": seconds}
    print("", ratios, speeds, figures, sep="\n")
    check_ratios(ratios, least=LEAST)


def test_whole_steps_of_both_loops(benchmark):
    """Each in its own `train()`, from completions that are given to the next question for some."""
    problem = SMALL if benchmark.disabled else FULL
    makers = {"ours": whole_steps.ours, "trl": whole_steps.trl}
    trainers = {name: whole_steps.SteppedTrainer(problem, make) for name, make in makers.items()}
    for trainer in trainers.values():
        trainer.step()
    if benchmark.disabled:
        benchmark(trainers["ours"].step)
    else:
        turns = {name: trainer.step for name, trainer in trainers.items()}
        figures = summary(take_turns(benchmark, turns, timed="ours", rounds=ROUNDS))
        ratios = {ratio: quotient(figures["median_seconds"], ratio) for ratio in LEAST_OF_WHOLE_STEPS}
        benchmark.extra_info |= {**described(problem), **ratios, **figures}
        print("", ratios, figures, sep="\n")
        check_ratios(ratios, least=LEAST_OF_WHOLE_STEPS)
    for trainer in trainers.values():
        trainer.stop()


def test_peak_memory_of_the_training_phase(benchmark):
    """What a step allocates at a time on top of weights and optimizer state; its gradients are among it."""
    problem, peaks = SMALL if benchmark.disabled else FULL, {}

    def measure() -> None:
        for name, contender in contenders_of(problem, "dapo", learning_rate=0.0).items():
            contender.step()
            peaks[name] = allocations()(contender.step)

    benchmark.pedantic(measure, rounds=1)
    ratios = {name: quotient(peaks, name) for name in MOST_BYTES}
    benchmark.extra_info |= {**described(problem), "peak_bytes": peaks, **ratios}
    benchmark.extra_info["note"] = "the time is that of counting allocations: no measure of speed"
    print("", ratios, peaks, sep="\n")
    check_ratios(ratios, most=MOST_BYTES)


def contenders_of(problem: Problem, loss_type: str, *, learning_rate: float) -> dict[str, Contender]:
    """Everyone with one micro-batch for the whole step."""
    options: dict[str, Any] = {"loss_type": loss_type, "learning_rate": learning_rate}
    options["micro_batch"] = problem.completions
    return {
        "ours": trainer_peers.ours(problem, **options),
        "trl": trainer_peers.trl(problem, **options),
        "trl, completions scored": trainer_peers.trl(problem, **options, compact=True),
    }


def check_that_steps_agree(loss_type: str) -> None:
    """Gradients of each parameter, relative to their norm, and what the parameters are afterwards."""
    contenders = contenders_of(SMALL, loss_type, learning_rate=1e-3)
    gradients = {name: contender.gradients() for name, contender in contenders.items()}
    for name in contenders.keys() - {"ours"}:
        theirs, whole = contenders[name].model.state_dict(), norm(gradients[name].values())
        for key, mine in contenders["ours"].model.state_dict().items():
            torch.testing.assert_close(mine, theirs[key], rtol=1e-4, atol=1e-4)
            gradient, other = gradients["ours"][key], gradients[name][key]
            # Relative to its own norm; that of a key's bias is zero but for rounding.
            assert norm([gradient - other]) <= 1e-4 * max(norm([other]), 1e-2 * whole), (name, key)


def norm(tensors: Any) -> float:
    return torch.stack([tensor.norm() for tensor in tensors]).norm().item()


def described(problem: Problem) -> dict[str, Any]:
    lengths = [len(ids) for ids in problem.batch().completion_ids]
    shares = {"completion_lengths": lengths, "mean_of_longest": sum(lengths) / len(lengths) / max(lengths)}
    threads = {"threads": torch.get_num_threads(), "omp_num_threads": os.environ.get("OMP_NUM_THREADS")}
    return {**vars(problem), **shares, **threads, "dtype": "float32"}
