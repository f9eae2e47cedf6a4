"""Log-probs under a head that is sharded along the vocabulary, as tensor parallelism leaves it.

Rank r of the group holds rows [V_0 + .. + V_(r-1), ..) of the whole weight, in shards of any sizes. Each rank folds its
own shard into four numbers per row, one all-gather of these lets all of them merge the same parts in the same order,
and the backward pass of a shard needs nothing but the merged statistics. Hidden states are the same on every rank, so
dH is a sum over ranks: one all-reduce at the end, in fp32, never inside a loop whose length may differ.

Collectives: the sizes of the shards and the statistics in the forward pass, dH in the backward pass. They take place
whatever the shapes (empty shards, no rows), so no rank waits for one that another skipped.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fused_grpo import _impl, plans
from fused_grpo._checks import check_targets, check_temperature_values
from fused_grpo.errors import UnsupportedError
from fused_grpo.head import Head, local_targets
from fused_grpo.statistics import RowState, merge_rows, start_rows


def vocab_parallel_logprobs(
    head: Head,
    group: Any,
    *,
    ignore_index: int,
    impl: str,
    chunk_bytes: int | None,
    batch_invariant: bool,
    entropy: bool,
) -> tuple[Tensor, Tensor]:
    """(log p, entropy), each [N], of `head` whose weight and bias are this rank's shard; targets are global.

    Raises:
        InputError: a target outside the whole vocabulary, on every rank alike.
        UnsupportedError: impl="reference", which has the whole weight by definition.
    """
    if impl == "reference":
        raise UnsupportedError("got impl='reference' with a process_group; fix: gather the weight and leave the group")
    sizes = shard_sizes(head.weight, group)
    check_targets(head.targets, sum(sizes), ignore_index)
    check_temperature_values(head.temperature)
    start = sum(sizes[: dist.get_rank(group)])
    kept = head.targets != ignore_index
    columns = slice(start, start + len(head.weight))
    head = replace(head, targets=local_targets(torch.where(kept, head.targets, 0), columns))
    options = {"entropy": entropy, "chunk_bytes": chunk_bytes, "batch_invariant": batch_invariant}
    inputs = (head.hidden, head.weight, head.bias, head, group, _impl.passes(_impl.choose(impl, head.hidden)), options)
    logprobs, entropies = _VocabParallel.apply(*inputs)  # type: ignore[no-untyped-call]
    return tuple(torch.where(kept, value, 0.0) for value in (logprobs, entropies))  # type: ignore[return-value]


def gather_into(out: Tensor, mine: Tensor, group: Any) -> None:
    """Every rank's `mine`, one after the other along the first dimension, in rank order."""
    # torch 2.13 renamed it and warns under the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, mine, group=group)


def shard_sizes(weight: Tensor, group: Any) -> list[int]:
    """Rows of the weight on each rank of the group."""
    mine = torch.tensor([len(weight)], device=weight.device)
    everyones = mine.new_empty(dist.get_world_size(group))
    gather_into(everyones, mine, group)
    sizes: list[int] = everyones.tolist()
    return sizes


class _VocabParallel(torch.autograd.Function):
    """(log p, entropy), each [N]; the backward pass recomputes the shard's logits tile by tile."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        group: Any,
        passes: ModuleType,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        rows, needs = len(head.targets), dict(zip(("hidden", "weight", "bias"), ctx.needs_input_grad, strict=False))
        if len(weight):
            own = torch.stack(plans.fold(head, passes, **options, wanted=needs if any(needs.values()) else None))
        else:
            own = torch.stack(start_rows(rows, dtype=head.dtype, device=hidden.device))
        parts = own.new_empty((dist.get_world_size(group) * len(own), rows))
        gather_into(parts, own, group)
        statistics = plans.finish(merge_rows(RowState(*parts.view(-1, len(own), rows).unbind(1))), entropy=True)
        ctx.needs, ctx.plan = needs, (passes, group, options["chunk_bytes"], head.logit_scale, head.softcap)
        ctx.save_for_backward(hidden, weight, bias, head.targets, head.temperature, *statistics)
        ctx.set_materialize_grads(False)
        assert statistics.entropy is not None
        return statistics.logprobs, statistics.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature, *statistics = ctx.saved_tensors
        passes, group, chunk_bytes, logit_scale, softcap = ctx.plan
        head = Head(hidden, weight, bias, targets, temperature, logit_scale, softcap)
        d_hidden, d_weight, d_bias = plans.backward(
            head,
            passes,
            plans.Statistics(*statistics),
            grad_logprobs=torch.zeros_like(targets, dtype=head.dtype) if grad_logprobs is None else grad_logprobs,
            grad_entropy=grad_entropy,
            wanted=ctx.needs,
            chunk_bytes=chunk_bytes,
            hidden_dtype=head.dtype,
        )
        if d_hidden is not None:
            dist.all_reduce(d_hidden, group=group)
            d_hidden = d_hidden.to(hidden.dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None
