"""Log-probs of the targets (and the entropy) from a chunk of logits that is in memory anyway.

Equals
    z = softcap(logit_scale * (logits + bias)) / temperature[:, None]
    log_softmax(z)[arange(R), targets]

The chunked plan lets the vendor library write raw h.w for a few rows, reads their statistics here, and turns the same
memory into gradients (`logits_gradient.py`): one read of the chunk each.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device import launching_on
from ._tiles import add_bias, add_tile, finish_row, inverse, logit, start_statistics
from .tuning import row_tile


@triton.jit(do_not_specialize_on_alignment=["targets", "temperature"])
def _row_statistics_kernel(
    logits,
    targets,
    bias,
    temperature,
    logprobs,
    entropy,
    maximum,
    total,
    weighted,
    target_logit,
    V,
    logits_row,
    logits_column,
    logit_scale: tl.float32,
    softcap,
    ENTROPY: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Grid: rows. A program reads one row tile by tile and is alone in writing that row's results."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    target = tl.load(targets + row).to(tl.int32)
    inverse_temperature = inverse(tl.load(temperature + row))
    start = logits + row * logits_row
    row_target, row_maximum, row_total, row_weighted = start_statistics(target)
    for first in range(0, V, BLOCK_V):
        columns = first + tl.arange(0, BLOCK_V)
        inside = (columns < V)[None, :]
        raw = tl.load(start[:, None] + columns.to(tl.int64)[None, :] * logits_column, mask=inside, other=0.0)
        z = logit(add_bias(raw, bias, columns, V), logit_scale, softcap, inverse_temperature[:, None])
        row_target, row_maximum, row_total, row_weighted = add_tile(
            row_target, row_maximum, row_total, row_weighted, z, columns, target, V, ENTROPY
        )
    row_logprob, row_entropy = finish_row(row_maximum, row_total, row_weighted, row_target, ENTROPY)
    tl.store(logprobs + row, row_logprob)
    tl.store(maximum + row, row_maximum)
    tl.store(total + row, row_total)
    tl.store(target_logit + row, row_target)
    if ENTROPY:
        tl.store(entropy + row, row_entropy)
        tl.store(weighted + row, row_weighted)


def row_statistics(
    logits: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: Tensor,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Log-probs and entropy of the rows of materialised logits, which stay as they are.

    Args:
        logits: [R, V] fp32, raw h.w, any strides.
        targets: [R] int64, each in [0, V), or -1 for a row whose target is not among these columns: its log-prob is
            -inf, its entropy that of all V columns.
        bias, temperature, logit_scale, softcap, entropy: as in `logprob_forward`.

    Returns:
        (logprobs [R], entropy [R] or None, state), fp32, the entropy in nats; the state as of `logprob_forward`.
    """
    R, V = logits.shape
    of_rows = (torch.empty(R, dtype=torch.float32, device=logits.device) for _ in range(5))
    logprobs, maximum, total, weighted, target_logit = of_rows
    state = maximum, total, weighted, target_logit
    entropies = torch.empty_like(logprobs) if entropy else None
    if R == 0:
        return logprobs, entropies, state
    inputs = logits, targets.contiguous(), None if bias is None else bias.contiguous(), temperature.contiguous()
    with launching_on(logits.device):
        _row_statistics_kernel[(R,)](
            *inputs,
            logprobs,
            entropies,
            *state,
            V,
            *logits.stride(),
            logit_scale,
            softcap,
            ENTROPY=entropy,
            **row_tile(logits.device).launch_options(),
        )
    return logprobs, entropies, state
