"""`fused_linear_grpo_loss`: the head and the GRPO loss together, gradients taken in the forward pass.

The loss is known as soon as a chunk's log-probs are, so nothing has to be recomputed. Per chunk of rows:

    logits = h.w -> log p, entropy -> loss, dL/d log p -> d-logits over the same memory -> dH, dW

Three GEMMs (3U, U = 2*N*D*V FLOP) with a trainable head, two with a frozen one, one without gradients, and never more
than one chunk of logits. The backward pass only scales what the forward pass made. The price: a forward pass under
grad does the work of a backward pass too, even if `backward()` is never called; use `torch.no_grad()` for evaluation.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fused_grpo import _impl, reference
from fused_grpo._checks import check_plan, check_targets, check_temperature_values
from fused_grpo._layout import TokenInputs, token_inputs
from fused_grpo.config import GRPOLossConfig
from fused_grpo.errors import UnsupportedError
from fused_grpo.head import Head, HeadGradients, full_precision
from fused_grpo.logprobs import asks_gradient, flatten_head
from fused_grpo.loss import GRPOLossOutput


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
    num_tokens: float | Tensor | None = None,
    num_sequences: float | Tensor | None = None,
    config: GRPOLossConfig | None = None,
    chunk_bytes: int | None = None,
    process_group: Any = None,
    impl: _impl.Impl = "auto",
) -> GRPOLossOutput:
    """The GRPO loss of `targets` from hidden states and the head, with gradients for hidden, weight and bias.

    Equals: `logprobs, entropy = linear_logprobs_and_entropy(hidden, weight, targets, ...)`
            `grpo_loss(logprobs, entropy=entropy, advantages=advantages, ...)`

    Args:
        hidden, weight, targets, bias, temperature, logit_scale, softcap, ignore_index, process_group, impl: as in
            `linear_logprobs`. Tokens are padded (hidden [B, T, D]) or packed (hidden [N, D] with `cu_seqlens`).
        advantages, mask, cu_seqlens, old_logprobs, ref_logprobs, sampling_logprobs, num_tokens, num_sequences, config:
            as in `grpo_loss`. Rows whose target is `ignore_index` are masked.
        chunk_bytes: budget for the one chunk of logits, in bytes. None: 256 MiB. At least one row is always taken.

    Returns:
        `GRPOLossOutput(loss, metrics, logprobs)`; metrics include the entropy.

    Numerics: as `linear_logprobs`; dW accumulates in fp32 over the chunks. Gradients of 16-bit inputs are rounded to
        their dtype before the upstream gradient arrives: with fp16 and a loss scaler, prefer bf16 or fp32 weights.
    Memory: the chunk, O(N), the gradients asked for and their fp32 accumulators. Gradients are handed over, not copied:
        a second backward pass needs `retain_graph=True` on the first, which costs that copy.

    Raises:
        InputError, UnavailableError, UnsupportedError: as `linear_logprobs` and `grpo_loss`.
    """
    config = GRPOLossConfig() if config is None else config
    check_plan(impl, chunk_bytes)
    if process_group is not None:
        raise UnsupportedError("got a process_group; this loss does not shard the head yet; fix: linear_logprobs does")
    options: dict[str, Any] = {"bias": bias, "temperature": temperature, "logit_scale": logit_scale, "softcap": softcap}
    head = flatten_head(hidden, weight, targets, **options)
    check_targets(head.targets, len(weight), ignore_index)
    check_temperature_values(head.temperature)
    kept = head.targets != ignore_index
    head = replace(head, targets=torch.where(kept, head.targets, 0))
    tokens = token_inputs(
        targets.shape,
        dtype=head.dtype,
        device=hidden.device,
        advantages=advantages,
        mask=mask,
        kept=kept,
        cu_seqlens=cu_seqlens,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        sampling_logprobs=sampling_logprobs,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        config=config,
    )
    chosen = _impl.choose(impl, hidden)
    with full_precision(hidden):
        if chosen == "reference":
            loss, logprobs, statistics = _reference_loss(head, tokens, config)
        else:
            wanted = {name: asks_gradient(getattr(head, name)) for name in ("hidden", "weight", "bias")}
            with torch.no_grad():
                done = _one_pass(head, tokens, config, _impl.passes(chosen), chunk_bytes, wanted)
            inputs = (head.hidden, weight, bias, done.statistics["loss"], done.gradients)
            loss = _AttachGradients.apply(*inputs)  # type: ignore[no-untyped-call]
            logprobs, statistics = done.logprobs, done.statistics
    logprobs = torch.where(kept, logprobs, 0.0)
    metrics = reference.finish_metrics(
        statistics, has_ref=ref_logprobs is not None, has_sampling=sampling_logprobs is not None, has_entropy=True
    )
    return GRPOLossOutput(loss, metrics, logprobs.view(targets.shape))


class FusedLinearGRPOLoss(nn.Module):
    """`fused_linear_grpo_loss` with its options fixed, for trainers that hold losses as modules.

    Args:
        config: the variant and its constants. None: `GRPOLossConfig()`.
        chunk_bytes: as in `fused_linear_grpo_loss`.
        impl: as in `fused_linear_grpo_loss`.
    """

    def __init__(
        self, config: GRPOLossConfig | None = None, *, chunk_bytes: int | None = None, impl: _impl.Impl = "auto"
    ) -> None:
        super().__init__()
        check_plan(impl, chunk_bytes)
        self.config = GRPOLossConfig() if config is None else config
        self.chunk_bytes, self.impl = chunk_bytes, impl

    def forward(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, *, advantages: Tensor, **inputs: Any
    ) -> GRPOLossOutput:
        """The arguments of `fused_linear_grpo_loss` other than the options above."""
        options: dict[str, Any] = {"config": self.config, "chunk_bytes": self.chunk_bytes, "impl": self.impl}
        return fused_linear_grpo_loss(hidden, weight, targets, advantages=advantages, **inputs, **options)

    def extra_repr(self) -> str:
        return f"{self.config}, chunk_bytes={self.chunk_bytes}, impl={self.impl!r}"


class _Done(NamedTuple):
    """What one pass over the rows leaves behind."""

    statistics: dict[str, Tensor]
    logprobs: Tensor  # [N]
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None]  # of hidden, weight, bias, for an upstream of 1


def _one_pass(
    head: Head,
    tokens: TokenInputs,
    config: GRPOLossConfig,
    passes: ModuleType,
    chunk_bytes: int | None,
    wanted: dict[str, bool],
) -> _Done:
    """Every chunk once: log-probs, loss, and the gradients that are wanted of hidden, weight and bias."""
    shape = head.chunk_shape(chunk_bytes)
    gradients = HeadGradients(head, shape, **wanted)  # type: ignore[arg-type]
    all_logprobs, parts = torch.empty(len(head.targets), dtype=head.dtype, device=head.hidden.device), []
    for tile in head.tiles(shape):
        rows, logits, targets, arguments = tile.rows, tile.logits, tile.targets, tile.arguments
        logprobs, entropy, (maximum, total, *_) = passes.row_statistics(logits, targets, **arguments, entropy=True)
        grad_logprobs, statistics = passes.grpo_token_loss(
            logprobs, **tokens.rows(rows), entropy=entropy, **config.token_terms()
        )
        all_logprobs[rows] = logprobs
        parts.append(statistics)
        if any(wanted.values()):
            dlogits = passes.logits_gradient_(
                logits,
                targets,
                maximum=maximum,
                total=total,
                logprobs=logprobs,
                entropy=None,
                grad_logprobs=grad_logprobs,
                grad_entropy=None,
                **arguments,
                dtype=head.gemm_dtype,
            )
            gradients.add(tile, dlogits)
    return _Done(reference.merge_statistics(parts), all_logprobs, gradients.finish())


def _reference_loss(
    head: Head, tokens: TokenInputs, config: GRPOLossConfig
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(loss, log-probs [N], statistics) through full logits and autograd."""
    everything = slice(None)
    logprobs, entropy = reference.logprobs_and_entropy(
        head.hidden, head.weight, head.targets, **head.row_arguments(everything)
    )
    loss, statistics = reference.token_loss(
        logprobs, **tokens.rows(everything), entropy=entropy, **config.token_terms()
    )
    return loss, logprobs.detach(), statistics


class _AttachGradients(torch.autograd.Function):
    """A loss whose gradients are already there: the backward pass scales them by what comes from upstream."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        loss: Tensor,
        gradients: tuple[Tensor | None, Tensor | None, Tensor | None],
    ) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "Trying to backward through the loss a second time; its gradients were handed over the first time; "
                "fix: retain_graph=True on the first backward pass"
            )
        if torch._C._autograd._get_current_graph_task_keep_graph():
            scaled = (None if gradient is None else gradient * upstream for gradient in ctx.gradients)
        else:
            # Ours alone from here on: scaled where it lies, and taken by `.grad` without a copy.
            scaled = (None if gradient is None else gradient.mul_(upstream) for gradient in ctx.gradients)
            ctx.gradients = None
        return *scaled, None, None
