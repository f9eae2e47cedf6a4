"""What is known of a row's softmax while it is still in parts: tiles that are folded in, shards that are merged.

All of it leaves the target t out. With z_t the target's logit, m the maximum of the others, s = sum_v e^(z_v - m),
w = sum_v e^(z_v - m) (z_v - m) and d = m + log s - z_t,

    log p = -softplus(d)        1 - p = -expm1(log p)        lse = z_t + softplus(d) = m + log s + softplus(-d)
    H = -p log p + (1 - p) (softplus(-d) + log s - w / s)

so log p is never positive, a token of probability 1 - 1e-9 keeps a log-prob of -1e-9 and its gradient, where lse - z_t
would round to 0, and the entropy is a sum of terms that are all >= 0: nothing cancels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RowState(NamedTuple):
    """What is known of some rows while tiles are folded in: each [N], over all tokens but the target."""

    maximum: Tensor
    """m, the largest logit so far."""
    total: Tensor
    """s."""
    weighted: Tensor
    """w, where the entropy is asked for."""
    target_logit: Tensor

    def rows(self, rows: slice) -> RowState:
        """Views of these rows."""
        return RowState(*(value[rows] for value in self))


def start_rows(count: int, *, dtype: torch.dtype, device: torch.device) -> RowState:
    """The state of `count` rows that have seen no logit."""
    values = torch.zeros((4, count), dtype=dtype, device=device)
    values[::3] = -torch.inf
    return RowState(*values)


def finish_rows(state: RowState) -> tuple[Tensor, Tensor, Tensor]:
    """(log p, entropy, log-sum-exp) of rows whose every logit was folded in; -inf, H, lse where no tile had the target.

    The entropy means nothing unless all tiles were folded with `entropy`.
    """
    alone = state.total == 0.0
    total = state.total.masked_fill(alone, 1.0)
    # (maximum - target) first: the difference of two large numbers is exact, their sums with log(total) are not.
    d = ((state.maximum - state.target_logit) + total.log()).masked_fill(alone, -torch.inf)
    logprobs = -softplus(d)
    lse_others = state.maximum + total.log()
    lse = torch.where(d > 0, lse_others + softplus(-d), state.target_logit - logprobs)
    rest = softplus(-d).masked_fill(alone, 0.0) + (total.log() - state.weighted / total)
    entropy = -torch.expm1(logprobs) * rest - logprobs.exp() * logprobs.clamp_min(-128.0)
    return logprobs, entropy, lse


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), to a few ulp in both tails."""
    return torch.logaddexp(x, torch.zeros_like(x))


def merge_shards(logprobs: Tensor, entropy: Tensor | None, lse: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """(log p, entropy or None, log-sum-exp), each [N], from those of S parts, each [S, N].

    A part's log-prob is -inf where the target is elsewhere; its entropy and log-sum-exp are of its own softmax. With
    d = log(1/p - 1) of the owner, whose other tokens then have the log-sum-exp z + d, and -log P_s = lse - lse_s,

        log p = -softplus(logsumexp(d, lse_s - z over the other parts s))
        H = sum_s P_s (H_s - log P_s)        -log P_s = softplus(logsumexp_{r != s}(lse_r) - lse_s)
    """
    if len(lse) == 1:
        return logprobs[0], None if entropy is None else entropy[0], lse[0]
    # Whichever part holds the target is the only one with a log-prob; a banned target is at -inf for all of them.
    owns = logprobs > -torch.inf
    target_logit = torch.where(owns, lse + logprobs, -torch.inf).amax(0)
    own_others = torch.log(-torch.expm1(logprobs)) - logprobs
    d = torch.where(owns, own_others, lse - target_logit).logsumexp(0)
    merged_lse = lse.logsumexp(0)
    merged_logprobs = -softplus(d)
    if entropy is None:
        return merged_logprobs, None, merged_lse
    everyone_else = lse[None].expand(len(lse), -1, -1).clone()
    everyone_else.diagonal().fill_(-torch.inf)
    surprise = softplus(everyone_else.logsumexp(1) - lse)
    share = torch.exp(-surprise)
    # An empty part has no share of the sum, whatever its surprise.
    parts = torch.where(share > 0, share * (entropy + surprise), 0.0)
    return merged_logprobs, parts.sum(0), merged_lse
