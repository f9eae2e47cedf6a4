"""The log-prob op as PyTorch knows it: `torch.ops.fused_grpo.linear_logprobs` and its backward pass.

Registered with fake kernels and an autograd formula, so `torch.compile(fullgraph=True)` takes them whole. Everything
that depends on values (targets out of range, which rows have a gradient, which implementation runs) happens in here,
where the compiler does not look. (`torch.library.custom_op` would do the same, and import the compiler at the first
call: four seconds that eager users need not wait.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_grpo import _impl, plans
from fused_grpo._checks import check_targets, check_temperature_values
from fused_grpo.head import Head
from fused_grpo.reference import compute_dtype

_OPTIONS = (
    "float logit_scale, float? softcap, int ignore_index, bool entropy, str impl, int? chunk_bytes, "
    "bool batch_invariant, bool direction"
)
_INPUTS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor temperature"


torch.library.define(
    "fused_grpo::linear_logprobs",
    f"({_INPUTS}, {_OPTIONS}) -> (Tensor logprobs, Tensor entropy, Tensor lse, Tensor way)",
    tags=torch.Tag.needs_fixed_stride_order,
)
torch.library.define(
    "fused_grpo::linear_logprobs_backward",
    f"({_INPUTS}, Tensor logprobs, Tensor entropies, Tensor lse, Tensor way, Tensor? grad_logprobs, "
    f"Tensor? grad_entropy, bool[] wanted, {_OPTIONS}) -> Tensor[]",
    tags=torch.Tag.needs_fixed_stride_order,
)


@torch.library.impl("fused_grpo::linear_logprobs", "default")
def _linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor,
    logit_scale: float,
    softcap: float | None,
    ignore_index: int,
    entropy: bool,
    impl: str,
    chunk_bytes: int | None,
    batch_invariant: bool,
    direction: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log p, entropy, lse) [N] of hidden [N, D]; with `direction`, d log p / d hidden [N, D] too. Not asked for: [0].

    Rows whose target is `ignore_index` have log p = H = 0.
    """
    check_targets(targets, len(weight), ignore_index)
    check_temperature_values(temperature)
    kept = targets != ignore_index
    head = Head(hidden, weight, bias, torch.where(kept, targets, 0), temperature, logit_scale, softcap)
    chosen, way = _impl.choose(impl, hidden), hidden.new_empty(0, dtype=head.dtype)
    # A GPU would have to wait for the count, and rows must not move where their bits should not depend on others.
    index = None if chosen == "triton" or hidden.is_cuda or batch_invariant else plans.rows_of(kept)
    options: dict[str, Any] = {"entropy": entropy, "chunk_bytes": chunk_bytes}
    if direction:
        statistics, way = plans.forward_with_direction(head.select(index), _impl.passes(chosen), **options)
    else:
        options["batch_invariant"] = batch_invariant
        statistics = plans.forward(head.select(index), _impl.passes(chosen), **options)
    values = [value for value in statistics if value is not None]
    if index is not None:
        values = [value.new_zeros(len(targets)).index_copy_(0, index, value) for value in values]
    values = [value.masked_fill_(~kept, 0.0) for value in values]
    return values[0], values[1] if entropy else torch.empty_like(values[0][:0]), values[-1], way


@torch.library.register_fake("fused_grpo::linear_logprobs")  # type: ignore[untyped-decorator]
def _fake(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *options: Any) -> tuple[Tensor, ...]:
    # len() would tie the compiled graph to this number of rows.
    entropy, direction, count, dtype = options[4], options[8], targets.shape[0], compute_dtype(hidden)
    logprobs, lse = (hidden.new_empty(count, dtype=dtype) for _ in range(2))
    entropies = hidden.new_empty(count if entropy else 0, dtype=dtype)
    way = torch.empty_like(hidden, dtype=dtype) if direction else hidden.new_empty(0, dtype=dtype)
    return logprobs, entropies, lse, way


@torch.library.impl("fused_grpo::linear_logprobs_backward", "default")
def _linear_logprobs_backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor,
    logprobs: Tensor,
    entropies: Tensor,
    lse: Tensor,
    way: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    wanted: list[bool],
    logit_scale: float,
    softcap: float | None,
    ignore_index: int,
    entropy: bool,
    impl: str,
    chunk_bytes: int | None,
    batch_invariant: bool,
    direction: bool,
) -> list[Tensor]:
    """The gradients of those of hidden, weight and bias that are wanted, in that order."""
    kept = targets != ignore_index
    g = torch.zeros_like(lse) if grad_logprobs is None else torch.where(kept, grad_logprobs, 0.0)
    # Compiled graphs send zeros where eager ones send nothing.
    grad_entropy = grad_entropy if grad_entropy is not None and entropy and bool((grad_entropy != 0).any()) else None
    if direction and grad_entropy is None:
        return [(way * g[:, None]).to(hidden.dtype)]
    head = Head(hidden, weight, bias, torch.where(kept, targets, 0), temperature, logit_scale, softcap)
    gradients = plans.backward(
        head,
        _impl.passes(_impl.choose(impl, hidden)),
        plans.Statistics(logprobs, entropies if entropy else None, lse),
        grad_logprobs=g,
        grad_entropy=None if grad_entropy is None else torch.where(kept, grad_entropy, 0.0),
        wanted=dict(zip(("hidden", "weight", "bias"), wanted, strict=True)),
        chunk_bytes=chunk_bytes,
    )
    return [gradient for gradient in gradients if gradient is not None]


@torch.library.register_fake("fused_grpo::linear_logprobs_backward")  # type: ignore[untyped-decorator]
def _fake_backward(hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> list[Tensor]:
    wanted = zip((hidden, weight, bias), rest[8], strict=True)
    return [torch.empty_like(x) for x, want in wanted if want and x is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, ctx.options = inputs[:5], inputs[5:]
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, *unused: Tensor | None
) -> tuple[Tensor | None, ...]:
    nothing = (None,) * (2 + len(ctx.options))
    wanted = list(ctx.needs_input_grad[:3])
    if grad_logprobs is None and grad_entropy is None:
        return None, None, None, *nothing
    gradients = iter(
        torch.ops.fused_grpo.linear_logprobs_backward(
            *ctx.saved_tensors, grad_logprobs, grad_entropy, wanted, *ctx.options
        )
    )
    return *(next(gradients) if want else None for want in wanted), *nothing


torch.library.register_autograd("fused_grpo::linear_logprobs", _backward, setup_context=_setup_context)
