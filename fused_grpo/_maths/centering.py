"""Score centering (arXiv:2609.20807): what a policy gradient subtracts so that its mean over the sampler is zero.

With q the sampler, p the policy, A an advantage and w = f(p / q) the weight of a sampled token by its importance, the
sum over a token's alternatives of q_v w_v grad log p_v is not 0 where p and q differ (stale or quantised samplers,
truncated ones). It moves the policy whatever the rewards are. Subtracting it, from the sampled token y,

    l = -A (w log p_y - sum over v in H of c_v log p_v)        c and w detached

needs the sampler's probabilities of a few tokens H alone. On the tail the sampler is taken for rho p, with the mass
that is left; since sum_v p_v grad log p_v = 0, what the tail contributes is a sum over H as well:

    c_v = q_v f(p_v / q_v) - rho f(1 / rho) p_v        rho = max(1 - sum_H q, 1e-6) / max(1 - sum_H p, 1e-6)

and rho = 0 where H is all that the sampler kept. (The paper has the 1e-6 under p alone, so that c is not 0 for a
certain token on policy; that changes gradients by 1e-6 A at most.) For f(x) = min(x, C), c_v = min(p_v, C q_v) - min(1,
C rho) p_v. Where the policy is over H as well, p_v times the sum of all c is subtracted: the gradient is the same, for
the same reason, and on policy (p = q) all c_v are 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fused_grpo._maths.formulas import masked_by_divergence
from fused_grpo.config import TokenTerms

_LEAST_TAIL = 1e-6


class Bounds(NamedTuple):
    """f: the weight of a token by its importance p / q."""

    correction: str | None
    """"truncate", "mask" or "sampler", as in `TokenTerms`; None for a weight of 1."""
    least: float
    most: float
    terms: TokenTerms

    @staticmethod
    def of(terms: TokenTerms) -> Bounds:
        """Those by which the loss of a token is weighted."""
        if terms.form == "reinforce" and terms.correction == "sampler":
            # The penalty alone measures from the sampler: no ratio is a weight.
            terms = terms._replace(correction=None)
        least, most = terms.clip_min, terms.delta if terms.correction == "sampler" else terms.clip_max
        least = 0.0 if least is None or terms.correction == "sampler" else least
        return Bounds(terms.correction, least, torch.inf if most is None else most, terms)

    def weighted(self, p: Tensor, q: Tensor) -> Tensor:
        """q f(p / q), where either may be 0."""
        if self.correction is None:
            return q
        if self.correction == "mask":
            return torch.where((p < self.least * q) | (p > self._most_times(q)), 0.0, p)
        return p.maximum(self.least * q).minimum(self._most_times(q))

    def _most_times(self, q: Tensor) -> Tensor:
        return torch.full_like(q, torch.inf) if self.most == torch.inf else self.most * q


def coefficients(
    logprobs: Tensor,
    sampler: Tensor,
    advantages: Tensor,
    present: Tensor,
    bounds: Bounds,
    *,
    whole: bool,
    closed: bool = False,
) -> tuple[Tensor, Tensor]:
    """(c [N, K], the probability of H under the sampler and the policy [2, N]), detached.

    Of the tokens H of each row, `logprobs` [N, K] are the policy's and `sampler` [N, K] the sampler's; those that are
    not `present` count for nothing. `whole`: H is all that the sampler kept; `closed`: the policy is over H as well.
    `advantages` are [N].

    Two tokens, without weights: c is q - rho p, and rho is 1 where both tails have a mass of 0.2.

    >>> q, p, on = torch.tensor([[0.5, 0.3]]), torch.tensor([[0.4, 0.4]]), torch.ones(1, 2, dtype=torch.bool)
    >>> from fused_grpo.config import GRPOLossConfig
    >>> bounds = Bounds.of(TokenTerms.of(GRPOLossConfig(sampling_correction=None)))
    >>> c, mass = coefficients(p.log(), q.log(), torch.ones(1), on, bounds, whole=False)
    >>> [round(x, 4) for x in c[0].tolist()], [round(x, 4) for x in mass[:, 0].tolist()]
    ([0.1, -0.1], [0.8, 0.8])
    """
    present = present & (logprobs != -torch.inf)  # what the policy bans, no gradient brings back
    logprobs, sampler = (torch.where(present, x.detach(), -torch.inf) for x in (logprobs, sampler))
    p, q = logprobs.exp(), sampler.exp()
    mass = torch.stack([q.sum(1), p.sum(1)])
    weighted = bounds.weighted(p, q)
    if bounds.correction == "sampler":
        masked, *_ = masked_by_divergence(logprobs, sampler, advantages[:, None], bounds.terms)
        weighted = torch.where(masked, 0.0, weighted)
    if whole:
        weighted = torch.where(present, weighted, 0.0)
        return weighted - p * weighted.sum(1, keepdim=True) if closed else weighted, mass
    # The least of both: where H is almost all of the mass, rho is 1 on policy, and not a quotient of roundings.
    rho = (1 - mass[0]).clamp_min(_LEAST_TAIL) / (1 - mass[1]).clamp_min(_LEAST_TAIL)
    tail = bounds.weighted(torch.ones_like(rho), rho)
    return torch.where(present, weighted - tail[:, None] * p, 0.0), mass
