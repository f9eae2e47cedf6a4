"""Three ways through the head, by what is asked for; `_ops.py` chooses. U = 2*N*D*V FLOP, one GEMM over the head.

- `forward`, 1U: log-probs and entropy. On a GPU one Triton kernel, from which no logit reaches memory; elsewhere, and
  where `backward` will follow, tile by tile, each folded into O(N) statistics.
- `backward`, 1U for the logits again and 1U for each of dH and dW: every tile turns into d-logits where it lies. Rows
  whose upstream gradient is zero take no part.
- `forward_with_direction`, 2U: with the head frozen, d log p / d h needs nothing from upstream, so it is taken on the
  way and the backward pass is a product. It is the recurrence of attention with W as keys and values: with
  e_v = e^(z_v - m) for every token but the target t, and s their sum, folded in tile by tile and rescaled whenever m
  grows,

      d log p / d h = logit_scale / temperature * (1 - p) * (slope_t w_t - sum_v e_v slope_v w_v / s)

  where slope is the derivative of the soft cap. 1 - p is a factor here: confident tokens lose nothing to cancellation.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_grpo import planner
from fused_grpo.head import INVARIANT_ROWS, Head, full_precision, local_targets, weighted_sum_into
from fused_grpo.head_gradients import HeadGradients, apply_factors_, softmax_factors
from fused_grpo.statistics import RowState, adrift, finish_rows, merge_rows, start_rows

# fp16 ends at 2^16: the largest weight or gradient goes near 2^10, so that 2^-34 of it is still a number.
_FP16_EXPONENT = 10

# What the forward kernel leaves per row until it is merged: three numbers for each of at most 64 splits.
_SPLIT_BYTES = 64 * 3 * 4


class Statistics(NamedTuple):
    """Of each row, [N] in the dtype of accumulators: what is asked for, and what a backward pass needs besides."""

    logprobs: Tensor
    entropy: Tensor | None
    shift: Tensor
    total: Tensor


def forward(head: Head, passes: ModuleType, *, entropy: bool, chunk_bytes: int | None = None, **how: Any) -> Statistics:
    """Log-probs, the entropy if asked for, and what a backward pass needs of the rows; `how` as in `fold`."""
    if _in_kernel(passes, **how) and _one_launch(head, chunk_bytes):
        with full_precision(head.hidden):
            logprobs, entropies, state = _launch(head, passes, entropy=entropy)
        return Statistics(logprobs, entropies, state.shift, state.total)
    return finish(fold(head, passes, entropy=entropy, chunk_bytes=chunk_bytes, **how), entropy=entropy)


def fold(
    head: Head,
    passes: ModuleType,
    *,
    entropy: bool,
    chunk_bytes: int | None = None,
    batch_invariant: bool = False,
    wanted: dict[str, bool] | None = None,
    anchored: bool = True,
) -> RowState:
    """What is known of the rows once every logit of this head is folded in, `anchored` where they can be.

    Where gradients are `wanted` of `backward`, the tiles are those that it will make, so that both see the same logits:
    another GEMM rounds otherwise, and a token that is all but certain has no 1 - p to make light of that.
    """
    with full_precision(head.hidden):
        if _in_kernel(passes, batch_invariant=batch_invariant, wanted=wanted):
            return _fold_by_launches(head, passes, entropy=entropy, chunk_bytes=chunk_bytes)
        # With tiles of one size for every N, no GEMM and no sum can choose another order.
        num_rows = INVARIANT_ROWS if batch_invariant else None
        weight_gradient = wanted is not None and wanted["weight"] and not batch_invariant
        # Across rows that lie side by side, sums are vectorised: theirs would depend on how many there are.
        columns = in_columns(head, passes) and not batch_invariant
        shape = head.tile_shape(chunk_bytes, num_rows=num_rows, weight_gradient=weight_gradient, in_columns=columns)
        count = len(head.targets)
        pad = batch_invariant and count > 0
        padding = -count % shape.rows if pad else 0
        anchored = anchored and not entropy and columns
        state = start_rows(count + padding, dtype=head.dtype, device=head.hidden.device)
        how: dict[str, Any] = {"anchored": True} if anchored else {"entropy": entropy}
        for tile in head.tiles(shape, pad=pad):
            passes.fold_tile_(tile.logits, tile.targets, state.rows(tile.rows), **tile.arguments, **how)
        state = state.rows(slice(count))
        lost = adrift(state) if anchored else None
        if lost is not None:
            del tile  # its memory is free for the tiles that come now
            options: dict[str, Any] = {"entropy": False, "chunk_bytes": chunk_bytes, "wanted": wanted}
            state.put(lost, fold(head.select(lost), passes, **options, anchored=False))
        return state


def in_columns(head: Head, passes: ModuleType) -> bool:
    """Whether the columns of tiles should be in one piece: what GEMMs of a CPU, and row passes in torch, like.

    Those are also who can have anchors: a GPU would have to wait for the answer whether they hold.
    """
    return head.hidden.device.type == "cpu" and takes_weights(head, passes)


def _in_kernel(passes: ModuleType, *, batch_invariant: bool = False, wanted: dict[str, bool] | None = None) -> bool:
    """Whether the kernel that needs no tiles serves: its rows are batch-invariant by themselves."""
    return hasattr(passes, "logprob_forward") and (batch_invariant or wanted is None)


def finish(state: RowState, *, entropy: bool) -> Statistics:
    logprobs, entropies = finish_rows(state)
    return Statistics(logprobs, entropies if entropy else None, state.shift, state.total)


def _launch(
    head: Head, passes: ModuleType, rows: slice = slice(None), columns: slice = slice(None), *, entropy: bool
) -> tuple[Tensor, Tensor | None, RowState]:
    """The kernel that needs no tiles, for some rows and a stretch of the vocabulary."""
    weight = head.weight[columns].to(head.hidden.dtype)
    targets = head.targets[rows] if columns == slice(None) else local_targets(head.targets[rows], columns)
    options = {**head.row_arguments(rows, columns), "entropy": entropy}
    logprobs, entropies, state = passes.logprob_forward(head.hidden[rows], weight, targets, **options)
    return logprobs, entropies, RowState(*state)


def _one_launch(head: Head, chunk_bytes: int | None) -> bool:
    return head.weight.dtype == head.hidden.dtype and len(head.targets) <= _launch_rows(chunk_bytes)


def _launch_rows(chunk_bytes: int | None) -> int:
    return max(1, planner.budget(chunk_bytes) // 2 // _SPLIT_BYTES)


def _fold_by_launches(head: Head, passes: ModuleType, *, entropy: bool, chunk_bytes: int | None) -> RowState:
    """A weight of another dtype is cast by stretches of the vocabulary, each once."""
    vocab_size, hidden_size = head.weight.shape
    cast = head.weight.dtype != head.hidden.dtype
    cast_rows = max(1, planner.budget(chunk_bytes) // 2 // (hidden_size * head.hidden.dtype.itemsize))
    parts = []
    for columns in planner.chunks(vocab_size, cast_rows if cast else vocab_size):
        blocks = (
            torch.stack(_launch(head, passes, rows, columns, entropy=entropy)[2])
            for rows in planner.chunks(len(head.targets), _launch_rows(chunk_bytes))
        )
        parts.append(torch.cat(list(blocks), 1))
    return merge_rows(RowState(*torch.stack(parts, 1)))


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
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias, where wanted, recomputing the logits tile by tile."""
    index = rows_of(grad_logprobs != 0 if grad_entropy is None else (grad_logprobs != 0) | (grad_entropy != 0))
    head = head.select(index)
    if index is not None:
        statistics = Statistics(*(None if x is None else x[index] for x in statistics))  # type: ignore[arg-type]
        grad_logprobs, grad_entropy = grad_logprobs[index], None if grad_entropy is None else grad_entropy[index]
    logprobs, entropy, shift, total = statistics
    shape = head.tile_shape(chunk_bytes, weight_gradient=wanted["weight"], in_columns=in_columns(head, passes))
    upstream = grad_logprobs.abs() if grad_entropy is None else grad_logprobs.abs() + grad_entropy.abs()
    scale = power_of_two_scale(head, upstream, exponent=_FP16_EXPONENT)
    gradients = HeadGradients(head, shape, **wanted, scale=scale, hidden_dtype=hidden_dtype)
    grad_logprobs, grad_entropy = (None if x is None else gradients.scaled(x) for x in (grad_logprobs, grad_entropy))  # type: ignore[assignment]
    with full_precision(head.hidden):
        for tile in head.tiles(shape) if len(head.weight) else ():
            rows = tile.rows
            if grad_entropy is None and takes_weights(head, passes):
                weights = passes.weights_(tile.logits, tile.targets, maximum=shift[rows], **tile.arguments)
                if tile.columns.start == 0:  # once for a row group, not for each of its tiles
                    options = {"logprobs": logprobs[rows], "total": total[rows], "upstream": grad_logprobs[rows]}
                    factors = softmax_factors(head, tile, head.targets[rows], **options)
                gradients.add(tile, weights, factors)
                continue
            dlogits = passes.logits_gradient_(
                tile.logits,
                tile.targets,
                maximum=shift[rows],
                total=total[rows],
                logprobs=logprobs[rows],
                entropy=None if grad_entropy is None or entropy is None else entropy[rows],
                grad_logprobs=grad_logprobs[rows],
                grad_entropy=None if grad_entropy is None else grad_entropy[rows],
                **tile.arguments,
                dtype=head.gemm_dtype,
            )
            gradients.add(tile, dlogits)
    return gradients.finish()


def takes_weights(head: Head, passes: ModuleType) -> bool:
    """Whether a gradient without an entropy's comes from the softmax's weights: where GEMMs take them as they are."""
    return hasattr(passes, "weights_") and head.gemm_dtype == head.dtype


def power_of_two_scale(head: Head, upstream: Tensor, *, exponent: int) -> Tensor | None:
    """What brings the largest of d-logits near 2^exponent, into the range of fp16, whose smallest number is 6e-8.

    `upstream` [N] is the size of the gradients that arrive at each row. Other dtypes need no scale.
    """
    if head.gemm_dtype != torch.float16 or not len(upstream):
        return None
    largest = (upstream * abs(head.logit_scale) / head.temperature).amax()
    return torch.exp2(exponent - torch.ceil(torch.log2(largest.clamp_min(torch.finfo(largest.dtype).tiny))))


def rows_of(mask: Tensor) -> Tensor | None:
    """The indices of the rows in `mask` [N], or None where all are in it.

    On a GPU this waits for the mask, once; while a CUDA graph is captured nothing can wait, so all rows are taken.
    """
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    index = mask.nonzero()[:, 0]
    return None if len(index) == len(mask) else index


def forward_with_direction(
    head: Head, passes: ModuleType, *, entropy: bool, chunk_bytes: int | None = None
) -> tuple[Statistics, Tensor]:
    """`forward`, and d log p / d hidden [N, D] in the dtype of accumulators."""
    allocate = torch.empty_like if head.index is None else torch.zeros_like
    direction = allocate(head.hidden, dtype=head.dtype)
    anchored = not entropy and in_columns(head, passes)
    state = _fold_direction_(direction, head, passes, entropy=entropy, chunk_bytes=chunk_bytes, anchored=anchored)
    lost = adrift(state) if anchored else None
    if lost is not None:
        options: dict[str, Any] = {"entropy": False, "chunk_bytes": chunk_bytes, "anchored": False}
        state.put(lost, _fold_direction_(direction, head.select(lost), passes, **options))
    return finish(state, entropy=entropy), direction


def _fold_direction_(
    direction: Tensor, head: Head, passes: ModuleType, *, entropy: bool, chunk_bytes: int | None, anchored: bool
) -> RowState:
    """The state of the head's rows, whose `direction` is written to its [N, D]."""
    state = start_rows(len(head.targets), dtype=head.dtype, device=head.hidden.device)
    shape = head.tile_shape(chunk_bytes, in_columns=in_columns(head, passes))
    scale = 2.0**_FP16_EXPONENT if head.gemm_dtype == torch.float16 else 1.0
    how: dict[str, Any] = {"anchored": True} if anchored else {"entropy": entropy}
    how |= {"weights": head.gemm_dtype, "weights_scale": scale}
    sums = direction
    with full_precision(head.hidden):
        for tile in head.tiles(shape):
            rows, later = state.rows(tile.rows), tile.columns.start > 0
            if not later:
                sums = direction[tile.rows] if head.index is None else direction.new_empty(tile.hidden.shape)
            before = rows.shift.clone()
            weights = passes.fold_tile_(tile.logits, tile.targets, rows, **tile.arguments, **how)
            if later and not anchored:
                sums.mul_(torch.exp(before - rows.shift).nan_to_num_(0.0)[:, None])
            weighted_sum_into(sums, weights, tile.weight, accumulate=later)
            if tile.columns.stop == len(head.weight):
                options = {"logprobs": finish_rows(rows)[0], "total": rows.total * scale}
                apply_factors_(sums, head, softmax_factors(head, tile, head.targets[tile.rows], **options))
                if head.index is not None:
                    direction[head.index[tile.rows]] = sums
    return state
