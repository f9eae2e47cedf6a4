"""`fused_linear_grpo_loss`: the head and the GRPO loss in one op, with gradients taken in the forward pass.

`chunked_loss.py` has the algorithm; this file has the arguments and autograd. The backward pass only scales the
gradients of the forward pass. So a forward pass under grad also does the work of a backward pass, even if `backward()`
is never called; use `torch.no_grad()` for evaluation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fused_grpo._maths import distributions, factors, formulas
from fused_grpo._maths.formulas import LossInputs
from fused_grpo._maths.moments import score_norms
from fused_grpo._maths.statistics import full_precision
from fused_grpo.config import DEFAULT_LOSS, GRPOLossConfig
from fused_grpo.divergence import Distillation, check_together, reference_divergence, teacher_of
from fused_grpo.head.centering import METRICS, Centering, SamplerHead
from fused_grpo.head.checks import (
    HeadOptions,
    LossArguments,
    check_main_grad,
    check_plan,
    check_squared_gradients,
    checked_config,
    loss_inputs,
    outside_graphs,
)
from fused_grpo.head.chunked_divergence import Teacher, TwoHeads
from fused_grpo.head.chunked_loss import (
    AttachGradients,
    LossPlan,
    Score,
    chunked_loss,
    loss_and_gradient,
)
from fused_grpo.head.entries import Support, kept_mask, support_of
from fused_grpo.head.head import Head, Wanted, flatten_head
from fused_grpo.head.kept_loss import supported_loss
from fused_grpo.head.sharded import shards_of
from fused_grpo.head.visited_rows import Beside
from fused_grpo.loss import GRPOLossOutput
from fused_grpo.passes import choice


@outside_graphs
def fused_linear_grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    advantages: Tensor,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    sampling_logprobs: Tensor | None = None,
    sampling_topk_ids: Tensor | None = None,
    sampling_topk_logprobs: Tensor | None = None,
    entropy_threshold: float | Tensor | None = None,
    num_tokens: float | Tensor | None = None,
    num_sequences: float | Tensor | None = None,
    num_entropy_tokens: float | Tensor | None = None,
    covariance_selected: Tensor | None = None,
    config: GRPOLossConfig | None = None,
    score: Score = "all",
    entropy: bool = True,
    weight_main_grad: Tensor | None = None,
    squared_gradients: Tensor | None = None,
    chunk_bytes: int | None = None,
    process_group: Any = None,
    support: tuple[Tensor, Tensor] | None = None,
    distillation: Distillation | None = None,
    impl: choice.Impl = "auto",
) -> GRPOLossOutput:
    """The GRPO loss of `targets` from hidden states and the head, with gradients for hidden, weight and bias.

    Equals: `logprobs, entropy = linear_logprobs_and_entropy(hidden, weight, targets, ...)`
            `grpo_loss(logprobs, entropy=entropy, advantages=advantages, ...)`

    Args:
        hidden, weight, targets, bias, temperature, logit_scale, softcap, ignore_index, impl: as in `linear_logprobs`.
            Tokens are padded (hidden [B, T, D]) or packed (hidden [N, D] with `cu_seqlens`).
        advantages, mask, cu_seqlens, old_logprobs, ref_logprobs, sampling_logprobs, entropy_threshold, num_tokens,
            num_sequences, num_entropy_tokens, covariance_selected, config: as in `grpo_loss`. Rows whose target is
            `ignore_index` are masked; the targets of others are in [0, V), masked or not.
        sampling_topk_ids: [..., K] int64 or int32, for `config.score_centering`: for each token the sampler's likeliest
            tokens, or all that it kept, each once, in any order; -1 where there are fewer. None with a support.
        sampling_topk_logprobs: [..., K], the sampler's log-probs of these, from the distribution that it drew from;
            NaN where it is not known. With a support, [K], those of its token_ids.
        score: "all" computes the log-prob of every unmasked token and includes it in the metrics. "needed" leaves out
            tokens that cannot have a gradient (zero advantage, with beta = 0, no entropy bonus, log-ratio penalty or
            KL-Cov): they cost nothing, their log-prob is 0, and the metrics leave them out. Loss and gradients are the
            same. Where a quantile or a selection is taken from the tokens of this call, all are computed.
        entropy: whether to compute the entropy for the metric. It is always computed where `config` needs it.
        weight_main_grad: [V, D] fp32, contiguous: the backward pass adds dW to it, unrounded, and `weight` itself gets
            no gradient.
        squared_gradients: the shape of `targets`, fp32 (fp64 for fp64 inputs), where the squared norm of each token's
            d loss / d logits is written, for an upstream gradient of 1: (d loss / d log p)^2 (1 - 2 p + sum_v p_v^2).
            One more read of the logits, no GEMM. What an entropy bonus, score centering and a distillation add is not
            in it. Not with a process_group or a distillation.
        chunk_bytes: budget for the chunk of logits, in bytes. None: 96 MiB on a CPU, up to 4096 rows on a GPU, within
            a 48th of its memory. A chunk has at least one row. With a distillation, see `fused_linear_divergence`.
        process_group: the ranks that hold the head in shards along V, in rank order, of any sizes. All arguments except
            `weight`, `bias` and `weight_main_grad` are the same on all ranks, and `targets` count over the whole
            vocabulary. The results and the gradient of `hidden` are the same on all ranks, too: the forward pass sums
            that gradient over the ranks. Budgets are per rank; the largest shard decides the rows of a chunk.
        support: the kept tokens of each row, as in `linear_logprobs`; of rows that are not scored they are not used.
        distillation: a teacher's hidden states and head. With the weights of the loss type, the loss gets the sum of
            weight * coef * divergence over the unmasked tokens, those with an advantage of 0 too, for one GEMM more
            over the teacher's head; metrics get the mean divergence, "distillation".

    Returns:
        `GRPOLossOutput(loss, metrics, logprobs)`; metrics include `recomputed_fraction`, the share of the scored tokens
        whose logits were recomputed: where the loss of a token depends on other tokens, the tokens with a gradient
        that did not fit the budget; else 0.

    Numerics: as `linear_logprobs`; dW accumulates in fp32 over the chunks. Gradients of 16-bit inputs are rounded to
        their dtype before the upstream gradient arrives: with fp16 hidden states (autocast, too) and a loss scaler,
        small ones are lost; take bf16, or `grpo_loss(linear_logprobs(...))`.
    Memory: the chunk, O(N), the requested gradients and their fp32 accumulators (with a process_group also that of a
        16-bit `hidden`, [N, D]), and a copy of a weight of another dtype than `hidden`. The backward pass gives
        its gradients away without a copy: a second backward pass needs `retain_graph=True` on the first, which costs
        that copy.

    Raises:
        InputError, UnavailableError, UnsupportedError: as `linear_logprobs` and `grpo_loss`; with a process_group, on
            all ranks where the ranks differ in the number of tokens, D, `chunk_bytes` or whether dH is wanted.
    """
    config = DEFAULT_LOSS if config is None else checked_config(config)
    chunk_bytes, ignore_index = check_plan(impl, chunk_bytes, ignore_index, process_group, score=score, entropy=entropy)
    options = HeadOptions(bias, temperature, logit_scale, softcap)
    sharded = process_group is not None
    head = flatten_head(hidden, weight, targets, options, sharded=sharded, ignore_index=ignore_index, mask=mask)
    # Arguments that one rank alone may have wrong are checked before the first collective.
    chosen = choice.choose(impl, hidden)
    restricted = None if support is None else support_of(support, head, process_group=process_group)
    if weight_main_grad is not None:
        check_main_grad(weight_main_grad, weight, chosen)
    if squared_gradients is not None:
        check_squared_gradients(squared_gradients, targets, head.dtype, process_group, distillation)
    if distillation is not None:
        check_together(distillation, config, score=score, support=support, process_group=process_group)
    shards = None if process_group is None else shards_of(head, process_group, impl=impl, chunk_bytes=chunk_bytes or 0)
    passes, vocab_size = choice.passes(chosen), len(weight) if shards is None else sum(shards.sizes)
    sampler = None
    if config.score_centering != "off" or sampling_topk_ids is not None or sampling_topk_logprobs is not None:
        sampler = SamplerHead(sampling_topk_ids, sampling_topk_logprobs, vocab_size)
        sampler.check(config, targets, support=support, sampling=sampling_logprobs, teacher=distillation)
    kept, head = head.without_ignored(passes, ignore_index, vocab_size=vocab_size)
    given = LossArguments(
        advantages=advantages,
        mask=mask,
        cu_seqlens=cu_seqlens,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        sampling_logprobs=sampling_logprobs,
        entropy_threshold=entropy_threshold,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        num_entropy_tokens=num_entropy_tokens,
        covariance_selected=covariance_selected,
    )
    inputs = loss_inputs(given, targets.shape, config, dtype=head.dtype, device=hidden.device, kept=kept)
    entropy = entropy or config.entropy_coef > 0 or config.top_entropy_quantile < 1.0
    centering = None if sampler is None else sampler.centering(head.targets, inputs, config, restricted, chosen)
    head = head if centering is None else centering.with_targets(head)
    head = head if shards is None else shards.local_head(head)
    teacher = None if distillation is None else teacher_of(distillation, head, hidden, inputs, chosen)
    with full_precision(hidden):
        if chosen == "reference":
            loss, logprobs, statistics, upstream = _reference_loss(head, inputs, config, restricted, teacher, centering)
            squares = None if squared_gradients is None else _reference_squares(head, restricted, inputs.tokens.mask)
        else:
            plan = LossPlan(chunk_bytes, Wanted.of(head), score, entropy)
            plan = plan._replace(rounded=weight_main_grad is None, squares=squared_gradients is not None)
            if restricted is None:
                result = chunked_loss(head, inputs, config, passes, plan, Beside(shards, teacher, centering))
            else:
                result = supported_loss(head, restricted, inputs, config, passes, plan, sampler)
            attached = (result.statistics["loss"], result.gradients, weight_main_grad, passes)
            loss = AttachGradients.apply(*attached, head.hidden, weight, head.bias)  # type: ignore[no-untyped-call]
            statistics, logprobs, _, (upstream, _), _, squares = result
    if squared_gradients is not None and squares is not None:  # neither or both
        token_squares = upstream.square() * score_norms(logprobs.detach(), squares)
        squared_gradients.copy_(torch.where(inputs.tokens.mask, token_squares, 0.0).view(targets.shape))
    metrics = {name: torch.zeros_like(loss.detach()) for name in METRICS} if sampler is not None else {}
    metrics |= formulas.finish_metrics(statistics, inputs, has_entropy=entropy)
    return GRPOLossOutput(loss, metrics, torch.where(inputs.tokens.mask, logprobs, 0.0).view(targets.shape))


class FusedLinearGRPOLoss(nn.Module):
    """`fused_linear_grpo_loss` with its options fixed, as a module.

    Args:
        config: the variant and its constants. None: `GRPOLossConfig()`.
        chunk_bytes, process_group, impl: as in `fused_linear_grpo_loss`.
    """

    def __init__(
        self,
        config: GRPOLossConfig | None = None,
        *,
        chunk_bytes: int | None = None,
        process_group: Any = None,
        impl: choice.Impl = "auto",
    ) -> None:
        super().__init__()
        chunk_bytes, _ = check_plan(impl, chunk_bytes, process_group=process_group)
        self.config = DEFAULT_LOSS if config is None else checked_config(config)
        self.chunk_bytes, self.process_group, self.impl = chunk_bytes, process_group, impl

    def forward(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, *, advantages: Tensor, **inputs: Any
    ) -> GRPOLossOutput:
        """The arguments of `fused_linear_grpo_loss` other than the options above."""
        return fused_linear_grpo_loss(
            hidden,
            weight,
            targets,
            advantages=advantages,
            config=self.config,
            chunk_bytes=self.chunk_bytes,
            process_group=self.process_group,
            impl=self.impl,
            **inputs,
        )

    def extra_repr(self) -> str:
        return f"{self.config}, chunk_bytes={self.chunk_bytes}, impl={self.impl!r}"


def _reference_loss(
    head: Head,
    inputs: LossInputs,
    config: GRPOLossConfig,
    support: Support | None,
    teacher: Teacher | None,
    centering: Centering | None,
) -> tuple[Tensor, Tensor, dict[str, Tensor], Tensor]:
    """(loss, log-probs [N], statistics, d loss / d log-probs [N]) through full logits and autograd."""
    head = head.blank(inputs.tokens.mask)
    kept = None if support is None else kept_mask(support, len(head.weight), head.targets, inputs.tokens.mask)
    logprobs, entropy = distributions.logprobs_and_entropy(
        head.hidden, head.weight, head.targets.clamp_min(0), **head.transform(), kept=kept
    )
    target_logprobs, passes = logprobs, choice.passes("reference")
    logprobs = logprobs if centering is None else centering.keep(slice(None), logprobs)
    loss, _ = factors.grpo_loss(logprobs, entropy, inputs, config)
    upstream, statistics = loss_and_gradient(logprobs, entropy, inputs, config, passes)
    without = inputs.tokens.mask > upstream.have_gradient()
    if centering is not None:
        centering.weigh(factors.token_factors(logprobs, entropy, inputs, config)["policy_weights"])
        own_and_head = centering.upstream(slice(None), torch.zeros_like(logprobs))
        loss = loss + torch.where(own_and_head == 0, 0.0, own_and_head * target_logprobs).sum()
        statistics = centering.added_to(statistics, without)
    if teacher is not None:
        rows = inputs.tokens.mask.nonzero()[:, 0]
        divergence = reference_divergence(TwoHeads(head, teacher.head).select(rows), teacher.kind, teacher.beta)
        loss = loss + (teacher.weights[rows] * divergence).sum()
        teacher.divergence[rows] = divergence.detach()
        statistics = teacher.added_to(statistics, without)
    statistics = {**statistics, "recomputed_fraction": torch.zeros_like(loss.detach())}
    return loss, logprobs.detach(), statistics, upstream.logprobs


def _reference_squares(head: Head, support: Support | None, mask: Tensor) -> Tensor:
    """sum p^2 [N] of full logits."""
    kept = None if support is None else kept_mask(support, len(head.weight), head.targets, mask)
    targets = head.targets if head.targets.ndim == 1 else head.targets[:, 0]
    return distributions.moments(head.hidden, head.weight, targets, **head.transform(), kept=kept)[0]
