"""The log-probs and entropies of rows from the statistics of all parts of their columns.

A part is a split of `logprob_forward`, a tile of `row_statistics`, or a shard of the vocabulary; see `_tiles.py`.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device import launching_on
from ._tiles import finish_row, merge_statistics

State = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of rows over some of their columns: shift, total, `weighted` and the target's logit, each [R] fp32."""
Statistics = tuple[Tensor, Tensor | None, Tensor, Tensor]
"""Of whole rows: log-probs, entropies or None, shift and total, each [R] fp32."""

ROWS_PER_PROGRAM = 16
ROW_VECTORS = ["target_logit", "maximum", "total", "weighted"]
ROW_VECTORS += ["logprobs", "entropy", "merged_maximum", "merged_total", "merged_weighted"]


@triton.jit(do_not_specialize=["N", "splits"], do_not_specialize_on_alignment=ROW_VECTORS)
def _finish_rows_kernel(
    target_logit,
    maximum,
    total,
    weighted,
    logprobs,
    entropy,
    merged_maximum,
    merged_total,
    merged_weighted,
    N,
    splits,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid: tiles of ROWS rows. A program reads all splits of its rows, and no other program writes their results."""
    ENTROPY: tl.constexpr = weighted is not None
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_exists = rows < N
    split = tl.arange(0, SPLITS)[:, None]
    exists = (split < splits) & row_exists[None, :]
    statistics = split.to(tl.int64) * N + rows[None, :]
    part_maximum = tl.load(maximum + statistics, mask=exists, other=float("-inf"))
    part_total = tl.load(total + statistics, mask=exists, other=0.0)
    part_weighted = part_total
    if ENTROPY:
        part_weighted = tl.load(weighted + statistics, mask=exists, other=0.0)
    row_maximum, row_total, row_weighted = merge_statistics(part_maximum, part_total, part_weighted, ENTROPY)
    row_target = tl.load(target_logit + rows, mask=row_exists, other=0.0)
    row_logprob, row_entropy = finish_row(row_maximum, row_total, row_weighted, row_target, ENTROPY)
    tl.store(logprobs + rows, row_logprob, mask=row_exists)
    tl.store(merged_maximum + rows, row_maximum, mask=row_exists)
    tl.store(merged_total + rows, row_total, mask=row_exists)
    if ENTROPY:
        tl.store(merged_weighted + rows, row_weighted, mask=row_exists)
        tl.store(entropy + rows, row_entropy, mask=row_exists)


def finish_rows(parts: Sequence[State], *, entropy: bool) -> Statistics:
    """The results of rows from the statistics of all their columns.

    Args:
        parts: for each part (shift, total, weighted, target logit), [R] fp32 each, as `row_statistics` returns them.
        entropy: also compute the entropy of each row; then all parts need `weighted`.

    Returns:
        (logprobs, entropy or None, shift, total), each [R] fp32, entropies in nats; -inf for a row whose target is in
        no part.

    Memory: 4 numbers per row and part where there is more than one.
    """
    if len(parts) == 1:
        shift, total, weighted, target_logit = parts[0]
    else:
        shift, total, weighted, target_logits = map(torch.stack, zip(*parts, strict=True))
        target_logit = target_logits.amax(0)
    logprobs, entropies, state = finish_splits(target_logit, shift, total, weighted if entropy else None)
    return logprobs, entropies, *state[:2]


def finish_splits(
    target_logit: Tensor, maximum: Tensor, total: Tensor, weighted: Tensor | None
) -> tuple[Tensor, Tensor | None, State]:
    """(logprobs [N], entropy [N] if the parts are `weighted`, the merged state) from parts [P, N], or [N], of rows."""
    N, parts = target_logit.shape[0], 1 if maximum.ndim == 1 else maximum.shape[0]
    # An allocation costs more than a view.
    vectors = torch.empty((3 if weighted is None else 5, N), dtype=torch.float32, device=maximum.device).unbind()
    logprobs, shift, merged_total = vectors[:3]
    merged_weighted, entropies = (merged_total, None) if weighted is None else vectors[3:]
    results = logprobs, entropies, (shift, merged_total, merged_weighted, target_logit)
    if N == 0:
        return results
    # Few parts share a binary: how many tiles a row has depends on N.
    options = {"SPLITS": max(8, 1 << (parts - 1).bit_length()), "ROWS": ROWS_PER_PROGRAM}
    inputs = target_logit, maximum, total, weighted
    outputs = logprobs, entropies, shift, merged_total, merged_weighted
    # If a product were fused into the sum over two threads, the two threads would round differently.
    with launching_on(maximum.device):
        _finish_rows_kernel[(-(-N // ROWS_PER_PROGRAM),)](
            *inputs, *outputs, N, parts, **options, enable_fp_fusion=False
        )
    return results
