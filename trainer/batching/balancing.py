"""The sequences of an optimizer step dealt anew among its processes, so that none waits for the one with the longest.

Completions differ in length by an order of magnitude, and every process waits for the slowest in each step. Advantages
are known by then and the loss is normalised over all processes, so it does not matter which of them learns from a
sequence: the update is the same. Each process gets as many sequences as it had (one more or less where they do not
divide), and close to the same cost: the costliest first, each to the process that has least to do.

The price is that token ids and log-probs of the whole batch go to every process once per generation: 16 bytes a token.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from fused_grpo.trainer.batching.rollout_buffer import batch_as_tensors, batch_from_tensors
from fused_grpo.trainer.types import EffectiveBatch


def balanced(batch: EffectiveBatch, accelerator: Accelerator, *, attention: float = 0.0) -> EffectiveBatch:
    """This process' share of the sequences of all processes' batches. Every process has to ask.

    Args:
        attention: what attending to one token costs, in units of a token's way through the rest of a layer.
    """
    if accelerator.num_processes == 1:
        return batch
    whole = join([batch_from_tensors(tensors) for tensors in gather_object([batch_as_tensors(batch)])])
    lengths = [len(p) + len(c) for p, c in zip(whole.prompt_ids, whole.completion_ids, strict=True)]
    costs = [length * (1 + attention * length / 2) for length in lengths]
    return whole.take(sorted(deal(costs, accelerator.num_processes)[accelerator.process_index]))


def deal(costs: Sequence[float], processes: int) -> list[list[int]]:
    """Indices for each process: equally many of them, within one, and nearly equal sums of costs."""
    most = -(-len(costs) // processes)
    hands = [list[int]() for _ in range(processes)]
    loads = [(0.0, process) for process in range(processes)]
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        load, process = heapq.heappop(loads)
        hands[process].append(index)
        if len(hands[process]) < most:
            heapq.heappush(loads, (load + costs[index], process))
    return hands


def join(batches: Sequence[EffectiveBatch]) -> EffectiveBatch:
    """Batches of the same step, one after the other."""

    def lists(name: str) -> Any:
        values = [getattr(batch, name) for batch in batches]
        return None if any(value is None for value in values) else [entry for some in values for entry in some]

    def tensors(name: str) -> Any:
        values = [getattr(batch, name) for batch in batches if getattr(batch, name) is not None]
        return torch.cat(values) if values else None

    names = ("prompt_ids", "completion_ids", "sampling_logprobs", "old_logprobs", "ref_logprobs")
    return EffectiveBatch(
        **{name: lists(name) for name in names},
        advantages=torch.cat([batch.advantages for batch in batches]),
        rewards=tensors("rewards"),
        learns=tensors("learns"),
    )
