"""Targets, checked and without those that are ignored, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_grpo.errors import InputError


def clean_targets(targets: Tensor, *, ignore_index: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """(which targets are not `ignore_index`, the targets with 0 in the place of those that are).

    Raises:
        InputError: a target is out of range; on a GPU, an assertion of the device. A compiled graph does not look.
    """
    kept = targets != ignore_index
    cleaned = targets * kept
    if not torch.compiler.is_compiling():
        want = f"want 0 <= target < V={vocab_size}, or ignore_index={ignore_index}"
        allowed = cleaned == cleaned.clamp(0, vocab_size - 1)
        if targets.is_cuda:
            torch._assert_async(allowed.all(), f"a target is out of range; {want}")
        elif not allowed.all():
            at = (~allowed).nonzero()[0].tolist()
            raise InputError(f"got target {cleaned[tuple(at)].item()} at {at}; {want}")
    return kept, cleaned
