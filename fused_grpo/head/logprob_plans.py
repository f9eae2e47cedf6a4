"""The algorithms for log-probs of a head and their gradients. U = 2*N*D*V FLOP, one GEMM over the head.

- `forward`, 1U: log-probs and entropy, by a Triton kernel that writes no logit to memory, or tile by tile.
- `backward`, 1U for recomputed logits and 1U for each of dH and dW. Every tile is overwritten by its softmax weights.
  Rows whose upstream gradient is zero take no part.
- `forward_with_weights`, 1U, and `backward_with_weights`, 2U: the softmax weights of all rows are kept, where the
  budget has room for them and they take no more memory than their logits in the forward pass. The backward pass is two
  products.
- `forward_with_gradient`, 2U: with a frozen head, d log p / d hidden does not depend on the upstream gradient. It is
  computed while a chunk of logits is in memory, and the backward pass is a product.

`registered_ops.py` chooses between them. The last one, in short:

    for rows of hidden:
        weights, scale, statistics = softmax_weights(rows @ weight.T, targets)    # d log p / d logits = scale * weights
        gradient[rows] = scale * (weights @ weight)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fused_grpo._maths.moments import RowsMoments
from fused_grpo._maths.statistics import (
    MOST_PARTS,
    RowState,
    Statistics,
    Upstream,
    full_precision,
    joined,
    merge_rows,
)
from fused_grpo.head import several_targets
from fused_grpo.head.checks import leaves_out_rows, may_synchronize
from fused_grpo.head.head import (
    INVARIANT_ROWS,
    NOTHING,
    Gradients,
    Head,
    HeadGradients,
    Wanted,
    local_targets,
    softmax_weights_of,
)
from fused_grpo.passes import buffers
from fused_grpo.passes.protocol import LogprobForward, RowPasses, SoftmaxWeightsForward

# fp16 ends at 2^16: the largest gradient is scaled near 2^10, so that 2^-34 of it does not underflow.
_FP16_EXPONENT = 10
_LARGEST_POWER = 100  # its inverse is a normal number

# The forward kernel writes three numbers per row for each of at most 128 splits, which are merged afterwards.
_SPLIT_BYTES = 128 * 3 * 4


class Options(NamedTuple):
    """How log-probs are computed.

    Where gradients are wanted and no weights are kept, the tiles are those of `backward`, so that both compute the same
    logits: another GEMM shape rounds differently, and for an almost certain token the relative error of 1 - p would be
    large.
    """

    entropy: bool
    chunk_bytes: int | None = None
    batch_invariant: bool = False
    wanted: Wanted = NOTHING
    moments: RowsMoments | None = None
    """Takes those of all rows from the logits of a forward pass, for which there must be tiles of logits."""


class Kept(NamedTuple):
    """What a forward pass of R rows keeps for the backward pass."""

    values: Tensor
    """d log p / d hidden [R, D] in the dtype of accumulators, or softmax weights [N, V], those of the rows first."""
    targets: Tensor | None
    """[R], the targets that they are of: of K, the largest. None for weights of rows with one target."""
    scale: Tensor | None = None
    """[R], of softmax weights."""


def forward(head: Head, passes: RowPasses, options: Options) -> Statistics:
    """Log-probs, the entropy on request, and the row statistics for a backward pass."""
    with full_precision(head.hidden):
        kernel = _kernel(head, passes, options)
        most = _room(options) // _SPLIT_BYTES  # rows of one launch
        if kernel is not None and head.weight.dtype == head.hidden.dtype and head.targets.shape[0] <= most:
            targets, transform = head.targets, head.transform()
            rows = head.hidden_of(), head.weight, targets
            logprobs, entropy, state = kernel(*rows, entropy=options.entropy, **transform)
            return Statistics(logprobs, entropy, *state[:2])
        parts = _parts(head, passes, options)
        groups = [several_targets.finish_rows(row_parts, passes, entropy=options.entropy) for row_parts in parts]
    return joined(groups).rows(slice(len(head.targets)))


def fold(head: Head, passes: RowPasses, options: Options) -> RowState:
    """The state of the rows after all logits of this head."""
    with full_precision(head.hidden):
        groups = [merge_rows(parts) for parts in _parts(head, passes, options)]
    return RowState(*(values[: len(head.targets)] for values in joined(groups)))


def _parts(head: Head, passes: RowPasses, options: Options) -> Iterator[list[RowState]]:
    """For each group of rows, their states from each part of their columns."""
    if (kernel := _kernel(head, passes, options)) is not None:
        yield from _parts_by_launches(head, kernel, options)
        return
    # With one tile size for every N, all GEMMs and sums have the same order.
    num_rows = INVARIANT_ROWS if options.batch_invariant else None
    weight_gradient = options.wanted.weight and not options.batch_invariant
    memory = tile_memory(head, passes, options.chunk_bytes, num_rows=num_rows, weight_gradient=weight_gradient)
    parts = list[RowState]()
    for tile in head.tiles(memory, pad=options.batch_invariant and len(head.targets) > 0):
        parts.append(several_targets.row_statistics(tile, passes, entropy=options.entropy, moments=options.moments))
        if len(parts) == MOST_PARTS:
            parts = [merge_rows(parts)]
        if tile.columns.stop == len(head.weight):
            yield parts
            parts = []


def tile_memory(
    head: Head,
    passes: RowPasses,
    chunk_bytes: int | None,
    *,
    num_rows: int | None = None,
    weight_gradient: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """[R, C] for tiles that need not be whole rows; for `num_rows` rows if given, else for those of the head."""
    column_bytes = head.hidden.dtype.itemsize if head.weight.dtype != head.hidden.dtype else 0
    column_bytes += head.dtype.itemsize if weight_gradient and not head.writes_weight_gradient else 0
    sizes = head.sizes(weight_gradient=weight_gradient)._replace(column_bytes=head.hidden.shape[1] * column_bytes)
    shape = buffers.tile_shape(sizes if num_rows is None else sizes._replace(num_rows=num_rows), chunk_bytes)
    return passes.empty_tile(*shape, dtype=dtype or head.dtype, device=head.hidden.device)


def _kernel(head: Head, passes: RowPasses, options: Options) -> LogprobForward | None:
    """The kernel without tiles where it is used, for one target per row. Its rows are batch-invariant."""
    if head.targets.ndim == 2 or options.moments or (any(options.wanted) and not options.batch_invariant):
        return None
    prefers_tiles = options.chunk_bytes is None and not options.batch_invariant and passes.prefers_tiles(head.hidden)
    return None if prefers_tiles else passes.logprob_forward


def _room(options: Options) -> int:
    """Bytes for the numbers of splits, and as many for a slice of a weight that is cast."""
    return (buffers.DEFAULT_TILE_BYTES if options.chunk_bytes is None else options.chunk_bytes) // 2


def _parts_by_launches(head: Head, kernel: LogprobForward, options: Options) -> Iterator[list[RowState]]:
    """The states by the kernel without tiles. A weight of another dtype is cast by vocabulary slices, each once."""
    (vocab_size, hidden_size), room = head.weight.shape, _room(options)
    cast = head.weight.dtype != head.hidden.dtype
    most_rows, most_columns = room // _SPLIT_BYTES, room // (hidden_size * head.hidden.dtype.itemsize)
    parts = list[RowState]()
    for columns in buffers.chunks(vocab_size, max(1, most_columns) if cast else vocab_size):
        weight = head.weight[columns].to(head.hidden.dtype)
        targets = local_targets(head.targets, columns) if cast else head.targets
        groups = []
        for rows in buffers.chunks(len(targets), max(1, most_rows)):
            transform = head.transform(rows, columns)
            state = kernel(head.hidden_of(rows), weight, targets[rows], entropy=options.entropy, **transform)[2]
            groups.append(RowState(*state))
        parts.append(joined(groups))
        if len(parts) == MOST_PARTS:
            parts = [merge_rows(parts)]
    yield parts


def backward(
    head: Head,
    passes: RowPasses,
    statistics: Statistics,
    upstream: Upstream,
    wanted: Wanted,
    *,
    chunk_bytes: int | None = None,
    hidden_dtype: torch.dtype | None = None,
    rounded: bool = True,
) -> Gradients:
    """Gradients of hidden, weight and bias, where wanted, recomputing the logits tile by tile.

    `upstream.logprobs` has the targets' shape. Unless `rounded`, dW stays in the dtype of its accumulator.
    """
    grad_logprobs, grad_entropy = upstream
    has_gradient = several_targets.rows_with(grad_logprobs != 0)
    has_gradient = has_gradient if grad_entropy is None else has_gradient | (grad_entropy != 0)
    if head.index is None and not leaves_out_rows(has_gradient):
        head = head.blank(has_gradient)
    elif (index := rows_of(has_gradient)) is not None:
        head, statistics, upstream = head.select(index), statistics.rows(index), upstream.rows(index)
    scale = power_of_two_scale(head, *upstream, exponent=_FP16_EXPONENT)
    targets = None
    if upstream.logprobs.ndim == 2:
        scaled = Upstream(*(g if g is None or scale is None else g * scale for g in upstream))  # type: ignore[arg-type]
        head, g = several_targets.distinct_targets(head, scaled.logprobs)
        targets = several_targets.known_targets(head.targets, statistics, g, scaled.entropy)
    memory = tile_memory(head, passes, chunk_bytes, weight_gradient=wanted.weight)
    one_group = len(memory) >= len(head.targets)
    gradients = HeadGradients(
        head, wanted, one_group=one_group, scale=scale, hidden_dtype=hidden_dtype, rounded=rounded
    )
    with full_precision(head.hidden):
        for tile in head.tiles(memory) if len(head.weight) else ():
            rows = tile.rows
            if targets is None:
                gradients.add_known(tile, passes, statistics.rows(rows), upstream.rows(rows))
            else:
                gradient = several_targets.logits_gradient_(tile, passes, targets.rows(rows), dtype=head.gemm_dtype)
                gradients.add_logits_gradient(tile, gradient)
    return gradients.finish()


def _softmax_weights_kernel(
    head: Head, passes: RowPasses, options: Options, wanted: Wanted
) -> SoftmaxWeightsForward | None:
    """`Head.softmax_weights_kernel` where there is one and no logits are needed."""
    if options.moments or passes.softmax_weights_forward is None:
        return None
    return head.softmax_weights_kernel(passes, options.chunk_bytes, wanted)


def keeps_weights(head: Head, passes: RowPasses, options: Options) -> bool:
    """Whether the softmax weights of all rows are kept for the backward pass; no value decides."""
    if options.batch_invariant or not (options.wanted.weight or options.wanted.bias) or not head.gemm_on_softmax:
        return False
    # Logits become weights in place, or a kernel writes weights without logits; narrower copies would come on top.
    if head.gemm_dtype != head.dtype and _softmax_weights_kernel(head, passes, options, NOTHING) is None:
        return False
    if head.targets.ndim == 2 and head.softcap is not None:  # whose slopes at the targets need logits
        return False
    room, _ = buffers.kept_budgets(options.chunk_bytes, head.hidden.device)
    sizes = head.sizes(head.gemm_dtype, gathers=True)
    row_bytes = sizes.vocab_size * sizes.itemsize + sizes.row_bytes
    return sizes.num_rows * row_bytes + sizes.once_bytes <= room


def memory_to_keep(head: Head, passes: RowPasses) -> Tensor:
    """[N, V] for the softmax weights of all rows. Where there is no memory, the error says how to do without."""
    shape = head.targets.shape[0], head.weight.shape[0]
    try:
        return passes.empty_tile(*shape, dtype=head.gemm_dtype, device=head.hidden.device)
    except torch.OutOfMemoryError as error:
        error.add_note("log-probs keep softmax weights here; fix: a smaller chunk_bytes, with which they do not")
        raise


def forward_with_weights(head: Head, passes: RowPasses, options: Options, memory: Tensor) -> tuple[Statistics, Kept]:
    """(`forward`, the softmax weights, in `memory` [N, V])."""
    kernel = _softmax_weights_kernel(head, passes, options, NOTHING)
    with full_precision(head.hidden):
        (tile,) = head.tiles(memory, multiply=kernel is None)
        tile, below = several_targets.largest_target(tile)
        _, scale, statistics = softmax_weights_of(
            tile, passes, kernel, entropy=options.entropy, moments=options.moments, dtype=memory.dtype
        )
    kept = Kept(memory, None if below is None else tile.targets, scale)
    return several_targets.for_each_target(statistics, below), kept


def backward_with_weights(
    head: Head,
    passes: RowPasses,
    weights: Tensor,
    scale: Tensor,
    grad_logprobs: Tensor,
    wanted: Wanted,
    *,
    kept: Tensor,
    largest: Tensor,
    chunk_bytes: int | None = None,
) -> Gradients:
    """The gradients from the scale [N] and the weights [N, V] that `forward_with_weights` left of the rows `kept` [N].

    Their weights are the first ones, of the targets `largest` [N]. Those of several targets, and those of the rows that
    have a gradient where others have none, are copied for the products, a tile at a time.
    """
    moved, has_gradient = None, grad_logprobs != 0
    if grad_logprobs.ndim == 2:
        head, grad_logprobs = several_targets.distinct_targets(head, grad_logprobs)
        moved, has_gradient = several_targets.moved_targets(head.targets, largest, grad_logprobs), has_gradient.any(1)
        grad_logprobs = grad_logprobs.sum(1)
        head = head if leaves_out_rows(kept) else head.blank(has_gradient)
    rows, places = _rows_and_places(kept, has_gradient, copied=moved is not None)
    if rows is not None:
        head, scale, grad_logprobs = head.select(rows), scale[rows], grad_logprobs[rows]
        moved = None if moved is None else moved[rows]
    memory = weights = weights if places is not None else weights[: len(head.targets)]
    if places is not None or moved is not None or (wanted.weight and not head.writes_weight_gradient):
        _, budget = buffers.kept_budgets(chunk_bytes, weights.device)
        memory = tile_memory(head, passes, budget, weight_gradient=wanted.weight, dtype=weights.dtype)
    gradients = HeadGradients(head, wanted, one_group=len(memory) >= len(head.targets))
    with full_precision(head.hidden):
        for tile in head.tiles(memory, multiply=False):
            values, upstream = weights[:, tile.columns], grad_logprobs[tile.rows]
            if places is None:
                values = values[tile.rows]
            else:
                values = buffers.gather_rows(values, places[tile.rows], out=tile.logits)
            if moved is None:
                gradients.add_softmax_weights(tile, passes, values, scale[tile.rows], upstream)
            else:
                # 0 for rows without a gradient, whose scale may be NaN.
                factor, _ = passes.scale_hidden(None, scale[tile.rows], upstream)
                torch.mul(values, factor[:, None], out=tile.logits)
                gradients.add_logits_gradient(tile, several_targets.moved_(tile.logits, tile, moved[tile.rows]))
    return gradients.finish()


def _rows_and_places(kept: Tensor, has_gradient: Tensor, *, copied: bool) -> tuple[Tensor | None, Tensor | None]:
    """(the rows of the products, None for all; where their weights are among those kept, None for the first ones)."""
    if not leaves_out_rows(kept):
        return None, None
    kept_rows, gradient_rows = rows_of(kept), rows_of(has_gradient)
    count = len(kept) if kept_rows is None else len(kept_rows)
    # A copy takes about the time of an eighth of the products.
    if gradient_rows is None or (not copied and 8 * len(gradient_rows) > 7 * count):
        return kept_rows, None
    return gradient_rows, kept.cumsum(0)[gradient_rows] - 1


def forward_with_gradient(head: Head, passes: RowPasses, options: Options) -> tuple[Statistics, Kept]:
    """(`forward`, d log p / d hidden)."""
    wanted = Wanted(hidden=True)
    kernel = _softmax_weights_kernel(head, passes, options, wanted)
    dtype, gemm_dtype = head.dtype, head.gemm_dtype
    memory = head.chunk_memory(passes, options.chunk_bytes, wanted, gemm_dtype if kernel else dtype)
    ones = torch.ones_like(head.temperature)
    scale = power_of_two_scale(head, ones, exponent=_FP16_EXPONENT)
    entropy, moments = options.entropy, options.moments
    gradients = HeadGradients(head, wanted, one_group=False, scale=scale, hidden_dtype=dtype)
    groups, largest = [], []
    with full_precision(head.hidden):
        for tile in head.tiles(memory, multiply=kernel is None):
            upstream = ones[tile.rows]
            tile, below = several_targets.largest_target(tile)
            if head.gemm_on_softmax:
                weights, factor, statistics = softmax_weights_of(
                    tile, passes, kernel, entropy=entropy, moments=moments, dtype=gemm_dtype
                )
                gradients.add_softmax_weights(tile, passes, weights, factor, upstream)
            else:
                state = several_targets.row_statistics(tile, passes, entropy=entropy, moments=moments)
                statistics = several_targets.finish_rows([state], passes, entropy=entropy)
                gradients.add_known(tile, passes, statistics, Upstream(upstream, None))
            groups.append(several_targets.for_each_target(statistics, below))
            largest.append(tile.targets)
    (gradient, _, _) = gradients.finish()
    assert gradient is not None
    return joined(groups), Kept(gradient, largest[0] if len(largest) == 1 else torch.cat(largest))


def power_of_two_scale(head: Head, *upstream: Tensor | None, exponent: int) -> Tensor | None:
    """The scale that brings the largest d-logit near 2^exponent: the smallest number of fp16 is 6e-8.

    `upstream` are the gradients of the rows, [N] or [N, K]. Other dtypes need no scale: None.
    """
    if head.gemm_on_softmax or not len(head.targets):
        return None
    sizes = [g.abs() if g.ndim == 1 else g.abs().sum(1) for g in upstream if g is not None]
    largest = (torch.stack(sizes).sum(0) * abs(head.logit_scale) / head.temperature).amax()
    power = exponent - torch.ceil(torch.log2(largest.clamp_min(torch.finfo(largest.dtype).tiny)))
    return torch.exp2(power.clamp_max(_LARGEST_POWER))  # of no gradient at all, too


def rows_of(mask: Tensor) -> Tensor | None:
    """The indices of the rows in `mask` [N], or None for all rows.

    On a GPU this synchronizes once. A CUDA graph under capture cannot synchronize, so all rows are taken.
    """
    if not may_synchronize(mask):
        return None
    index = mask.nonzero()[:, 0]
    return None if len(index) == len(mask) else index
