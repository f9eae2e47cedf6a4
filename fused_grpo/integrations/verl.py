"""verl's fused head: `linear_cross_entropy` with the same call, over our op, and a context manager to replace verl's.

verl calls `verl.utils.kernel.linear_cross_entropy.linear_cross_entropy` by position, from its FSDP engine (the "triton"
backend of `use_fused_kernels`) and from its Megatron engine (with the tensor-parallel group). This function keeps the
properties that verl relies on:

- `hidden` and `labels` are flattened each on its own: Megatron passes [T, 1, D] beside [1, T].
- Both results are fp32; the entropy is always [N], `reduction` ("none", "sum", "mean" over all N) is of the log-probs.
- Gradients flow through both results. That of `weight` is of this rank's shard.
- With a group, the gradient of `hidden` on a rank is one *share*: the full gradient is the sum over the group. verl
  calls no collective in its backward pass, since Megatron's sequence parallelism reduce-scatters this sum to the ranks.
  Our op returns the full gradient on every rank, so each rank passes on 1/W of it; otherwise the backbone would get W
  times the gradient.

This function accepts more: any hidden size (verl: multiples of 128), any strides, any device, shards of any sizes. A
label of -100 gives 0 and no gradient (verl reads uninitialised memory); other labels outside of the vocabulary are
refused.

Only `patched` imports verl.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fused_grpo.errors import InputError, UnavailableError
from fused_grpo.head.checks import check_plan, check_tensors
from fused_grpo.integrations._peers import token_ids
from fused_grpo.logprobs import linear_logprobs_and_entropy

# Releases whose function has this signature and no other call sites than those named above.
CHECKED = ">=0.5,<0.10"
HOME = "verl.utils.kernel.linear_cross_entropy"
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda x: x, "sum": torch.sum, "mean": torch.mean}


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """verl's `linear_cross_entropy`: the log-probs of `labels` (positive sign: not a loss) and the entropy of each row.

    Equals: `logits = hidden.flatten(0, -2).float() @ weight.float().t() / temperature`
            `logprobs = logits.log_softmax(-1).gather(-1, labels.view(-1, 1))[:, 0]`
            `entropy = torch.distributions.Categorical(logits=logits).entropy()`

    Args:
        hidden: [..., D], fp32, bf16 or fp16 (fp64 without Triton).
        weight: [V, D]; with a group, this rank's rows of it.
        labels: N integers in any shape, in the order of the rows of `hidden`, already shifted. -100 is ignored.
        temperature: a number, the divisor of the logits.
        reduction: "none", "sum" or "mean" of the log-probs; the mean is over all N rows, also those at -100.
        dist_process_group: the ranks that hold the head in shards along V, in rank order.

    Returns:
        (logprobs, entropy): [N] or 0-d, and [N]; fp32 (fp64 for fp64 inputs), the same on all ranks of the group.

    Numerics and memory: those of `fused_grpo.linear_logprobs_and_entropy`. With a group, the caller sums the gradient
        of `hidden` over its ranks, as with verl's own function.

    Raises:
        InputError: shapes, dtypes, devices or values that cannot be right, or another reduction.
    """
    reduce = REDUCTIONS.get(reduction.lower()) if isinstance(reduction, str) else None
    if reduce is None:
        raise InputError(f"got reduction={reduction!r}, want one of {', '.join(map(repr, REDUCTIONS))}")
    check_tensors(hidden=hidden, weight=weight, labels=labels)
    check_plan("auto", process_group=dist_process_group)
    if dist_process_group is not None:
        hidden = _Share.apply(hidden, dist.get_world_size(dist_process_group))  # type: ignore[no-untyped-call]
    logprobs, entropy = linear_logprobs_and_entropy(
        hidden.flatten(0, -2) if hidden.ndim > 2 else hidden,
        weight,
        token_ids("labels", labels).reshape(-1),
        temperature=temperature,
        process_group=dist_process_group,
    )
    return reduce(logprobs), entropy


class _Share(torch.autograd.Function):
    """The identity. All W ranks have the full gradient, and each passes on 1/W of it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, world_size: int) -> Tensor:
        ctx.world_size = world_size
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.world_size, None


def patched() -> contextlib.AbstractContextManager[None]:
    """Inside, verl's `linear_cross_entropy` is this function, in every module that has it under this name.

    Equals: `verl.utils.kernel.linear_cross_entropy.linear_cross_entropy = linear_cross_entropy`
            and the same in each module that has imported it from there

    Leaving restores the original objects, also in modules that were first imported inside. It changes this process
    only: verl trains in worker processes of Ray, which must enter it themselves. Deleting the object without leaving
    restores nothing.

    Raises:
        UnavailableError: on entering, if verl is not installed, cannot be imported, or has a version that was not
            checked. Nothing is changed then.
    """
    return _Patch()


class _Patch(contextlib.AbstractContextManager[None]):
    """Not a generator, which would restore when it is garbage-collected: a worker may drop it without leaving."""

    def __init__(self) -> None:
        self.swaps: list[tuple[object, object]] = []

    def __enter__(self) -> None:
        original = find_verl().linear_cross_entropy
        # A copy, so that modules which import `linear_cross_entropy` from here keep it when verl's is restored.
        replacement = functools.partial(linear_cross_entropy)
        # Only under this name: references under other names, such as `original`, stay.
        replace_everywhere(original, replacement, "linear_cross_entropy")
        self.swaps.append((replacement, original))

    def __exit__(self, *_: object) -> None:
        replace_everywhere(*self.swaps.pop())


def find_verl() -> ModuleType:
    """The module of verl's function, in a version that was checked.

    Raises:
        UnavailableError: verl is not installed, cannot be imported, or has another version.
    """
    try:
        home, verl = importlib.import_module(HOME), importlib.import_module("verl")
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "verl":
            raise UnavailableError(
                f"got no module {error.name!r}, want verl{CHECKED}; fix: pip install 'verl{CHECKED}'"
            ) from None
        raise UnavailableError(f"verl is installed but does not import: {error}; fix: import verl, and see") from error
    # verl depends on it, too.
    from packaging.specifiers import SpecifierSet

    if not SpecifierSet(CHECKED).contains(verl.__version__, prereleases=True):
        raise UnavailableError(
            f"got verl {verl.__version__}, want {CHECKED}: the releases whose calls were checked; fix: install one of "
            "them, or call fused_grpo.integrations.verl.linear_cross_entropy where your verl calls its own"
        )
    return home


def replace_everywhere(old: object, new: object, name: str | None = None) -> None:
    """Replace `old` by `new` in the namespaces of all modules, under `name` or, with None, under any name."""
    for module in list(sys.modules.values()):
        # `vars` and not `getattr`, which would import lazy modules.
        names = vars(module) if isinstance(module, ModuleType) else {}
        names.update({key: new for key, value in list(names.items()) if value is old and key == (name or key)})
