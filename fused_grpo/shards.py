"""A head that is sharded along the vocabulary, as tensor parallelism leaves it: who has which columns.

Rank r of the group holds rows [V_0 + .. + V_(r-1), ..) of the whole weight, in shards of any sizes. Each rank folds its
own shard into four numbers per row, an all-gather of these lets all of them merge the same parts in the same order, and
the gradients of a shard need nothing but the merged statistics. Hidden states are the same on every rank, so dH is a
sum over ranks: one all-reduce at the end, in fp32.

Collectives: the sizes of the shards, the statistics (of log-probs all at once, of a loss once per chunk), dH. They take
place whatever the shapes (empty shards, no rows), and how many there are depends only on what every rank knows, so no
rank waits for one that another skipped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fused_grpo._checks import check_targets, check_temperature_values
from fused_grpo.errors import InputError, UnsupportedError
from fused_grpo.head import Head, asks_gradient, local_targets
from fused_grpo.statistics import RowState


class Shards(NamedTuple):
    """Who has the head: the ranks of a group, and how many rows of the weight each of them holds."""

    group: Any
    sizes: list[int]

    def own(self, head: Head) -> Head:
        """The head with its targets, in [0, V), relative to this rank's shard."""
        start = sum(self.sizes[: dist.get_rank(self.group)])
        return replace(head, targets=local_targets(head.targets, slice(start, start + len(head.weight))))

    def gather(self, own: RowState) -> list[RowState]:
        """Each rank's own state of the rows, the same on all of them to the bit. A collective."""
        mine, count = torch.stack(own), len(self.sizes)
        parts = mine.new_empty((count * len(mine), mine.shape[1]))
        gather_into(parts, mine, self.group)
        return [RowState(*part) for part in parts.view(count, *mine.shape)]

    def add_up(self, d_hidden: Tensor) -> Tensor:
        """dH from what each shard has to add, in place. A collective."""
        dist.all_reduce(d_hidden, group=self.group)
        return d_hidden


def shards_of(head: Head, group: Any, *, ignore_index: int, impl: str, **same: int) -> Shards:
    """Who has the rest of this head; its inputs, whose targets count over the whole of it, are checked. A collective.

    Raises:
        InputError: a target outside the whole vocabulary, on every rank alike; tokens, features, a wish for dH, or one
            of `same`, that are not the same on all ranks: some would wait for others.
        UnsupportedError: impl="reference", which has the whole weight by definition.
    """
    if impl == "reference":
        raise UnsupportedError("got impl='reference' with a process_group; fix: gather the weight and leave the group")
    count, features = head.hidden.shape
    same |= {"tokens": count, "D": features, "requires_grad of hidden": asks_gradient(head.hidden)}
    mine = torch.tensor([len(head.weight), *same.values()], device=head.hidden.device)
    everyones = mine.new_empty(dist.get_world_size(group) * len(mine))
    gather_into(everyones, mine, group)
    sizes, *others = everyones.view(-1, len(mine)).t().tolist()
    for name, values in zip(same, others, strict=True):
        if len(set(values)) > 1:
            raise InputError(
                f"got {name} = {values} on the ranks of the process_group, want one number; "
                "fix: pass every rank the same, but for its own rows of weight and bias"
            )
    check_targets(head.targets, sum(sizes), ignore_index)
    check_temperature_values(head.temperature)
    return Shards(group, sizes)


def gather_into(out: Tensor, mine: Tensor, group: Any) -> None:
    """Every rank's `mine`, one after the other along the first dimension, in rank order."""
    # torch 2.13 renamed it and warns under the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, mine, group=group)
