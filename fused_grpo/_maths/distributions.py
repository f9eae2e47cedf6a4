"""Logits, log-probs, entropies and divergences of rows, once, in plain torch. Fast paths are compared with these.

Letters: N tokens, D hidden size, V vocabulary.

The logit of token v in row n is

    z = softcap(logit_scale * (h_n . w_v + b_v)) / temperature_n        softcap(x) = c * tanh(x / c)

    log p = z_target - logsumexp(z)          H = -sum_v p_v log p_v

with the gradients that the kernels implement (g = dL/d log p, g_H = dL/dH, t the target):

    dL/dz_v = g * ([v = t] - p_v) - g_H * p_v * (log p_v + H)

    dL/d(h.w_v + b_v) = dL/dz_v / temperature * (1 - tanh^2(x / c)) * logit_scale
"""

from __future__ import annotations

import math
from typing import NotRequired, TypedDict, Unpack

import torch
from torch import Tensor

from fused_grpo._maths.statistics import compute_dtype


class LogitTransform(TypedDict):
    """How raw h.w becomes a logit: softcap(logit_scale * (h.w + bias)) / temperature, for the rows of a tile."""

    bias: NotRequired[Tensor | None]  # [C]
    temperature: Tensor  # [R]
    logit_scale: NotRequired[float]
    softcap: NotRequired[float | None]


def transform_logits(
    raw: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: Tensor,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """z [N, V] from raw = h.w [N, V], bias [V] and temperature [N].

    Raw logits of 4 and -1, halved by the temperature after a cap at 2:

    >>> raw, T = torch.tensor([[4.0, -1.0]]), torch.tensor([2.0])
    >>> [round(z, 4) for z in transform_logits(raw, temperature=T, softcap=2.0)[0].tolist()]
    [0.964, -0.4621]
    """
    x = logit_scale * (raw if bias is None else raw + bias.to(raw.dtype))
    capped = x if softcap is None else softcap * torch.tanh(x / softcap)
    return capped / temperature.to(raw.dtype)[:, None]


def logits(hidden: Tensor, weight: Tensor, **transform: Unpack[LogitTransform]) -> Tensor:
    """z [N, V] of hidden states [N, D] and a weight [V, D], whose values are rounded to the dtype of these."""
    dtype = compute_dtype(hidden)
    return transform_logits(hidden.to(dtype) @ as_rounded(weight, hidden.dtype).to(dtype).t(), **transform)


def cap_slope(x: Tensor) -> Tensor:
    """1 - tanh^2(x) as 4 e / (1 + e)^2, which does not cancel where the cap saturates."""
    e = torch.exp(-2 * x.abs())
    return 4 * e / (1 + e).square()


def logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    kept: Tensor | None = None,
    **transform: Unpack[LogitTransform],
) -> tuple[Tensor, Tensor]:
    """log p of the targets, [N] or [N, K], and the entropy [N], through full logits [N, V] and autograd.

    With `kept` [N, V] the softmax of each row is over the tokens where it is True.

    Two tokens with logits log 3 and 0 have probabilities 3/4 and 1/4; the target is the first:

    >>> hidden, weight = torch.tensor([[1.0]]), torch.tensor([[3.0], [1.0]]).log()
    >>> logp, H = logprobs_and_entropy(hidden, weight, torch.tensor([0]), temperature=torch.ones(1))
    >>> [round(x.item(), 4) for x in (logp.exp(), H)]
    [0.75, 0.5623]
    """
    z = logits(hidden, weight, **transform)
    z = z if kept is None else z.masked_fill(~kept, -torch.inf)
    log_p = torch.log_softmax(z, dim=-1)
    # A banned token, at -inf, adds 0 to the entropy; 0 * -inf would be NaN.
    finite = log_p.masked_fill(log_p == -torch.inf, 0.0)
    target_logprobs = log_p.gather(1, targets[:, None])[:, 0] if targets.ndim == 1 else log_p.gather(1, targets)
    return target_logprobs, -(log_p.exp() * finite).sum(-1)


@torch.no_grad()
def moments(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    kept: Tensor | None = None,
    **transform: Unpack[LogitTransform],
) -> Tensor:
    """(sum p^2, mean logit, 1 where the target is the first of the largest) [3, N] of the same logits."""
    z = logits(hidden, weight, **transform)
    kept = torch.ones_like(z, dtype=torch.bool) if kept is None else kept
    mean, z = torch.where(kept, z, 0.0).sum(-1) / kept.sum(-1), z.masked_fill(~kept, -torch.inf)
    return torch.stack([z.softmax(-1).square().sum(-1), mean, (z.argmax(-1) == targets).to(z.dtype)])


def as_rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`weight` with its values rounded to `dtype`, and a gradient that is not rounded."""
    if weight.dtype == dtype:
        return weight
    # The difference to the rounded value is exact, so the sum is the rounded value, bit for bit.
    return weight + (weight.detach().to(dtype).to(weight.dtype) - weight.detach())


def divergence(student: Tensor, teacher: Tensor, *, kind: str, beta: float) -> Tensor:
    """The divergence [N] of the softmax p of the student's logits and q of the teacher's, both [N, V].

    KL(q | p) for "forward_kl", KL(p | q) for "reverse_kl", and for "jsd" with m = (1 - beta) p + beta q

        beta KL(q | m) + (1 - beta) KL(p | m)

    With p = (1/2, 1/2) and q = (3/4, 1/4), KL(q | p) = 3/4 log(3/2) + 1/4 log(1/2):

    >>> p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.75, 0.25]]).log()
    >>> [round(divergence(p, q, kind=kind, beta=0.5).item(), 4) for kind in ("forward_kl", "reverse_kl", "jsd")]
    [0.1308, 0.1438, 0.0338]
    """
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    if kind == "forward_kl":
        return _kl(log_q, log_p)
    if kind == "reverse_kl":
        return _kl(log_p, log_q)
    never = (log_p == -torch.inf) & (log_q == -torch.inf)
    log_p, log_q = log_p.masked_fill(never, -1e4), log_q.masked_fill(never, -1e4)
    log_m = torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
    return beta * _kl(log_q, log_m) + (1 - beta) * _kl(log_p, log_m)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p | q) [N]. A token without probability adds 0; 0 * (-inf) would be NaN."""
    never = log_p == -torch.inf
    return (log_p.exp() * (log_p.masked_fill(never, 0.0) - log_q.masked_fill(never, 0.0))).sum(-1)
