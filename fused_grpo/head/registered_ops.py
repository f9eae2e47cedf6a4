"""The log-prob op, registered with PyTorch: `torch.ops.fused_grpo.linear_logprobs` and its backward pass.

Both have fake kernels, and the forward op has an autograd formula, so `torch.compile(fullgraph=True)` does not break
the graph. Everything that depends on values happens inside the ops, where the compiler does not trace: checks of
targets, the selection of rows with a gradient, the choice of the implementation. (`torch.library.custom_op` would do
the same, but it imports the compiler at the first call, which costs eager users four seconds.)
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fused_grpo._maths.moments import RowsMoments
from fused_grpo._maths.statistics import Statistics, Upstream, compute_dtype
from fused_grpo.head import logprob_plans, several_targets
from fused_grpo.head.checks import (
    differentiated_once,
    leaves_out_rows,
    may_synchronize,
    save_for_backward,
    saved_tensors,
)
from fused_grpo.head.head import Head, Wanted
from fused_grpo.head.several_targets import rows_with
from fused_grpo.passes import choice

_OPTIONS = (
    "float logit_scale, float? softcap, int ignore_index, bool entropy, str impl, int? chunk_bytes, "
    "bool batch_invariant, bool keeps, bool[] wanted"
)
_INPUTS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor temperature"


torch.library.define(
    "fused_grpo::linear_logprobs",
    f"({_INPUTS}, bool moments, {_OPTIONS}) -> "
    "(Tensor logprobs, Tensor entropy, Tensor others, Tensor kept, Tensor largest, Tensor moments)",
    tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.cudagraph_unsafe),
)
torch.library.define(
    "fused_grpo::linear_logprobs_backward",
    f"({_INPUTS}, Tensor logprobs, Tensor entropies, Tensor others, Tensor kept, Tensor largest, "
    f"Tensor? grad_logprobs, Tensor? grad_entropy, {_OPTIONS}) -> Tensor[]",
    tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.cudagraph_unsafe),
)


def _linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor,
    moments: bool,
    logit_scale: float,
    softcap: float | None,
    ignore_index: int,
    entropy: bool,
    impl: str,
    chunk_bytes: int | None,
    batch_invariant: bool,
    keeps: bool,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(log p [N], entropy [N], m and s of `statistics.py` [2, N], what is kept, largest targets [N], moments [3, N]).

    The entropy is [0] unless `entropy`, and m and s are [0] if no gradient is `wanted`. If, of (hidden, weight, bias),
    only the gradient of hidden is, d log p / d hidden [N, D] is kept, with the targets it is of. If `keeps_weights`,
    and `keeps` allows it, softmax weights [N, V] are, those of rows that are not ignored first, and their scale is
    beside m and s: [3, N].
    With `moments` and targets [N], the last are those of `finish_moments`, else [0].
    The largest targets are [0] if nothing is kept, and beside the weights of one target per row.

    With targets [N, K], log p is [N, K], and the others are those of the largest target that is not ignored. An ignored
    target has log p = 0, a row without any other also H = 0.
    """
    head = Head(hidden, weight, bias, targets, temperature, logit_scale, softcap)
    chosen = choice.choose(impl, hidden)
    passes = choice.passes(chosen)
    is_target, head = head.without_ignored(passes, ignore_index)
    rows = rows_with(is_target)
    # A single launch needs no count of rows. Batch-invariant rows must stay in place.
    stays_in_place = (chosen == "triton" and not any(wanted)) or batch_invariant or not leaves_out_rows(rows)
    index = None if stays_in_place else logprob_plans.rows_of(rows)
    row_moments = RowsMoments(len(weight)) if moments else None
    options = logprob_plans.Options(entropy, chunk_bytes, batch_invariant, Wanted(*wanted), row_moments)
    kept = None
    if _takes_gradient(wanted, batch_invariant):
        statistics, kept = logprob_plans.forward_with_gradient(head.select(index), passes, options)
    elif keeps and may_synchronize(targets) and logprob_plans.keeps_weights(head, passes, options):
        memory = logprob_plans.memory_to_keep(head, passes)
        statistics, kept = logprob_plans.forward_with_weights(head.select(index), passes, options, memory)
    else:
        statistics = logprob_plans.forward(head.select(index), passes, options)

    def all_rows(values: Tensor) -> Tensor:
        """[..., N] from [..., R], 0 for ignored rows."""
        if index is None:
            return torch.where(rows, values, 0)
        return values.new_zeros(*values.shape[:-1], len(targets)).index_copy_(-1, index, values)

    logprobs, entropies, shift, total = statistics
    logprobs = all_rows(logprobs) if targets.ndim == 1 else torch.where(is_target, all_rows(logprobs.t()).t(), 0.0)
    saved = None
    if any(wanted):
        saved = torch.stack([shift, total] if kept is None or kept.scale is None else [shift, total, kept.scale])
        if index is not None:  # else those of ignored rows stay: rows without a gradient may have any
            saved = all_rows(saved)
    # Each output has a memory of its own: PyTorch takes none twice.
    nothing = functools.partial(logprobs.new_empty, 0)
    return (
        logprobs,
        nothing() if entropies is None else all_rows(entropies),
        nothing() if saved is None else saved,
        nothing() if kept is None else kept.values,
        targets.new_empty(0) if kept is None or kept.targets is None else all_rows(kept.targets),
        nothing() if row_moments is None else all_rows(row_moments.finish(statistics)),
    )


def _takes_gradient(wanted: list[bool], batch_invariant: bool) -> bool:
    return wanted == [True, False, False] and not batch_invariant


@torch.library.register_fake("fused_grpo::linear_logprobs")  # type: ignore[untyped-decorator]
def _fake(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: Tensor, *options: Any
) -> tuple[Tensor, ...]:
    # len() would specialise the compiled graph to this number of rows.
    count, dtype = targets.shape[0], compute_dtype(hidden)
    moments, logit_scale, softcap, _, entropy, impl, chunk_bytes, batch_invariant, keeps, wanted = options
    frozen, keeps_weights = _takes_gradient(wanted, batch_invariant), False
    kept = torch.empty_like(hidden, dtype=dtype) if frozen else hidden.new_empty(0, dtype=dtype)
    if keeps and not frozen and any(wanted):
        head = Head(hidden, weight, bias, targets, temperature, logit_scale, softcap)
        passes = choice.passes(choice.choose(impl, hidden))
        seen = RowsMoments(len(weight)) if moments else None
        plan = logprob_plans.Options(entropy, chunk_bytes, batch_invariant, Wanted(*wanted), seen)
        if keeps_weights := logprob_plans.keeps_weights(head, passes, plan):
            # Of the layout of such a tile: the memory cache of a CPU has no fake tensors.
            layout = passes.empty_tile(count, len(weight), dtype=head.gemm_dtype, device=torch.device("meta"))
            kept = hidden.new_empty_strided(layout.shape, layout.stride(), dtype=head.gemm_dtype)
    logprobs = hidden.new_empty(targets.shape, dtype=dtype)
    others = hidden.new_empty((2 + keeps_weights, count) if any(wanted) else 0, dtype=dtype)
    entropies = hidden.new_empty(count if entropy else 0, dtype=dtype)
    has_largest = frozen or (keeps_weights and targets.ndim == 2)
    largest = targets.new_empty(count if has_largest else 0)
    return logprobs, entropies, others, kept, largest, hidden.new_empty((3, count) if moments else 0, dtype=dtype)


def _linear_logprobs_backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor,
    logprobs: Tensor,
    entropies: Tensor,
    others: Tensor,
    kept: Tensor,
    largest: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    logit_scale: float,
    softcap: float | None,
    ignore_index: int,
    entropy: bool,
    impl: str,
    chunk_bytes: int | None,
    batch_invariant: bool,
    keeps: bool,
    wanted: list[bool],
) -> list[Tensor]:
    """The gradients of hidden, weight and bias, in that order, without those that are not wanted."""
    counted = targets != ignore_index
    g = torch.zeros_like(logprobs) if grad_logprobs is None else torch.where(counted, grad_logprobs, 0.0)
    if not entropy or (grad_entropy is not None and not may_synchronize(grad_entropy)):
        grad_entropy = grad_entropy if entropy else None
    elif grad_entropy is not None and not (grad_entropy != 0).any():
        grad_entropy = None  # a compiled graph passes zeros where eager mode passes None
    frozen = _takes_gradient(wanted, batch_invariant) and grad_entropy is None
    if frozen and targets.ndim == 1:
        # Not a plain product: ignored rows may hold NaN, and 0 * NaN is NaN.
        return [torch.where((g != 0)[:, None], kept * g[:, None], 0.0).to(hidden.dtype)]
    counted_targets = torch.where(counted, targets, 0 if targets.ndim == 1 else -1)
    head = Head(hidden, weight, bias, counted_targets, temperature, logit_scale, softcap)
    if frozen:
        return [several_targets.hidden_gradient(head, kept, largest, g).to(hidden.dtype)]
    if targets.ndim == 2:
        logprobs = logprobs.masked_fill(~counted, -torch.inf)
    passes = choice.passes(choice.choose(impl, hidden))
    # What is captured cannot know which rows the forward pass left out.
    if len(others) == 3 and grad_entropy is None and may_synchronize(counted):
        rows = kept, others[2], g, Wanted(*wanted)
        gradients = logprob_plans.backward_with_weights(
            head, passes, *rows, kept=rows_with(counted), largest=largest, chunk_bytes=chunk_bytes
        )
    else:
        gradients = logprob_plans.backward(
            head,
            passes,
            Statistics(logprobs, entropies if entropy else None, *others[:2]),
            Upstream(g, None if grad_entropy is None else torch.where(rows_with(counted), grad_entropy, 0.0)),
            Wanted(*wanted),
            chunk_bytes=chunk_bytes,
        )
    return [gradient for gradient in gradients if gradient is not None]


@torch.library.register_fake("fused_grpo::linear_logprobs_backward")  # type: ignore[untyped-decorator]
def _fake_backward(hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> list[Tensor]:
    wanted = zip((hidden, weight, bias), rest[-1], strict=True)
    return [torch.empty_like(x) for x, want in wanted if want and x is not None]


class _Differentiable(torch.autograd.Function):
    """The op under autograd. `torch.library.register_autograd` would read its schema at each call, for 40 us."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        output = _below_autograd(*inputs)
        tensors, ctx.options = inputs[:5], inputs[6:]
        (logprobs, entropies, *others), entropy = output[:5], ctx.options[3]
        # A caller may edit results in place: what a gradient needs of them is copied. That of a frozen head needs none.
        needed = entropy or not _takes_gradient(ctx.options[-1], ctx.options[6])
        copies = logprobs.clone() if needed else entropies, entropies.clone() if entropy else entropies
        save_for_backward(ctx, tensors, *copies, *others)
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    @differentiated_once
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, *unused: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        nothing = (None,) * (3 + len(ctx.options))
        if grad_logprobs is None and grad_entropy is None:
            return None, None, None, *nothing
        backward = torch.ops.fused_grpo.linear_logprobs_backward.default
        gradients = iter(backward(*saved_tensors(ctx), grad_logprobs, grad_entropy, *ctx.options))
        return *(next(gradients) if want else None for want in ctx.options[-1]), *nothing


def _below_autograd(*inputs: Any) -> tuple[Tensor, ...]:
    with torch._C._AutoDispatchBelowAutograd():
        output: tuple[Tensor, ...] = torch.ops.fused_grpo.linear_logprobs.default(*inputs)
        return output


def _autograd(*inputs: Any) -> tuple[Tensor, ...]:
    if not any(inputs[-1]):
        return _below_autograd(*inputs)
    output: tuple[Tensor, ...] = _Differentiable.apply(*inputs)  # type: ignore[no-untyped-call]
    return output


for _name, _implementation in (
    ("linear_logprobs", _linear_logprobs),
    ("linear_logprobs_backward", _linear_logprobs_backward),
):
    torch.library.impl(f"fused_grpo::{_name}", "default", _implementation)
_autograd_library = torch.library.Library("fused_grpo", "IMPL")
_autograd_library.impl("linear_logprobs", _autograd, "Autograd")
