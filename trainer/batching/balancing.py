"""Sequences of an optimizer step are reassigned to the ranks, so that no rank waits for the one with the longest.

Completions differ in length by an order of magnitude, and every rank waits for the slowest in each step. Advantages are
known by then and the loss is normalised over all ranks, so the update does not depend on which rank learns from a
sequence. Each rank gets as many sequences as it had (one more or less where they do not divide evenly) at nearly equal
cost, by the rule "longest processing time first": the costliest sequence goes to the rank with the least work.
Sequences that are not in the forward pass cost nothing, and are assigned last.

The price is that token ids and log-probs of the whole batch go to every rank once per generation: 16 bytes a token.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from accelerate import Accelerator
from accelerate.utils import gather_object

from fused_grpo.trainer.batching.rollout_buffer import batch_as_tensors, batch_from_tensors
from fused_grpo.trainer.types import EffectiveBatch


def balanced(batch: EffectiveBatch, accelerator: Accelerator, *, attention: float = 0.0) -> EffectiveBatch:
    """This rank's share of the sequences of all ranks' batches. A collective: every rank must call it.

    Args:
        attention: the cost of attending to one token, in units of a token's cost in the rest of a layer.
    """
    if accelerator.num_processes == 1:
        return batch
    parts = [batch_from_tensors(tensors) for tensors in gather_object([batch_as_tensors(batch)])]
    whole = EffectiveBatch.joined(parts)
    lengths = [len(p) + len(c) for p, c in zip(whole.prompt_ids, whole.completion_ids, strict=True)]
    costs = [length * (1 + attention * length / 2) for length in lengths]
    costs = [cost if counts else 0.0 for cost, counts in zip(costs, whole.in_forward.tolist(), strict=True)]
    return whole.take(sorted(assignments(costs, accelerator.num_processes)[accelerator.process_index]))


def assignments(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Indices for each rank: equally many of them, and of those that cost something, within one, and nearly equal sums
    of costs."""
    costly = [index for index, cost in enumerate(costs) if cost]
    most = -(-len(costly) // ranks)
    assigned = [list[int]() for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    for index in sorted(costly, key=lambda index: -costs[index]):
        load, rank = heapq.heappop(loads)
        assigned[rank].append(index)
        if len(assigned[rank]) < most:
            heapq.heappush(loads, (load + costs[index], rank))
    for index in sorted(set(range(len(costs))) - set(costly)):
        min(assigned, key=len).append(index)
    return assigned
