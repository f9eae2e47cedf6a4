"""The row passes in plain torch: the path for CPUs, and for any device that Triton does not serve.

Four functions, the same four that `fused_grpo.kernels` offers, so that the ops are written once over either module.

`logits` [R, V] is always one chunk of raw h.w, and the chunk is all the memory there is: the passes walk it in blocks
of rows that fit a core's cache, with two block-sized scratch tensors. That keeps the peak at one chunk and is also the
fast way on a CPU: a block is exponentiated, summed and differentiated while it is still in the cache.

Numerics: the log-sum-exp leaves the target out, so log p = -log(1 + exp(lse_others - z_target)) is never positive and
1 - p comes from expm1: a confident token keeps its gradient, where 1 - exp(log p) would round it to zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_grpo import planner, reference
from fused_grpo.head import Head

_BLOCK_BYTES = 2**20


@dataclass(frozen=True)
class _Block:
    """Some rows of a chunk with their transformed logits, in scratch."""

    rows: slice
    z: Tensor  # [r, V], scratch
    work: Tensor  # [r, V], scratch of undefined content
    slope: Tensor | None  # [r, V] dz/dx of the soft cap, None without one
    column: Tensor  # [r, 1] the targets


def logprob_forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: Tensor,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(log p, entropy or None, log-sum-exp), each [N], of hidden [N, D], weight [V, D] and targets [N], by chunks."""
    head = Head(hidden, weight, bias, targets, temperature, logit_scale, softcap)
    logprobs, entropies, lse = torch.empty((3, len(targets)), dtype=head.dtype, device=hidden.device)
    for rows, logits in head.chunked_logits():
        logprobs[rows], chunk_entropy, lse[rows] = row_statistics(
            logits, targets[rows], **head.row_arguments(rows), entropy=entropy
        )
        if chunk_entropy is not None:
            entropies[rows] = chunk_entropy
    return logprobs, entropies if entropy else None, lse


def row_statistics(
    logits: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: Tensor,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(log p, entropy or None, log-sum-exp), each [R], of a chunk that is left as it was."""
    logprobs, entropies, lse = torch.empty((3, len(targets)), dtype=logits.dtype, device=logits.device)
    for block in _blocks(logits, targets, bias, temperature, logit_scale, softcap, slope=False):
        z_target = block.z.gather(1, block.column)[:, 0]
        others = block.z.scatter_(1, block.column, -torch.inf)
        # A vocabulary of one token has no others: any finite maximum will do.
        top = others.amax(1, keepdim=True).clamp_min_(torch.finfo(others.dtype).min)
        shifted = others.sub_(top)
        weights = torch.exp(shifted, out=block.work)
        total = weights.sum(1)
        lse_others = top[:, 0] + total.log()
        block_lse = torch.logaddexp(lse_others, z_target)
        block_logprobs = -torch.logaddexp(lse_others - z_target, torch.zeros_like(z_target))
        logprobs[block.rows], lse[block.rows] = block_logprobs, block_lse
        if entropy:
            # sum over the others of p * (lse - z): every term is >= 0, so nothing cancels.
            height = block_lse - top[:, 0]
            surprise = height * total - weights.mul_(shifted.scatter_(1, block.column, 0.0)).sum(1)
            entropies[block.rows] = (-height).exp() * surprise - block_logprobs.exp() * block_logprobs
    return logprobs, entropies if entropy else None, lse


def logits_gradient_(
    logits: Tensor,
    targets: Tensor,
    *,
    lse: Tensor,
    logprobs: Tensor,
    entropy: Tensor | None,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    bias: Tensor | None = None,
    temperature: Tensor,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """d(h.w) [R, V] in `dtype`, written over `logits`: it shares their memory, at half width for 16-bit dtypes."""
    out = logits if dtype == logits.dtype else logits.view(dtype)[:, : logits.shape[1]]
    for block in _blocks(logits, targets, bias, temperature, logit_scale, softcap, slope=True):
        rows, log_p = block.rows, block.z.sub_(lse[block.rows, None])
        p = torch.exp(log_p, out=block.work)
        upstream = grad_logprobs[rows, None]
        at_target = upstream * -torch.expm1(logprobs[rows, None])
        if grad_entropy is None or entropy is None:
            gradient = p.mul_(-upstream)
        else:
            upstream_entropy, mean = grad_entropy[rows, None], entropy[rows, None]
            gradient = log_p.add_(mean).mul_(upstream_entropy).add_(upstream).mul_(p).neg_()
            log_p_target = logprobs[rows, None]
            at_target = at_target - upstream_entropy * log_p_target.exp() * (log_p_target + mean)
        gradient.scatter_(1, block.column, at_target).mul_(logit_scale / temperature[rows, None])
        out[rows] = gradient if block.slope is None else gradient.mul_(block.slope)
    return out


def grpo_token_loss(
    logprobs: Tensor,
    *,
    advantages: Tensor,
    weights: Tensor,
    mask: Tensor,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    sampling_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    epsilon_low: float,
    epsilon_high: float,
    beta: float,
    bias_correction_kl: bool,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(d loss / d log p [N], the statistics of `reference.token_loss`). All inputs are [N]."""
    inference = torch.is_inference_mode_enabled()  # where autograd cannot run, and nobody can ask for a gradient
    with torch.set_grad_enabled(not inference):
        leaf = logprobs.detach().requires_grad_(not inference)
        loss, statistics = reference.token_loss(
            leaf,
            advantages=advantages,
            weights=weights,
            mask=mask,
            old_logprobs=old_logprobs,
            ref_logprobs=ref_logprobs,
            sampling_logprobs=sampling_logprobs,
            entropy=entropy,
            epsilon_low=epsilon_low,
            epsilon_high=epsilon_high,
            beta=beta,
            bias_correction_kl=bias_correction_kl,
        )
        gradient = torch.zeros_like(leaf) if inference else torch.autograd.grad(loss, leaf)[0]
    return gradient, statistics


def _blocks(
    logits: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    temperature: Tensor,
    logit_scale: float,
    softcap: float | None,
    *,
    slope: bool,
) -> Iterator[_Block]:
    """Transformed logits of `logits`, a cache-sized block of rows at a time, in reused scratch."""
    num_rows, vocab_size = logits.shape
    height = min(num_rows, max(1, _BLOCK_BYTES // (vocab_size * logits.element_size())))
    z_scratch, work_scratch = logits.new_empty((2, height, vocab_size))
    for rows in planner.chunks(num_rows, height):
        z, work = (scratch[: rows.stop - rows.start] for scratch in (z_scratch, work_scratch))
        raw = logits[rows] if bias is None else torch.add(logits[rows], bias, out=z)
        sharpness, slopes = 1.0 / temperature[rows, None], None
        if softcap is None:
            torch.mul(raw, logit_scale * sharpness, out=z)
        else:
            torch.mul(raw, logit_scale / softcap, out=z).tanh_()
            slopes = 1 - z.square() if slope else None
            z.mul_(softcap * sharpness)
        yield _Block(rows, z, work, slopes, targets[rows, None])
