"""`linear_logprobs`: log-probs of given tokens straight from hidden states and the head's weight.

With U = 2*N*D*V FLOP, one GEMM over the head: without gradients this costs 1U and nothing of size N x V; with
gradients the backward pass computes the logits of a chunk again and turns them into d-logits in place, 4U in all.
Recomputing is what keeps memory at one chunk: a log-prob op cannot know its upstream gradient in the forward pass. A
loss that is known in the forward pass can do better: see `fused_loss.py`, 3U.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fused_grpo import _impl, reference
from fused_grpo._checks import check_head
from fused_grpo.errors import UnsupportedError
from fused_grpo.head import Head, HeadGradients, full_precision


class LogProbs(NamedTuple):
    """Per-token statistics, both differentiable."""

    logprobs: Tensor
    """fp32 (fp64 for fp64 inputs), never positive, 0 where the target is `ignore_index`."""
    entropy: Tensor
    """Of the whole distribution, in nats, 0 where the target is `ignore_index`."""


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    process_group: Any = None,
    impl: _impl.Impl = "auto",
) -> Tensor:
    """Log-probs of `targets` under the softmax of the head's logits, without the logits.

    Equals: `logits = (hidden.float() @ weight.float().t() + bias) / temperature`
            `logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]`

    Args:
        hidden: [..., D], fp32, bf16 or fp16 (fp64 without Triton).
        weight: [V, D], dtype of `hidden`; nn.Linear's layout, tied embeddings included.
        targets: [...] int64 in [0, V), or `ignore_index`.
        bias: [V].
        temperature: a number, or one per token in the shape of `targets`. Not differentiated.
        logit_scale: multiplies h.w + b.
        softcap: c of c * tanh(x / c), before the temperature.
        ignore_index: rows with this target give 0 and no gradient.
        process_group: for a head sharded over the vocabulary; not in this version.
        impl: "auto", "triton", "torch" (chunked, any device) or "reference" (full logits, the oracle).

    Returns:
        The shape of `targets`, fp32 (fp64 for fp64 inputs), never positive.

    Numerics: logits and all reductions in fp32; a target-excluded log-sum-exp, so confident tokens keep their gradient.
    Memory: one chunk of logits (256 MiB) beside O(N) and the gradients asked for.

    Raises:
        InputError: shapes, dtypes, devices or values that cannot be right.
        UnavailableError: impl="triton" where Triton cannot run.
        UnsupportedError: mixed dtypes or `process_group`.
    """
    options: dict[str, Any] = {"bias": bias, "temperature": temperature, "logit_scale": logit_scale, "softcap": softcap}
    head, kept = flatten_head(
        hidden, weight, targets, **options, ignore_index=ignore_index, process_group=process_group
    )
    return _linear_logprobs(head, kept, impl, entropy=False)[0].view(targets.shape)


def linear_logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    process_group: Any = None,
    impl: _impl.Impl = "auto",
) -> LogProbs:
    """`linear_logprobs` and, from the same pass, the entropy of each row's distribution (nats, differentiable).

    Equals, beside the log-probs: `torch.distributions.Categorical(logits=logits).entropy()`

    Arguments, numerics, memory and errors are those of `linear_logprobs`.
    """
    options: dict[str, Any] = {"bias": bias, "temperature": temperature, "logit_scale": logit_scale, "softcap": softcap}
    head, kept = flatten_head(
        hidden, weight, targets, **options, ignore_index=ignore_index, process_group=process_group
    )
    return LogProbs(*(values.view(targets.shape) for values in _linear_logprobs(head, kept, impl, entropy=True)))


def _linear_logprobs(head: Head, kept: Tensor, impl: str, *, entropy: bool) -> list[Tensor]:
    """[log p] or [log p, entropy], each [N], where `kept` [N] says which rows count."""
    chosen = _impl.choose(impl, head.hidden)
    with full_precision(head.hidden):
        if chosen == "reference":
            everything = head.row_arguments(slice(None))
            values = reference.logprobs_and_entropy(head.hidden, head.weight, head.targets, **everything)
        else:
            inputs = (head.hidden, head.weight, head.bias, head, _impl.passes(chosen), entropy)
            values = _LinearLogProbs.apply(*inputs)  # type: ignore[no-untyped-call]
    # Ignored rows ran with a stand-in target: here they lose their value and, by autograd, their gradient.
    return [torch.where(kept, value, 0.0) for value in values[: 2 if entropy else 1]]


def flatten_head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None,
    temperature: float | Tensor,
    logit_scale: float,
    softcap: float | None,
    ignore_index: int,
    process_group: Any,
) -> tuple[Head, Tensor]:
    """Check the arguments; give the flat rows and which of them count [N]."""
    if process_group is not None:
        raise UnsupportedError("got a process_group; a head sharded over the vocabulary is not in this version")
    check_head(
        hidden,
        weight,
        targets,
        bias=bias,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        ignore_index=ignore_index,
    )
    flat_targets = targets.reshape(-1)
    kept = flat_targets != ignore_index
    dtype = reference.compute_dtype(hidden)
    if not isinstance(temperature, Tensor):
        temperature = torch.full_like(flat_targets, temperature, dtype=dtype)
    head = Head(
        hidden=hidden.reshape(-1, hidden.shape[-1]),
        weight=weight,
        bias=bias,
        targets=torch.where(kept, flat_targets, 0),
        temperature=temperature.detach().to(dtype).reshape(-1),
        logit_scale=logit_scale,
        softcap=softcap,
    )
    return head, kept


class _LinearLogProbs(torch.autograd.Function):
    """(log p, entropy or None), each [N]; the backward pass recomputes logits chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, passes: ModuleType, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        logprobs, entropies, lse = passes.logprob_forward(
            hidden, weight, head.targets, **head.row_arguments(slice(None)), entropy=entropy
        )
        ctx.passes, ctx.constants = passes, (head.logit_scale, head.softcap)
        ctx.save_for_backward(hidden, weight, bias, head.targets, head.temperature, logprobs, entropies, lse)
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature, logprobs, entropy, lse = ctx.saved_tensors
        needs = dict(zip(("hidden", "weight", "bias"), ctx.needs_input_grad, strict=False))
        head = Head(hidden, weight, bias, targets, temperature, *ctx.constants)
        gradients = HeadGradients(head, **needs)
        grad_logprobs = torch.zeros_like(lse) if grad_logprobs is None else grad_logprobs
        with full_precision(hidden):
            for rows, logits in head.chunked_logits():
                dlogits = ctx.passes.logits_gradient_(
                    logits,
                    targets[rows],
                    lse=lse[rows],
                    logprobs=logprobs[rows],
                    entropy=None if grad_entropy is None else entropy[rows],
                    grad_logprobs=grad_logprobs[rows],
                    grad_entropy=None if grad_entropy is None else grad_entropy[rows],
                    **head.row_arguments(rows),
                    dtype=gradients.gemm_dtype,
                )
                gradients.add(rows, dlogits)
        return *gradients.finish(), None, None, None
