"""verl's fused head: `linear_cross_entropy` with verl's call and ours behind it, and a way to put it in verl's place.

verl calls `verl.utils.kernel.linear_cross_entropy.linear_cross_entropy` by position, from its FSDP engine (the "triton"
backend of `use_fused_kernels`) and from its Megatron engine (with the tensor-parallel group). What it may rely
on, and what is therefore kept here:

- `hidden` and `labels` are flattened each on its own: Megatron passes [T, 1, D] beside [1, T].
- Both results are fp32; the entropy is always [N], `reduction` ("none", "sum", "mean" over all N) is of the log-probs.
- Gradients flow through both results. That of `weight` is of this rank's shard.
- With a group, the gradient of `hidden` on a rank is one *share*: the whole is the sum over the group. verl does no
  collective in its backward pass, since Megatron's sequence parallelism scatters that very sum to the ranks. Ours
  arrives whole on every rank, so each hands on 1/W of it; handing on all of it would train the backbone on W times it.

What differs, always towards more: any hidden size (verl: multiples of 128), any strides, any device, shards of any
sizes, a label of -100 gives 0 and no gradient (verl reads memory that nobody wrote), and any other label outside the
vocabulary is refused.

verl itself is imported by `patched` and by nothing else here.
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
        labels: N integers in any shape, in the order of the rows of `hidden`; already rolled. -100 is left out.
        temperature: one number; logits are divided by it.
        reduction: "none", "sum" or "mean" of the log-probs, the mean over all N rows, also those at -100.
        dist_process_group: ranks that hold the head in shards along V, in rank order.

    Returns:
        (logprobs, entropy): [N] or 0-d, and [N]; fp32 (fp64 for fp64 inputs), the same on all ranks of the group.

    Numerics and memory: those of `fused_grpo.linear_logprobs_and_entropy`. With a group, the gradients of `hidden` are
        to be summed over it by the caller, as with verl's own.

    Raises:
        InputError: shapes, dtypes, devices or values that cannot be right, or another reduction.
    """
    reduce = REDUCTIONS.get(reduction.lower()) if isinstance(reduction, str) else None
    if reduce is None:
        raise InputError(f"got reduction={reduction!r}, want one of {', '.join(map(repr, REDUCTIONS))}")
    if dist_process_group is not None:
        hidden = _Share.apply(hidden, dist.get_world_size(dist_process_group))  # type: ignore[no-untyped-call]
    logprobs, entropy = linear_logprobs_and_entropy(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels.reshape(-1).long(),
        temperature=temperature,
        process_group=dist_process_group,
    )
    return reduce(logprobs), entropy


class _Share(torch.autograd.Function):
    """The identity; of the gradient, which all W ranks have whole, each passes on 1/W."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, world_size: int) -> Tensor:
        ctx.world_size = world_size
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.world_size, None


def patched() -> contextlib.AbstractContextManager[None]:
    """While this is open, verl's `linear_cross_entropy` is ours, in every module that has it under this name.

    Equals: `verl.utils.kernel.linear_cross_entropy.linear_cross_entropy = linear_cross_entropy`
            and the same in each module that has imported it from there

    Leaving puts the very objects back that were there, also into modules that were first imported inside. It is a
    matter of this process: verl trains in worker processes of Ray, so it is they who must open it. Dropping the object
    without leaving undoes nothing.

    Raises:
        UnavailableError: on entering, where verl is not installed, does not import, or is of a release that was not
            checked. Nothing has changed then.
    """
    return _Patch()


class _Patch(contextlib.AbstractContextManager[None]):
    """Not a generator: one that is garbage-collected runs its `finally`, and a worker keeps nothing to leave."""

    def __init__(self) -> None:
        self.swaps: list[tuple[object, object]] = []

    def __enter__(self) -> None:
        theirs = find_verl().linear_cross_entropy
        # Not `linear_cross_entropy` itself: who imported that from here is to keep it.
        ours = functools.partial(linear_cross_entropy)
        # By its name alone: what somebody keeps as `theirs`, to compare with, stays theirs.
        replace_everywhere(theirs, ours, "linear_cross_entropy")
        self.swaps.append((ours, theirs))

    def __exit__(self, *_: object) -> None:
        replace_everywhere(*self.swaps.pop())


def find_verl() -> ModuleType:
    """The module that verl's function lives in, of a release that was checked."""
    try:
        home, verl = importlib.import_module(HOME), importlib.import_module("verl")
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "verl":
            raise UnavailableError(
                f"got no module {error.name!r}, want verl{CHECKED}; fix: pip install 'verl{CHECKED}'"
            ) from None
        raise UnavailableError(f"verl is installed but does not import: {error}; fix: import verl, and see") from error
    # verl imports it, too.
    from packaging.specifiers import SpecifierSet

    if not SpecifierSet(CHECKED).contains(verl.__version__, prereleases=True):
        raise UnavailableError(
            f"got verl {verl.__version__}, want {CHECKED}: the releases whose calls were checked; fix: install one of "
            "them, or call fused_grpo.integrations.verl.linear_cross_entropy where your verl calls its own"
        )
    return home


def replace_everywhere(old: object, new: object, name: str | None = None) -> None:
    """In the namespace of every module, `old` becomes `new` where it is called `name` (None: whatever it is called)."""
    for module in list(sys.modules.values()):
        # `vars` and not `getattr`: a lazy module would import itself for an answer.
        names = vars(module) if isinstance(module, ModuleType) else {}
        names.update({key: new for key, value in list(names.items()) if value is old and key == (name or key)})
