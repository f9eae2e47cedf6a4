"""The statistics of a row's softmax, which blocks, tiles and shards of its columns merge into.

All of them exclude the target t. With z_t the target's logit, m the shift, s = sum_v e^(z_v - m) and
w = sum_v e^(z_v - m) (z_v - m) over the others, and d = m + log s - z_t,

    log p = -softplus(d)        1 - p = -expm1(log p)        p_v = (1 - p) e^(z_v - m) / s
    H = -p log p + (1 - p) (softplus(-d) + log s - w / s)

so log p is never positive, a token of probability 1 - 1e-9 keeps a log-prob of -1e-9 and its gradient, where a
log-sum-exp minus z_t would round to 0, and the entropy is a sum of terms that are all >= 0: nothing cancels. The
log-sum-exp itself is never formed: next to logits near 1e4 it would be rounded to 1e-3, and every p_v with it.

Any m near the largest of the other logits gives the same result, so a pass that reads a row once need not know the
largest logit beforehand: its shift is the largest of the first columns, and is raised where a later logit is more than
`HEADROOM` above it.

Logits, statistics and accumulators are fp32 (fp64 for fp64 inputs), whatever a user allows elsewhere: `full_precision`
turns off what would round them, which is autocast, TF32, fp32 operands in 16 bits, and partial sums in 16 bits.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

logger = logging.getLogger("fused_grpo")

HEADROOM = 16.0
"""How far above the shift of its row a logit may be, in nats, before the shift is raised to it."""

MOST_PARTS = 8
"""So many parts of the same rows are merged at a time, to save memory and keep sums short."""

# Up to this size, both factors of e^d are finite: s >= 1, and e^(m - z_t) is at most e^86.
_SMALL_D = 16.0


def picked(values: Tensor, rows: slice | Tensor | None) -> Tensor:
    """`values[rows]`, or the values themselves where these are all (None): no view, which would cost a microsecond."""
    count = values.shape[0]
    if rows is None or (isinstance(rows, slice) and rows.stop is None and rows == slice(None)):
        return values  # before `indices`, which makes the count a constant of a compiled graph
    return values if isinstance(rows, slice) and rows.indices(count) == (0, count, 1) else values[rows]


class RowState(NamedTuple):
    """The state of some rows over some of their columns, without the target. Each field is [N]."""

    shift: Tensor
    """m; -inf where all logits are -inf."""
    total: Tensor
    """s."""
    weighted: Tensor
    """w, if the entropy is requested; else undefined."""
    target_logit: Tensor
    """z_t; -inf where the target is not among these columns. [N, K] of K targets, the largest of which is t."""


class Statistics(NamedTuple):
    """The statistics of whole rows, each [N]: the results, and the shift and total that a gradient needs."""

    logprobs: Tensor  # [N, K] of K targets per row
    entropy: Tensor | None
    shift: Tensor
    total: Tensor

    def rows(self, rows: slice | Tensor) -> Statistics:
        """The statistics of some rows."""
        return Statistics(*(None if x is None else picked(x, rows) for x in self))  # type: ignore[arg-type]


class Upstream(NamedTuple):
    """The gradients of a loss in the results of rows, for an upstream gradient of 1."""

    logprobs: Tensor  # [N]
    entropy: Tensor | None  # [N], None for 0

    def rows(self, rows: slice | Tensor) -> Upstream:
        """The gradients of some rows."""
        return Upstream(picked(self.logprobs, rows), None if self.entropy is None else picked(self.entropy, rows))

    def have_gradient(self) -> Tensor:
        """Which rows have a gradient that is not 0, [N]."""
        return self.logprobs != 0 if self.entropy is None else (self.logprobs != 0) | (self.entropy != 0)


Rows = TypeVar("Rows", bound=tuple[Any, ...])


def no_columns(targets: Tensor, dtype: torch.dtype) -> RowState:
    """The state of rows with these targets, [N] or [N, K], without any column."""
    lowest = torch.full_like(targets, -torch.inf, dtype=dtype)
    shift = lowest if targets.ndim == 1 else lowest[:, 0]
    return RowState(shift, torch.zeros_like(shift), torch.zeros_like(shift), lowest)


def merge_rows(parts: Sequence[RowState]) -> RowState:
    """The state of rows from the states of disjoint parts of their columns."""
    if len(parts) == 1:
        return parts[0]
    shifts, totals, weighted, targets = map(torch.stack, zip(*parts, strict=True))
    if targets.ndim == 3:
        # Of the targets that the parts leave out, only the largest stays out.
        left_out = targets.amax(2)
        returned = left_out.scatter(0, left_out.argmax(0, keepdim=True), -torch.inf)
        shifts, totals = torch.cat([shifts, returned]), torch.cat([totals, torch.ones_like(returned)])
        weighted = torch.cat([weighted, torch.zeros_like(returned)])
    shift = shifts.amax(0)
    drop = shifts - finite(shift)
    rescale = drop.exp()
    moved = weighted + drop.clamp_min(-128.0) * totals
    return RowState(shift, (rescale * totals).sum(0), (rescale * moved).sum(0), targets.amax(0))


def joined(groups: Sequence[Rows]) -> Rows:
    """Consecutive groups of rows as one; a field that is None stays None."""
    if len(groups) == 1:
        return groups[0]
    fields = zip(*groups, strict=True)
    concatenated: Any = (None if values[0] is None else torch.cat(values) for values in fields)
    return type(groups[0])(*concatenated)


def finish_rows(parts: Sequence[RowState], *, entropy: bool) -> Statistics:
    """The statistics of whole rows from the states of all their columns; log p is -inf where no column is the target.

    With `entropy`, the states must contain `weighted`.

    Of tokens with probabilities 1/2 (the target), 1/4 and 1/4, in two parts of their columns:

    >>> zero, half = torch.zeros(1), torch.tensor([0.5]).log()
    >>> parts = [RowState(zero, zero + 0.25, half * 0.5, target) for target in (half, zero - torch.inf)]
    >>> logprobs, entropy, *_ = finish_rows(parts, entropy=True)
    >>> [round(x.item(), 4) for x in (logprobs.exp(), entropy)]
    [0.5, 1.0397]
    """
    state = parts[0] if len(parts) == 1 else merge_rows(parts)
    is_certain = state.total == 0.0
    total = state.total.masked_fill(is_certain, 1.0)
    # (m - target) first: the difference of two large numbers is exact, their sums with log(total) are not.
    gap = state.shift - state.target_logit
    d = (gap + total.log()).masked_fill(is_certain, -torch.inf)
    # A small d as a difference of larger numbers would have their rounding error; the log of a product has its own.
    d = torch.where(d.abs() < _SMALL_D, (total * gap.exp()).log(), d)
    # log(1 + e^x) is max(x, 0) + tail for x = d and for x = -d, to a few ulp in both tails; the rounding of
    # torch.logaddexp depends on the element's place.
    tail = torch.log1p(torch.exp(-d.abs()))
    logprobs = -(d.clamp_min(0.0) + tail)
    if not entropy:
        return Statistics(logprobs, None, state.shift, state.total)
    others_entropy = ((-d).clamp_min(0.0) + tail).masked_fill(is_certain, 0.0) + (total.log() - state.weighted / total)
    entropies = -torch.expm1(logprobs) * others_entropy - logprobs.exp() * logprobs.clamp_min(-128.0)
    return Statistics(logprobs, entropies, state.shift, state.total)


def share_of_others(logprobs: Tensor, total: Tensor) -> Tensor:
    """(1 - p) / s, the factor of e^(z_v - m) in p_v."""
    return -torch.expm1(logprobs) / total.masked_fill(total == 0.0, 1.0)


def finite(shift: Tensor) -> Tensor:
    """A shift for exp: 0 where the shift is -inf, since -inf - (-inf) would be NaN."""
    return shift.masked_fill(shift == -torch.inf, 0.0)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """fp64 for an fp64 tensor, fp32 for all others: logits are never rounded to 16 bits."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


@functools.cache
def keeps_sums(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a GEMM of this dtype can write its sums in fp32; builds for ROCm may refuse. Asked once."""
    if dtype.itemsize > 2:
        return True
    try:
        with unset_fake_temporarily():  # under a compiler the device would not be asked
            operand, out = (torch.zeros(16, 16, dtype=x, device=device) for x in (dtype, torch.float32))
            torch.mm(operand, operand, out_dtype=out.dtype, out=out)
            torch.addmm(out, operand, operand, out_dtype=out.dtype, out=out)
    except torch.OutOfMemoryError:  # says nothing of the build, and is not remembered
        raise
    except RuntimeError as error:
        logger.warning("on %s all operands of GEMMs are widened to fp32, which takes longer: %s", device, error)
        return False
    return True


@contextmanager
def full_precision(tensor: Tensor) -> Iterator[None]:
    """Inside, there is no autocast on the device of `tensor`, and its GEMMs take fp32 as it is and add up nothing in 16
    bits. A compiled "reference" keeps the settings of its user, since a compiler cannot trace how they change, and so
    does the backward pass of any, which is autograd's."""
    device = tensor.device.type
    matmul = None if torch.compiler.is_compiling() else _matmul.get("cuda" if tensor.is_cuda else device)
    with (
        torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext(),
        nullcontext() if matmul is None else matmul.exact(),
    ):
        yield


class _Matmul:
    """The settings of a device's GEMMs, which are global: the first thread in changes them, the last one restores them.

    A CPU with bf16 units may take them for fp32, as `torch.set_float32_matmul_precision("medium")` allows.
    """

    def __init__(self, settings: Any, *names: str) -> None:
        self._settings, self._names = settings, ("fp32_precision", *names)
        self._lock, self._inside, self._before = threading.Lock(), 0, dict[str, Any]()

    @contextmanager
    def exact(self) -> Iterator[None]:
        with self._lock:
            self._inside += 1
            for name in self._names if self._inside == 1 else ():
                before: Any = getattr(self._settings, name)
                exact: Any = "ieee" if name == "fp32_precision" else False
                if before in (exact, "none"):  # nothing is allowed
                    continue
                if exact == "ieee":  # what it inherits from a more general setting, it shall inherit again
                    self._settings.fp32_precision = "none"
                    before = "none" if self._settings.fp32_precision == before else before
                elif name.endswith("_reduction"):
                    # The second of the pair allows split-K; setting a bool would set it to True.
                    before = before, getattr(self._settings, f"{name}_split_k")
                    exact = False, before[1]
                self._before[name] = before
                setattr(self._settings, name, exact)
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                while self._before and not self._inside:
                    setattr(self._settings, *self._before.popitem())


_matmul = {
    "cpu": _Matmul(torch.backends.mkldnn.matmul),  # type: ignore[attr-defined]
    "cuda": _Matmul(
        torch.backends.cuda.matmul,
        "allow_fp16_accumulation",
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_reduced_precision_reduction",
    ),
}
