"""A head that is sharded along the vocabulary, as in tensor parallelism.

Rank r of the group holds rows [V_0 + .. + V_(r-1), ..) of the whole weight; shards may have any sizes. Each rank
reduces its shard to four numbers per row. After an all-gather of these, all ranks merge the same parts in the same
order, and the gradients of a shard need only the merged statistics. Hidden states are the same on every rank, so dH is
a sum over ranks: one all-reduce at the end, in fp32.

Collectives: the sizes of the shards, the statistics (of log-probs once, of a loss once per chunk), dH. They are called
for all shapes (also for empty shards and no rows), and their number depends only on what every rank knows, so no rank
waits for a collective that another rank skips.

`Shards` is what a loss needs of it; `vocab_parallel_logprobs` is the log-prob op.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fused_grpo._maths.statistics import RowState, Statistics, Upstream, no_columns
from fused_grpo.errors import InputError, UnsupportedError
from fused_grpo.head import logprob_plans, several_targets
from fused_grpo.head.checks import differentiated_once, save_for_backward, saved_tensors
from fused_grpo.head.head import Head, Wanted, local_targets
from fused_grpo.passes import choice
from fused_grpo.passes.protocol import RowPasses


class Shards(NamedTuple):
    """The ranks of a group that share a head, and the rows of the weight on each rank."""

    group: Any
    sizes: list[int]

    def local_head(self, head: Head) -> Head:
        """The head with its targets, in [0, V), relative to this rank's shard."""
        start = sum(self.sizes[: dist.get_rank(self.group)])
        return replace(head, targets=local_targets(head.targets, slice(start, start + len(head.weight))))

    def gather(self, state: RowState) -> list[RowState]:
        """The states of the rows from all ranks, bitwise the same on each rank. A collective."""
        several, count = state.target_logit.ndim == 2, len(self.sizes)
        own_numbers = torch.cat([torch.stack(state[:3]), torch.atleast_2d(state.target_logit.t())])
        parts = own_numbers.new_empty((count * len(own_numbers), own_numbers.shape[1]))
        gather_into(parts, own_numbers, self.group)
        rank_states = parts.view(count, *own_numbers.shape)
        return [RowState(x[0], x[1], x[2], x[3:].t() if several else x[3]) for x in rank_states]

    def sum_over_ranks(self, d_hidden: Tensor) -> Tensor:
        """dH as the sum of the parts of all shards, in place. A collective."""
        dist.all_reduce(d_hidden, group=self.group)
        return d_hidden


def shards_of(head: Head, group: Any, *, impl: str, **same: int) -> Shards:
    """The shards of this head. A collective.

    Raises:
        InputError: tokens, features, `requires_grad` of hidden, or one of `same`, differ between ranks: some ranks
            would wait for others.
        UnsupportedError: impl="reference", which needs the whole weight.
    """
    if impl == "reference":
        raise UnsupportedError("got impl='reference' with a process_group; fix: gather the weight and leave the group")
    count, features = head.hidden.shape
    same |= {"tokens": count, "D": features, "requires_grad of hidden": Wanted.of(head).hidden}
    own_numbers = torch.tensor([len(head.weight), *same.values()], device=head.hidden.device)
    all_numbers = own_numbers.new_empty(dist.get_world_size(group) * len(own_numbers))
    gather_into(all_numbers, own_numbers, group)
    sizes, *rank_values = all_numbers.view(-1, len(own_numbers)).t().tolist()
    for name, values in zip(same, rank_values, strict=True):
        if len(set(values)) > 1:
            raise InputError(
                f"got {name} = {values} on the ranks of the process_group, want one number; "
                "fix: pass every rank the same, but for its own rows of weight and bias"
            )
    return Shards(group, sizes)


def gather_into(out: Tensor, own_numbers: Tensor, group: Any) -> None:
    """The `own_numbers` of every rank, concatenated along the first dimension in rank order."""
    # torch 2.13 renamed it and warns under the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, own_numbers, group=group)


def vocab_parallel_logprobs(
    head: Head, group: Any, options: logprob_plans.Options, *, ignore_index: int, impl: str
) -> tuple[Tensor, Tensor]:
    """(log p [N] or [N, K], entropy [N]) of `head` whose weight and bias are this rank's shard."""
    shards = shards_of(head, group, impl=impl)
    passes = choice.passes(choice.choose(impl, head.hidden))
    kept, head = head.without_ignored(passes, ignore_index, vocab_size=sum(shards.sizes))
    head = shards.local_head(head)
    tensors = head.hidden, head.weight, head.bias
    logprobs, entropies = _VocabParallel.apply(*tensors, head, shards, passes, options)  # type: ignore[no-untyped-call]
    return torch.where(kept, logprobs, 0.0), torch.where(several_targets.rows_with(kept), entropies, 0.0)


class _VocabParallel(torch.autograd.Function):
    """(log p, entropy), each [N]; the backward pass recomputes the shard's logits tile by tile."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        shards: Shards,
        passes: RowPasses,
        options: logprob_plans.Options,
    ) -> tuple[Tensor, Tensor]:
        wanted = Wanted(*ctx.needs_input_grad[:3])
        if len(weight):
            state = logprob_plans.fold(head, passes, options._replace(wanted=wanted))
        else:
            state = no_columns(head.targets, head.dtype)
        statistics = several_targets.finish_rows(shards.gather(state), passes, entropy=options.entropy)
        ctx.plan = (passes, shards, wanted, options.chunk_bytes, head.logit_scale, head.softcap)
        save_for_backward(ctx, (hidden, weight, bias, head.targets, head.temperature), *statistics)
        ctx.set_materialize_grads(False)
        entropy = statistics.entropy
        return statistics.logprobs, torch.zeros_like(statistics.shift) if entropy is None else entropy

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature, *statistics = saved_tensors(ctx)
        passes, shards, wanted, chunk_bytes, logit_scale, softcap = ctx.plan
        head = Head(hidden, weight, bias, targets, temperature, logit_scale, softcap)
        grad_logprobs = torch.zeros_like(targets, dtype=head.dtype) if grad_logprobs is None else grad_logprobs
        d_hidden, d_weight, d_bias = logprob_plans.backward(
            head,
            passes,
            Statistics(*statistics),
            Upstream(grad_logprobs, grad_entropy),
            wanted,
            chunk_bytes=chunk_bytes,
            hidden_dtype=head.dtype,
        )
        if d_hidden is not None:
            d_hidden = shards.sum_over_ranks(d_hidden).to(hidden.dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None
