"""Targets, checked and without those that are ignored, in one launch instead of six.

Equals
    kept = targets != ignore_index
    (kept, torch.where(kept, targets, 0)), after an assertion that 0 <= targets[kept] < V
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device import launching_on
from .tuning import FUSED_MULTIPLY_ADD

BLOCK, WARPS = 1024, 4


# Without `debug` nothing is asserted.
@triton.jit(
    debug=True,
    do_not_specialize=["N", "V", "ignore_index"],
    do_not_specialize_on_alignment=["targets", "kept", "cleaned"],
)
def _clean_targets_kernel(targets, kept, cleaned, N, V, ignore_index, BLOCK: tl.constexpr):
    """Grid: blocks of targets, whose results a program alone writes."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(targets + at, mask=at < N, other=0)
    is_kept = target != ignore_index
    in_range = (target >= 0) & (target < V)
    tl.device_assert(in_range | (is_kept == 0), "a target is out of range; want 0 <= target < V, or ignore_index")
    tl.store(kept + at, is_kept, mask=at < N)
    tl.store(cleaned + at, tl.where(is_kept, target, 0), mask=at < N)


def clean_targets(targets: Tensor, *, ignore_index: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Which targets count, and all of them with 0 in the place of others.

    Args:
        targets: int64, any shape.
        ignore_index: the target that does not count.
        vocab_size: V; any other target outside of [0, V) is an assertion of the device, as of `torch._assert_async`.

    Returns:
        (bool, int64), both of the shape of `targets`.

    Memory: none.
    """
    targets, count = targets.contiguous(), targets.numel()
    kept, cleaned = torch.empty_like(targets, dtype=torch.bool), torch.empty_like(targets)
    if count:
        with launching_on(targets.device):
            _clean_targets_kernel[(-(-count // BLOCK),)](
                targets,
                kept,
                cleaned,
                count,
                vocab_size,
                ignore_index,
                BLOCK=BLOCK,
                num_warps=WARPS,
                sanitize_overflow=False,
                **FUSED_MULTIPLY_ADD,
            )
    return kept, cleaned
