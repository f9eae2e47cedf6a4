"""Whole trainers on a GPU: `python -m fused_grpo.bench.gpu.training PART [--tiny]`.

Prints a line of JSON for each figure as soon as it is measured. Models are of the shapes of Qwen3 with random weights,
in bf16 autocast with gradient checkpointing; rollouts are fixed, their lengths uneven. Needs trl and datasets beside
what the trainer needs. `--tiny` is for a machine without a GPU: every part runs in seconds.

    phase      from scored rollouts to updated weights: ours, TRL's with our ops, TRL's, interleaved
    longest    the longest completions that each trainer fits in 24 GiB, between bounds that get closer
    published  ours at the sizes for which prime-rl publishes figures of one H100: tokens a second, prompts counted, and
               all memory, weights and optimizer included
"""

from __future__ import annotations

import argparse
import functools
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from fused_grpo.bench.gpu.clock import Figure, figure_of
from fused_grpo.bench.gpu.scale import GIB
from fused_grpo.bench.interleaved import quotient
from fused_grpo.bench.memory import allocations_of
from fused_grpo.bench.trainers import training_step
from fused_grpo.bench.trainers.training_step import Problem, TrainingStep

# Rounds of a comparison: at least the first number, at most the second, and no more after so many seconds.
FEWEST, MOST, SECONDS = 2, 5, 25.0
PROMISED, PROMISED_LENGTH = ">= 1.4", ">= 1.5"
# In all of an H200 a step with the longest completions takes minutes, nearly all of it attention. No try begins after
# so many seconds, nor where the bounds are so near.
ROOM, PATIENCE, NEAR = 24 * GIB, 110.0, 1.05
OURS, FUSED, TRL = "fused-grpo trainer", "TRL, fused-grpo ops", "TRL"


def qwen3(hidden: int, layers: int, intermediate: int, heads: int, *, longest: int, completions: int = 8) -> Problem:
    more: dict[str, Any] = {"model_type": "qwen3", "intermediate_size": intermediate, "num_attention_heads": heads}
    more |= {"num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True, "max_position_embeddings": 2**20}
    sizes = {"vocab": 151936, "hidden": hidden, "layers": layers, "completions": completions, "longest": longest}
    return Problem(**sizes, config=more, gradient_checkpointing=True)


FULL = {
    "Qwen3-0.6B": qwen3(1024, 28, 3072, 16, longest=8192),
    "Qwen3-1.7B": qwen3(2048, 28, 6144, 16, longest=8192),
}
# Eight completions have 3.2 times as many tokens as the longest one: about 16,384 and 65,536 in sum.
PUBLISHED = [
    (name, replace(problem, longest=longest), rank)
    for name, problem, rank in (
        ("Qwen3-0.6B", FULL["Qwen3-0.6B"], None),
        ("Qwen3-4B, LoRA", qwen3(2560, 36, 9728, 32, longest=8192), 16),
    )
    for longest in (5120, 20480)
]
SMALL, TINY_ROOM = replace(qwen3(32, 2, 64, 8, longest=24), vocab=500), 2**24


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--tiny", action="store_true", help="small sizes, on a CPU")
    given = parser.parse_args(arguments)
    for figure in PARTS[given.part](tiny=given.tiny):
        print(figure.line(), flush=True)


def makers() -> dict[str, Callable[[Problem], TrainingStep]]:
    """TRL scores the completion tokens alone where it has Triton, so `compact` changes nothing on a GPU."""
    return {
        OURS: functools.partial(training_step.ours, learning_rate=0.0),
        TRL: functools.partial(training_step.trl, learning_rate=0.0, compact=True),
        FUSED: functools.partial(training_step.trl, learning_rate=0.0, fused=True),
    }


def phase(*, tiny: bool) -> Iterator[Figure]:
    """Tokens of completions a second, and bytes beside weights and optimizer state, gradients included.

    After each step the figures of all steps until then, the first ones left out, which compile and make the optimizer's
    state: the last figures are those that count.
    """
    for name, problem in {"tiny": SMALL}.items() if tiny else FULL.items():
        try:
            yield from compared(name, problem, rounds=FEWEST if tiny else MOST)
        except torch.OutOfMemoryError:
            figure = figure_of("training phase", None, "tokens/s", None, **shape_of(name, problem))
            yield replace(figure, note="absent: out of memory with three trainers at a time")
        release()


def compared(name: str, problem: Problem, *, rounds: int) -> Iterator[Figure]:
    tokens, shape = sum(sample.num_own for sample in problem.batch()), shape_of(name, problem)
    steps: dict[str, Callable[[], object]] = {}
    for trainer, make in makers().items():
        start = time.perf_counter()
        steps[trainer] = make(problem).step
        steps[trainer]()
        yield figure_of(f"made, and a first step: {trainer}", time.perf_counter() - start, "s", None, **shape)
    seconds: dict[str, list[float]] = {trainer: [] for trainer in steps}
    start, names = time.perf_counter(), [*steps]
    for number in range(rounds):
        if number >= FEWEST and time.perf_counter() - start > SECONDS:
            break
        for trainer in names[number % 3 :] + names[: number % 3]:
            before = time.perf_counter()
            peak = allocations_of(steps[trainer], device()).peak  # which waits for the device
            seconds[trainer].append(time.perf_counter() - before)
            figure = figure_of(f"a step: {trainer}", statistics.median(seconds[trainer]), "s", None, **shape)
            yield replace(figure, rounds=tuple(seconds[trainer]))
            rate = tokens / statistics.median(seconds[trainer])
            yield figure_of(f"training phase: {trainer}", rate, "tokens/s", None, **shape)
            yield figure_of(f"training phase: {trainer}, peak", peak / GIB, "GiB", None, **shape)
        for over in (TRL, FUSED):
            figure = figure_of(f"training phase: ours over {over}", quotient(seconds, over, OURS), "x", None, **shape)
            yield replace(figure, promised=PROMISED if over == TRL else None)


def longest(*, tiny: bool) -> Iterator[Figure]:
    """The longest completion, with four in the batch: doubled while it fits, then between what fits and what does not.

    Trainers alternate, and each bound is a figure at once: a run that is ended leaves bounds of both. So is the lower
    bound of their ratio.
    """
    name, problem, room = ("tiny", SMALL, TINY_ROOM) if tiny else ("Qwen3-0.6B", FULL["Qwen3-0.6B"], ROOM)
    problem = replace(problem, completions=4)
    shape = shape_of(name, problem, longest=None, GiB=room / GIB)
    fits, fails = dict.fromkeys((OURS, TRL), 0), dict.fromkeys((OURS, TRL), math.inf)
    end, open_ = time.perf_counter() + PATIENCE, [OURS, TRL]
    while open_:
        for trainer in open_:
            if time.perf_counter() > end:
                return
            length = problem.longest
            if fits[trainer] or fails[trainer] < math.inf:
                low, high = max(fits[trainer], 1), fails[trainer]
                length = 2 * low if high == math.inf else round((low * high) ** 0.5)
            if succeeds(makers()[trainer], replace(problem, longest=length), room):
                fits[trainer] = length
                yield figure_of(f"longest completion: {trainer}", length, "tokens", None, **shape)
            else:
                fails[trainer] = length
                yield figure_of(f"longest completion: {trainer}, less than", length, "tokens", None, **shape)
            if fits[OURS] and fails[TRL] < math.inf:
                ratio, label = fits[OURS] / fails[TRL], "longest completion: ours over TRL, at least"
                yield replace(figure_of(label, ratio, "x", None, **shape), promised=PROMISED_LENGTH)
        open_ = [trainer for trainer in open_ if fails[trainer] > NEAR * fits[trainer] + 1]


def succeeds(make: Callable[[Problem], TrainingStep], problem: Problem, room: int) -> bool:
    """Whether so many bytes suffice for a trainer and a step."""
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(min(1.0, room / torch.cuda.mem_get_info()[1]))
    try:
        return allocations_of(lambda: make(problem).step(), device()).peak <= room
    except torch.OutOfMemoryError:
        return False
    finally:
        release()


def published(*, tiny: bool) -> Iterator[Figure]:
    for name, problem, rank in [("tiny, LoRA", SMALL, 4)] if tiny else PUBLISHED:
        given: dict[str, Any] = {}
        if rank is not None:
            from peft import LoraConfig

            given["peft_config"] = LoraConfig(r=rank, target_modules="all-linear")
        release()
        step = training_step.ours(problem, learning_rate=0.0, **given).step
        tokens = sum(len(sample.prompt_ids + sample.completion_ids) for sample in problem.batch())
        shape = shape_of(name, problem, tokens=tokens, rank=rank)
        seconds = []
        for _ in range(1 if tiny else 3):
            start = time.perf_counter()
            step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        yield figure_of("training phase", tokens / statistics.median(seconds[1:] or seconds), "tokens/s", None, **shape)
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        yield figure_of("training phase: all memory", peak / GIB, "GiB", None, **shape)
        del step


def shape_of(name: str, problem: Problem, **more: Any) -> dict[str, Any]:
    return {"model": name, "completions": problem.completions, "longest": problem.longest, **more}


def release() -> None:
    """Free what the last trainer held, and count the peak anew."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


PARTS: dict[str, Callable[..., Iterator[Figure]]] = {part.__name__: part for part in (phase, longest, published)}

if __name__ == "__main__":
    main()
