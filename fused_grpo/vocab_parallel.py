"""Log-probs under a head that is sharded along the vocabulary (`shards.py`), and their gradients."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fused_grpo import _dispatch, logprob_plans, several_targets
from fused_grpo._checks import differentiated_once
from fused_grpo.head import Head
from fused_grpo.shards import Shards, shards_of
from fused_grpo.statistics import Statistics, no_columns


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
    """(log p [N] or [N, K], entropy [N]) of `head` whose weight and bias are this rank's shard."""
    shards = shards_of(head, group, impl=impl)
    kept, head = head.without_ignored(ignore_index, vocab_size=sum(shards.sizes))
    head = shards.own(head)
    options = {"entropy": entropy, "chunk_bytes": chunk_bytes, "batch_invariant": batch_invariant}
    passes, tensors = _dispatch.passes(_dispatch.choose(impl, head.hidden)), (head.hidden, head.weight, head.bias)
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
        passes: ModuleType,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        rows, needs = len(head.targets), dict(zip(("hidden", "weight", "bias"), ctx.needs_input_grad, strict=False))
        if len(weight):
            own = logprob_plans.fold(head, passes, **options, wanted=needs if any(needs.values()) else None)
        else:
            own = no_columns(rows, dtype=head.dtype, device=hidden.device)
            own = own._replace(target_logit=own.shift.new_full(head.targets.shape, -torch.inf))
        statistics = several_targets.finish_rows(shards.gather(own), passes, entropy=options["entropy"])
        ctx.needs, ctx.plan = needs, (passes, shards, options["chunk_bytes"], head.logit_scale, head.softcap)
        ctx.save_for_backward(hidden, weight, bias, head.targets, head.temperature, *statistics)
        ctx.set_materialize_grads(False)
        entropy = statistics.entropy
        return statistics.logprobs, torch.zeros_like(statistics.shift) if entropy is None else entropy

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature, *statistics = ctx.saved_tensors
        passes, shards, chunk_bytes, logit_scale, softcap = ctx.plan
        head = Head(hidden, weight, bias, targets, temperature, logit_scale, softcap)
        d_hidden, d_weight, d_bias = logprob_plans.backward(
            head,
            passes,
            Statistics(*statistics),
            grad_logprobs=torch.zeros_like(targets, dtype=head.dtype) if grad_logprobs is None else grad_logprobs,
            grad_entropy=grad_entropy,
            wanted=ctx.needs,
            chunk_bytes=chunk_bytes,
            hidden_dtype=head.dtype,
        )
        if d_hidden is not None:
            d_hidden = shards.sum_over_ranks(d_hidden).to(hidden.dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None
