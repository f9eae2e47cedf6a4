"""Three ways through the head, by what is asked for; `_ops.py` chooses. U = 2*N*D*V FLOP, one GEMM over the head.

- `forward`, 1U: log-probs, entropy and log-sum-exp. On a GPU one Triton kernel, from which no logit reaches memory;
  elsewhere tile by tile, each folded into O(N) statistics.
- `backward`, 1U for the logits again and 1U for each of dH and dW: every tile turns into d-logits where it lies. Rows
  whose upstream gradient is zero take no part.
- `forward_with_direction`, 2U: with the head frozen, d log p / d h needs nothing from upstream, so it is taken on the
  way and the backward pass is a product. It is the recurrence of attention with W as keys and values: with
  e_v = e^(z_v - m) for every token but the target t, and s their sum, folded in tile by tile and rescaled whenever the
  maximum m grows,

      d log p / d h = logit_scale / temperature * (1 - p) * (slope_t w_t - sum_v e_v slope_v w_v / s)

  where slope is the derivative of the soft cap. 1 - p is a factor here: confident tokens lose nothing to cancellation.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from fused_grpo import planner
from fused_grpo.head import INVARIANT_ROWS, Head, HeadGradients, Tile, full_precision, local_targets, weighted_sum_into
from fused_grpo.planner import BLOCK_BYTES
from fused_grpo.statistics import RowState, finish_rows, merge_shards, start_rows

# fp16 ends at 2^16: the largest weight or gradient goes near 2^10, so that 2^-34 of it is still a number.
_FP16_EXPONENT = 10

# What the forward kernel leaves per row until it is merged: three numbers for each of at most 64 splits.
_SPLIT_BYTES = 64 * 3 * 4


class Statistics(NamedTuple):
    """Of each row, [N] in the dtype of accumulators."""

    logprobs: Tensor
    entropy: Tensor | None
    lse: Tensor


def forward(
    head: Head, passes: ModuleType, *, entropy: bool, chunk_bytes: int | None = None, batch_invariant: bool = False
) -> Statistics:
    """Log-probs, log-sum-exp and, if asked for, the entropy."""
    with full_precision(head.hidden):
        if hasattr(passes, "logprob_forward"):
            return _fused_forward(head, passes, entropy=entropy, chunk_bytes=chunk_bytes)
        state = start_rows(len(head.targets), dtype=head.dtype, device=head.hidden.device)
        # With rows and columns of one size for every N, no GEMM can choose another order of summation.
        shape = head.tile_shape(chunk_bytes, num_rows=INVARIANT_ROWS if batch_invariant else None)
        for tile in head.tiles(shape, pad=batch_invariant):
            passes.fold_tile_(tile.logits, tile.targets, state.rows(tile.rows), **tile.arguments, entropy=entropy)
            del tile  # its memory is free again before the rows are finished
        return _finish(state, entropy=entropy)


def _finish(state: RowState, *, entropy: bool) -> Statistics:
    logprobs, entropies, lse = finish_rows(state)
    return Statistics(logprobs, entropies if entropy else None, lse)


def _fused_forward(head: Head, passes: ModuleType, *, entropy: bool, chunk_bytes: int | None) -> Statistics:
    """The kernel that needs no tiles. A weight of another dtype is cast by stretches of the vocabulary, each once."""
    budget, (vocab_size, hidden_size) = planner.budget(chunk_bytes), head.weight.shape
    cast = head.weight.dtype != head.hidden.dtype
    stretch = max(1, budget // 2 // (hidden_size * head.hidden.dtype.itemsize)) if cast else vocab_size
    parts = []
    for columns in planner.chunks(vocab_size, stretch):
        weight, targets = head.weight[columns].to(head.hidden.dtype), local_targets(head.targets, columns)
        blocks = []
        for rows in planner.chunks(len(targets), max(1, budget // 2 // _SPLIT_BYTES)):
            options = {**head.row_arguments(rows, columns), "entropy": entropy}
            blocks.append(passes.logprob_forward(head.hidden[rows], weight, targets[rows], **options))
        parts.append([None if x[0] is None else torch.cat(x) for x in zip(*blocks, strict=True)])
    logprobs, entropies, lse = zip(*parts, strict=True)
    return Statistics(
        *merge_shards(torch.stack(logprobs), torch.stack(entropies) if entropy else None, torch.stack(lse))
    )


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
    logprobs, entropy, lse = statistics
    shape = head.tile_shape(chunk_bytes, weight_gradient=wanted["weight"])
    scale = _gradient_scale(head, grad_logprobs, grad_entropy)
    gradients = HeadGradients(head, shape, **wanted, scale=scale, hidden_dtype=hidden_dtype)
    if scale is not None:
        grad_logprobs, grad_entropy = grad_logprobs * scale, None if grad_entropy is None else grad_entropy * scale
    with full_precision(head.hidden):
        for tile in head.tiles(shape):
            rows = tile.rows
            dlogits = passes.logits_gradient_(
                tile.logits,
                tile.targets,
                lse=lse[rows],
                logprobs=logprobs[rows],
                entropy=None if grad_entropy is None or entropy is None else entropy[rows],
                grad_logprobs=grad_logprobs[rows],
                grad_entropy=None if grad_entropy is None else grad_entropy[rows],
                **tile.arguments,
                dtype=head.gemm_dtype,
            )
            gradients.add(tile, dlogits)
    return gradients.finish()


def _gradient_scale(head: Head, grad_logprobs: Tensor, grad_entropy: Tensor | None) -> Tensor | None:
    """A power of two that brings d-logits into the range of fp16, whose smallest number is 6e-8; others need none."""
    if head.gemm_dtype != torch.float16 or not len(grad_logprobs):
        return None
    upstream = grad_logprobs.abs() if grad_entropy is None else grad_logprobs.abs() + grad_entropy.abs()
    largest = (upstream * abs(head.logit_scale) / head.temperature).amax()
    return torch.exp2(_FP16_EXPONENT - torch.ceil(torch.log2(largest.clamp_min(torch.finfo(largest.dtype).tiny))))


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
    state = start_rows(len(head.targets), dtype=head.dtype, device=head.hidden.device)
    shape, scale = head.tile_shape(chunk_bytes), 2.0**_FP16_EXPONENT if head.gemm_dtype == torch.float16 else 1.0
    allocate = torch.empty_like if head.index is None else torch.zeros_like
    sums = direction = allocate(head.hidden, dtype=head.dtype)
    with full_precision(head.hidden):
        for tile in head.tiles(shape):
            rows, later = state.rows(tile.rows), tile.columns.start > 0
            if not later:
                sums = direction[tile.rows] if head.index is None else direction.new_empty(tile.hidden.shape)
            before = rows.maximum.clone()
            options = {**tile.arguments, "entropy": entropy, "weights": head.gemm_dtype, "weights_scale": scale}
            weights = passes.fold_tile_(tile.logits, tile.targets, rows, **options)
            if later:
                sums.mul_(torch.exp(before - rows.maximum).nan_to_num_(0.0)[:, None])
            weighted_sum_into(sums, weights, tile.weight, accumulate=later)
            if tile.columns.stop == len(head.weight):
                _finish_direction(sums, head, tile, rows.total * scale, finish_rows(rows)[0])
                if head.index is not None:
                    direction[head.index[tile.rows]] = sums
        return _finish(state, entropy=entropy), direction


def _finish_direction(sums: Tensor, head: Head, tile: Tile, total: Tensor, logprobs: Tensor) -> None:
    """The module's formula, in place, from sums = sum_v e_v slope_v w_v [R, D] and total = sum_v e_v [R]."""
    factor = head.logit_scale / head.temperature[tile.rows] * -torch.expm1(logprobs)
    targets, push = head.targets[tile.rows], -factor / total.masked_fill(total == 0.0, 1.0)
    for rows in planner.chunks(len(sums), max(1, BLOCK_BYTES // max(1, sums[:1].nbytes))):
        at_target = head.weight[targets[rows]].to(head.hidden.dtype).to(sums.dtype)
        pull = factor[rows]
        if head.softcap is not None:
            raw = (tile.hidden[rows].to(sums.dtype) * at_target).sum(1)
            raw = raw if head.bias is None else raw + head.bias[targets[rows]]
            e = torch.exp(-2 * (raw * (head.logit_scale / head.softcap)).abs())
            pull = pull * (4 * e / (1 + e).square())
        sums[rows].mul_(push[rows, None]).addcmul_(at_target, pull[:, None])
