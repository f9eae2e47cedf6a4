"""`linear_logprobs`: log-probs of given tokens straight from hidden states and the head's weight.

With U = 2*N*D*V FLOP, one GEMM over the head, the cost depends on the gradients that are needed (`logprob_plans.py`):

    no gradient     1U    one pass; no temporary of size N x V
    frozen head     2U    d log p / d hidden does not depend on the loss: taken in the forward, scaled in the backward
    trainable head  4U    the backward pass recomputes the logits, tile by tile
                    3U    where the budget has room for the softmax weights of all rows, which are kept

A log-prob op does not know its upstream gradient in the forward pass; recomputation keeps its memory at one tile. A
loss that is known in the forward pass needs 3U: see `fused_loss.py`. K targets per row cost what one does: see
`several_targets.py`.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor

from fused_grpo._maths import distributions
from fused_grpo._maths.statistics import full_precision
from fused_grpo.errors import InputError, UnsupportedError
from fused_grpo.head import registered_ops  # noqa: F401 - registers the op that is called here
from fused_grpo.head.checks import HeadOptions, check_plan, is_exporting
from fused_grpo.head.entries import Support, kept_mask, support_of
from fused_grpo.head.head import Head, Wanted, flatten_head
from fused_grpo.head.kept_tokens import supported_logprobs
from fused_grpo.head.logprob_plans import Options
from fused_grpo.head.several_targets import rows_with
from fused_grpo.passes import choice, torch_passes


class LogProbs(NamedTuple):
    """Per-token statistics, both differentiable."""

    logprobs: Tensor
    """fp32 (fp64 for fp64 inputs), never positive, 0 where the target is `ignore_index`."""
    entropy: Tensor
    """The entropy of the whole distribution of a row, in nats, 0 where all of its targets are `ignore_index`."""


class LogProbOutputs(NamedTuple):
    """Log-probs and the `outputs` that were asked for, of the shape of `targets`; those that were not are None.

    Only log-probs and entropy are differentiable. All are 0, or False, where the target is `ignore_index`.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    """Of `linear_logprobs_and_entropy` alone."""
    sum_squared_probs: Tensor | None = None
    """sum_v p_v^2, in the dtype of the log-probs."""
    is_top1: Tensor | None = None
    """bool, whether the target is the argmax of the logits: the first of the largest."""
    mean_logit: Tensor | None = None
    """The mean over the vocabulary of the logits, after scale, softcap and temperature."""


Output = Literal["sum_squared_probs", "is_top1", "mean_logit"]
OUTPUTS: tuple[Output, ...] = ("sum_squared_probs", "is_top1", "mean_logit")


class _Keywords(TypedDict, total=False):
    bias: Tensor | None
    temperature: float | Tensor
    logit_scale: float
    softcap: float | None
    ignore_index: int
    process_group: Any
    chunk_bytes: int | None
    batch_invariant: bool
    support: tuple[Tensor, Tensor] | None
    impl: choice.Impl


@overload
def linear_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, outputs: None = None, **options: Unpack[_Keywords]
) -> Tensor: ...
@overload
def linear_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, outputs: tuple[Output, ...], **options: Unpack[_Keywords]
) -> LogProbOutputs: ...
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
    chunk_bytes: int | None = None,
    batch_invariant: bool = False,
    support: tuple[Tensor, Tensor] | None = None,
    outputs: tuple[Output, ...] | None = None,
    impl: choice.Impl = "auto",
) -> Tensor | LogProbOutputs:
    """Log-probs of `targets` under the softmax of the head's logits, without the logits.

    Equals: `logits = softcap(logit_scale * (hidden.float() @ weight.float().t() + bias)) / temperature`
            `logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]`, or `.gather(-1, targets)` for [..., K]

    Args:
        hidden: [..., D], fp32, bf16 or fp16 (fp64 without Triton), any strides.
        weight: [V, D], nn.Linear's layout, tied embeddings included. A weight of another dtype than `hidden` (an fp32
            master weight) is cast to that of `hidden` once; its gradient has its own dtype and is not rounded.
        targets: [...] int64 in [0, V), or `ignore_index`; or [..., K], K of them for each row of hidden, in any order
            and with repetitions: candidates, the top-k of a teacher.
        bias: [V], any floating dtype.
        temperature: a number, or one per row of hidden, [...]. Not differentiated.
        logit_scale: multiplies h.w + b.
        softcap: c of c * tanh(x / c), before the temperature.
        ignore_index: such a target gives 0 and no gradient.
        process_group: the ranks that hold the head in shards along V, in rank order, of any sizes. All arguments except
            `weight` and `bias` are the same on all ranks, and `targets` count over the whole vocabulary. The results
            are the same on all ranks.
        chunk_bytes: budget for the one chunk or tile of the logits that exists at a time. None: 256 MiB (at most 64 on
            a CPU, where more gains little), and with a frozen head as for `fused_linear_grpo_loss`. With a trainable
            head, softmax weights of all rows are kept until the backward pass where the budget has room for them, by
            default 512 MiB on a CPU and a 48th of a GPU's memory: docs/logprobs.md says when.
        batch_invariant: guarantee that the bits of a row's results do not depend on the other rows. Without it they
            may: a vendor's GEMM may sum in another order for another N. All plans use such GEMMs, except Triton's
            kernel for log-probs of one target per row without a gradient. With it, that kernel or GEMMs of 64 rows are
            used; a frozen head costs 3U.
        support: (token_ids [K], offsets [N + 1]), int64 or int32, over the N rows of flat `targets`: the softmax of row
            n is over token_ids[offsets[n] : offsets[n + 1]], each id once, its target among them unless it is ignored.
            Where two offsets are equal, it is over the whole vocabulary. Cost and memory are those of the kept tokens:
            see docs/support.md. On a GPU the host waits for the offsets. Not with `process_group`, `batch_invariant`.
        outputs: any of "sum_squared_probs", "is_top1" and "mean_logit", as `LogProbOutputs` has them, from the same
            logits: one more read of each tile, no GEMM. There must be a tile, so no kernel without logits is used. With
            a support, they are those over the kept tokens. Not with [..., K] targets or a `process_group`.
        impl: "auto", "triton", "torch" (any device) or "reference" (full logits and autograd).

    Returns:
        The shape of `targets`, fp32 (fp64 for fp64 inputs), never positive. With `outputs`, a `LogProbOutputs`.

    Of logits log 2, 0 and 0, the probabilities are 1/2, 1/4 and 1/4:

    >>> hidden, weight = torch.ones(1, 1), torch.tensor([[2.0], [1.0], [1.0]]).log()
    >>> out = linear_logprobs(hidden, weight, torch.tensor([0]), outputs=("sum_squared_probs", "is_top1", "mean_logit"))
    >>> [round(x.item(), 4) for x in (out.logprobs, out.sum_squared_probs, out.mean_logit)], out.is_top1.item()
    ([-0.6931, 0.375, 0.231], True)

    Numerics: logits and all reductions in fp32; a target-excluded log-sum-exp, so confident tokens keep their gradient;
        two runs are bitwise equal. Under autocast, inputs are cast as those of nn.Linear are, and nothing else is.
    Memory: the chunk or tile of logits, O(N), the requested gradients and their fp32 accumulators: [N, D] for a 16-bit
        `hidden` or a frozen head (with which a weight of another dtype is copied); [V, D] for a 16-bit `weight` only
        where N is more than the height of a tile (16384 rows for 256 MiB). O(N K) for K targets.

    Raises:
        InputError: shapes, dtypes, devices or values that cannot be right.
        UnavailableError: impl="triton" where Triton cannot run.
        UnsupportedError: options that do not go with a process_group; torch.func and forward-mode AD.
    """
    options = HeadOptions(bias, temperature, logit_scale, softcap)
    plan = _Plan(ignore_index, process_group, chunk_bytes, batch_invariant, impl, outputs)
    result = _linear_logprobs(hidden, weight, targets, options, plan, support, entropy=False)
    return result.logprobs if outputs is None else result


@overload
def linear_logprobs_and_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, outputs: None = None, **options: Unpack[_Keywords]
) -> LogProbs: ...
@overload
def linear_logprobs_and_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, outputs: tuple[Output, ...], **options: Unpack[_Keywords]
) -> LogProbOutputs: ...
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
    chunk_bytes: int | None = None,
    batch_invariant: bool = False,
    support: tuple[Tensor, Tensor] | None = None,
    outputs: tuple[Output, ...] | None = None,
    impl: choice.Impl = "auto",
) -> LogProbs | LogProbOutputs:
    """`linear_logprobs` and, from the same pass, the entropy of each row's distribution (nats, differentiable).

    Equals, beside the log-probs: `torch.distributions.Categorical(logits=logits).entropy()`

    Arguments, numerics and memory are those of `linear_logprobs`; the entropy is [...], one per row of hidden, also for
    targets [..., K]. With a frozen head, a gradient through the entropy costs another 2U in the backward pass; an
    entropy without a gradient costs nothing more.

    Raises:
        InputError, UnavailableError, UnsupportedError: as `linear_logprobs`.
    """
    options = HeadOptions(bias, temperature, logit_scale, softcap)
    plan = _Plan(ignore_index, process_group, chunk_bytes, batch_invariant, impl, outputs)
    result = _linear_logprobs(hidden, weight, targets, options, plan, support, entropy=True)
    assert result.entropy is not None
    return LogProbs(result.logprobs, result.entropy) if outputs is None else result


class _Plan(NamedTuple):
    """How log-probs are computed: the options that do not change their values."""

    ignore_index: int
    process_group: Any
    chunk_bytes: int | None
    batch_invariant: bool
    impl: str
    outputs: tuple[Output, ...] | None


def _linear_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, options: HeadOptions, plan: _Plan, support: Any, *, entropy: bool
) -> LogProbOutputs:
    ignore_index, group, chunk_bytes, batch_invariant, impl, outputs = plan
    chunk_bytes, ignore_index = check_plan(impl, chunk_bytes, ignore_index, group, batch_invariant=batch_invariant)
    sharded = group is not None
    head = flatten_head(hidden, weight, targets, options, sharded=sharded, several=True, ignore_index=ignore_index)
    if outputs is not None:
        _check_outputs(outputs, head, process_group=group)
    kept, moments = None, None
    if support is not None:  # here, because the call of a function that is not traced would break a compiled graph
        kept = support_of(support, head, process_group=group, batch_invariant=batch_invariant)
    plan_options = Options(entropy, chunk_bytes, batch_invariant)
    if group is not None:
        from fused_grpo.head.sharded import vocab_parallel_logprobs

        logprobs, entropies = vocab_parallel_logprobs(head, group, plan_options, ignore_index=ignore_index, impl=impl)
    elif impl == "reference":
        logprobs, entropies, moments = _reference(head, ignore_index, kept, moments=bool(outputs))
    elif kept is not None:
        logprobs, entropies, moments = supported_logprobs(
            head, kept, plan_options, ignore_index=ignore_index, impl=impl, moments=bool(outputs)
        )
    else:
        tensors, transform = (head.hidden, head.weight, head.bias, head.targets), (head.logit_scale, head.softcap)
        wanted = [*Wanted.of(head)]
        # A graph of any number of rows cannot have an output whose shape depends on how many fit into memory.
        keeps = True in wanted and not is_exporting()
        computed = ignore_index, entropy, impl, chunk_bytes, batch_invariant, keeps, wanted
        logprobs, entropies, _, _, _, moments = torch.ops.fused_grpo.linear_logprobs.default(
            *tensors, head.temperature, bool(outputs), *transform, *computed
        )
    logprobs = logprobs.reshape(targets.shape)
    named: dict[str, Tensor] = {}
    if outputs and moments is not None:
        squares, mean, leads = (values.view(logprobs.shape) for values in moments)
        by_name = {"sum_squared_probs": squares, "is_top1": leads != 0, "mean_logit": mean}
        named = {name: by_name[name] for name in outputs}
    return LogProbOutputs(logprobs, entropies.view(hidden.shape[:-1]) if entropy else None, **named)


def _check_outputs(outputs: Any, head: Head, **others: Any) -> None:
    """Check that these outputs exist, and that any exist beside the others that are not None."""
    if not isinstance(outputs, tuple) or any(name not in OUTPUTS for name in outputs):
        raise InputError(f"got outputs={outputs!r}, want a tuple of some of {', '.join(map(repr, OUTPUTS))}")
    given = [name for name, value in others.items() if value is not None]
    given += ["several targets per row"] if head.targets.ndim == 2 else []
    if given and outputs:
        raise UnsupportedError(
            f"got outputs={outputs!r} with {' and '.join(given)}, want one target per row and a whole head; "
            "fix: a call of its own for these outputs, which have no gradient"
        )


def _reference(
    head: Head, ignore_index: int, support: Support | None, *, moments: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(log p [N] or [N, K], entropy [N], `finish_moments` [3, N]) through full logits and autograd."""
    kept, head = head.without_ignored(torch_passes, ignore_index)
    head = head.blank(rows_with(kept))
    mask = None if support is None else kept_mask(support, len(head.weight), head.targets, kept)
    with full_precision(head.hidden):
        given = head.hidden, head.weight, head.targets.clamp_min(0)
        logprobs, entropy = distributions.logprobs_and_entropy(*given, **head.transform(), kept=mask)
        seen = distributions.moments(*given, **head.transform(), kept=mask) if moments else None
    seen = None if seen is None else torch.where(kept, seen, 0.0)
    return torch.where(kept, logprobs, 0.0), torch.where(rows_with(kept), entropy, 0.0), seen
