"""The algorithms for log-probs of a head and their gradients. U = 2*N*D*V FLOP, one GEMM over the head.

- `forward`, 1U: log-probs and entropy, by a Triton kernel that writes no logit to memory, or tile by tile.
- `backward`, 1U for recomputed logits and 1U for each of dH and dW. Every tile is overwritten by its softmax weights.
  Rows whose upstream gradient is zero take no part.
- `forward_with_gradient`, 2U: with a frozen head, d log p / d hidden does not depend on the upstream gradient. It is
  computed while a chunk of logits is in memory, and the backward pass is a product.

`_custom_ops.py` chooses between them. The last one, in short:

    for rows of hidden:
        weights, scale, statistics = softmax_weights(rows @ weight.T, targets)    # d log p / d logits = scale * weights
        gradient[rows] = scale * (weights @ weight)
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fused_grpo import chunking, several_targets
from fused_grpo.head import INVARIANT_ROWS, Head, local_targets
from fused_grpo.head_gradients import HeadGradients
from fused_grpo.precision import full_precision
from fused_grpo.statistics import RowState, Statistics, join_rows, merge_rows, with_part

# fp16 ends at 2^16: the largest gradient is scaled near 2^10, so that 2^-34 of it does not underflow.
_FP16_EXPONENT = 10

# The forward kernel writes three numbers per row for each of at most 128 splits, which are merged afterwards.
_SPLIT_BYTES = 128 * 3 * 4


def forward(head: Head, passes: ModuleType, *, entropy: bool, **how: Any) -> Statistics:
    """Log-probs, the entropy on request, and the row statistics for a backward pass; `how` as in `fold`."""
    with full_precision(head.hidden):
        parts = _parts(head, passes, entropy=entropy, **how)
        groups = [several_targets.finish_rows(of_rows, passes, entropy=entropy) for of_rows in parts]
    return Statistics.joined(groups).rows(slice(len(head.targets)))


def fold(head: Head, passes: ModuleType, *, entropy: bool, **how: Any) -> RowState:
    """The state of the rows after all logits of this head.

    Where gradients are `wanted`, the tiles are those of `backward`, so that both compute the same logits: another GEMM
    shape rounds differently, and for an almost certain token the relative error of 1 - p would be large.
    """
    with full_precision(head.hidden):
        groups = [merge_rows(parts) for parts in _parts(head, passes, entropy=entropy, **how)]
    return RowState(*(values[: len(head.targets)] for values in join_rows(groups)))


def _parts(
    head: Head,
    passes: ModuleType,
    *,
    entropy: bool,
    chunk_bytes: int | None = None,
    batch_invariant: bool = False,
    wanted: dict[str, bool] | None = None,
) -> Iterator[list[RowState]]:
    """For each group of rows, their states from each part of their columns."""
    if _in_kernel(head, passes, chunk_bytes, batch_invariant=batch_invariant, wanted=wanted):
        yield from _parts_by_launches(head, passes, entropy=entropy, chunk_bytes=chunk_bytes)
        return
    # With one tile size for every N, all GEMMs and sums have the same order.
    num_rows = INVARIANT_ROWS if batch_invariant else None
    weight_gradient = wanted is not None and wanted["weight"] and not batch_invariant
    memory = head.tile_memory(passes, chunk_bytes, num_rows=num_rows, weight_gradient=weight_gradient)
    parts = list[RowState]()
    for tile in head.tiles(memory, pad=batch_invariant and len(head.targets) > 0):
        parts = with_part(parts, several_targets.row_statistics(tile, passes, entropy=entropy))
        if tile.columns.stop == len(head.weight):
            yield parts
            parts = []


def _in_kernel(
    head: Head, passes: ModuleType, chunk_bytes: int | None, *, batch_invariant: bool, wanted: dict[str, bool] | None
) -> bool:
    """Whether the kernel without tiles is used, for one target per row. Its rows are batch-invariant."""
    if head.targets.ndim == 2 or not hasattr(passes, "logprob_forward"):
        return False
    if batch_invariant:
        return True
    return wanted is None and not (chunk_bytes is None and passes.prefers_tiles(head.hidden))


def _parts_by_launches(
    head: Head, passes: ModuleType, *, entropy: bool, chunk_bytes: int | None
) -> Iterator[list[RowState]]:
    """The states by the kernel without tiles. A weight of another dtype is cast by vocabulary slices, each once."""
    vocab_size, hidden_size = head.weight.shape
    room = (chunking.DEFAULT_TILE_BYTES if chunk_bytes is None else chunk_bytes) // 2
    cast = head.weight.dtype != head.hidden.dtype
    most_rows, most_columns = room // _SPLIT_BYTES, room // (hidden_size * head.hidden.dtype.itemsize)
    parts = list[RowState]()
    for columns in chunking.chunks(vocab_size, max(1, most_columns) if cast else vocab_size):
        weight = head.weight[columns].to(head.hidden.dtype)
        targets = local_targets(head.targets, columns) if cast else head.targets
        groups = []
        for rows in chunking.chunks(len(targets), max(1, most_rows)):
            options = {**head.row_arguments(rows, columns), "entropy": entropy}
            groups.append(RowState(*passes.logprob_forward(head.hidden[rows], weight, targets[rows], **options)[2]))
        parts = with_part(parts, join_rows(groups))
    yield parts


def backward(
    head: Head,
    passes: ModuleType,
    statistics: Statistics,
    *,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    wanted: dict[str, bool],
    chunk_bytes: int | None = None,
    hidden_dtype: torch.dtype | None = None,
    rounded: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias, where wanted, recomputing the logits tile by tile.

    `grad_logprobs` has the targets' shape. Unless `rounded`, dW stays in the dtype of its accumulator.
    """
    some = several_targets.rows_with(grad_logprobs != 0)
    index = rows_of(some if grad_entropy is None else some | (grad_entropy != 0))
    head = head.select(index)
    if index is not None:
        statistics, grad_logprobs = statistics.rows(index), grad_logprobs[index]
        grad_entropy = None if grad_entropy is None else grad_entropy[index]
    scale = power_of_two_scale(head, grad_logprobs, grad_entropy, exponent=_FP16_EXPONENT)
    targets = None
    if grad_logprobs.ndim == 2:
        scaled = (g if g is None or scale is None else g * scale for g in (grad_logprobs, grad_entropy))
        head, targets = several_targets.known_targets(head, statistics, *scaled)  # type: ignore[arg-type]
    memory = head.tile_memory(passes, chunk_bytes, weight_gradient=wanted["weight"])
    one_group = len(memory) >= len(head.targets)
    how: dict[str, Any] = {**wanted, "scale": scale, "hidden_dtype": hidden_dtype, "rounded": rounded}
    gradients = HeadGradients(head, one_group=one_group, **how)
    with full_precision(head.hidden):
        for tile in head.tiles(memory) if len(head.weight) else ():
            rows = tile.rows
            if targets is None:
                of_entropy = None if grad_entropy is None else grad_entropy[rows]
                upstream = {"grad_logprobs": grad_logprobs[rows], "grad_entropy": of_entropy}
                gradients.add_known(tile, passes, statistics.rows(rows), **upstream)  # type: ignore[arg-type]
            else:
                of_targets = several_targets.logits_gradient_(tile, passes, targets.rows(rows), dtype=head.gemm_dtype)
                gradients.add_gradient(tile, of_targets)
    return gradients.finish()


def forward_with_gradient(
    head: Head, passes: ModuleType, *, entropy: bool, chunk_bytes: int | None = None
) -> tuple[Statistics, Tensor, Tensor]:
    """(`forward`, d log p / d hidden [N, D] in the dtype of accumulators, its targets [N]: of K, the largest)."""
    memory, ones = head.chunk_memory(passes, chunk_bytes), torch.ones_like(head.temperature)
    scale = power_of_two_scale(head, ones, exponent=_FP16_EXPONENT)
    alone = {"hidden": True, "weight": False, "bias": False}
    gradients = HeadGradients(head, one_group=False, **alone, scale=scale, hidden_dtype=head.dtype)
    groups, largest = [], []
    with full_precision(head.hidden):
        for tile in head.tiles(memory):
            upstream, below = ones[tile.rows], None
            if tile.targets.ndim == 2:
                tile, below = several_targets.largest_target(tile)
            if head.takes_weights:
                options = {"entropy": entropy, "dtype": head.gemm_dtype, **tile.arguments}
                weights, factor, known = passes.softmax_weights_(tile.logits, tile.targets, **options)
                statistics = Statistics(*known)
                gradients.add_weights(tile, passes, weights, factor, upstream)
            else:
                state = passes.row_statistics(tile.logits, tile.targets, entropy=entropy, **tile.arguments)
                statistics = Statistics(*passes.finish_rows([state], entropy=entropy))
                gradients.add_known(tile, passes, statistics, grad_logprobs=upstream)
            groups.append(statistics if below is None else several_targets.for_each_target(statistics, below))
            largest.append(tile.targets)
    (gradient, _, _) = gradients.finish()
    assert gradient is not None
    return Statistics.joined(groups), gradient, torch.cat(largest)


def power_of_two_scale(head: Head, *upstream: Tensor | None, exponent: int) -> Tensor | None:
    """The scale that brings the largest d-logit near 2^exponent: the smallest number of fp16 is 6e-8.

    `upstream` are the gradients of the rows, [N] or [N, K]. Other dtypes need no scale: None.
    """
    if head.takes_weights or not len(head.targets):
        return None
    sizes = [g.abs() if g.ndim == 1 else g.abs().sum(1) for g in upstream if g is not None]
    largest = (torch.stack(sizes).sum(0) * abs(head.logit_scale) / head.temperature).amax()
    return torch.exp2(exponent - torch.ceil(torch.log2(largest.clamp_min(torch.finfo(largest.dtype).tiny))))


def may_synchronize(tensor: Tensor) -> bool:
    """Whether reading values of the tensor is allowed: not while a CUDA graph is captured."""
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def rows_of(mask: Tensor) -> Tensor | None:
    """The indices of the rows in `mask` [N], or None for all rows.

    On a GPU this synchronizes once. A CUDA graph under capture cannot synchronize, so all rows are taken.
    """
    if not may_synchronize(mask):
        return None
    index = mask.nonzero()[:, 0]
    return None if len(index) == len(mask) else index
