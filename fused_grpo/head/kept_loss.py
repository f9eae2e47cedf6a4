"""The GRPO loss over the kept tokens of each row (`kept_tokens.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_grpo._maths import factors, formulas
from fused_grpo._maths.centering import Bounds, coefficients
from fused_grpo._maths.formulas import LossInputs
from fused_grpo._maths.statistics import Statistics
from fused_grpo.config import GRPOLossConfig
from fused_grpo.head.centering import SamplerHead, scored_by_sampler, weights_of, with_centering
from fused_grpo.head.chunked_loss import ChunkedLoss, LossPlan, loss_and_gradient, rows_to_score
from fused_grpo.head.entries import Support
from fused_grpo.head.head import Gradients, Head
from fused_grpo.head.kept_tokens import SupportedHead
from fused_grpo.passes.protocol import RowPasses


@torch.no_grad()
def supported_loss(
    head: Head,
    support: Support,
    inputs: LossInputs,
    config: GRPOLossConfig,
    passes: RowPasses,
    plan: LossPlan,
    sampler: SamplerHead | None = None,
) -> ChunkedLoss:
    """`chunked_loss` over the kept tokens: the statistics of all rows, the loss, then the gradients.

    `sampler` has log-probs [E] of the kept tokens, for score centering.
    """
    differentiated = any(plan.wanted)
    inputs, _, _ = rows_to_score(inputs, config, plan.score, active_first=differentiated)
    scored = inputs.tokens.mask
    rows = SupportedHead(head, support, scored, passes, chunk_bytes=plan.chunk_bytes, wanted=plan.wanted)
    row_statistics = rows.statistics(entropy=plan.entropy, moments=plan.squares)
    upstream, statistics = loss_and_gradient(row_statistics.logprobs, row_statistics.entropy, inputs, config, passes)
    d_entries = None
    if sampler is not None:
        assert sampler.logprobs is not None
        logprobs, given = rows.entry_logprobs(row_statistics), sampler.logprobs[rows.items]
        c, d_entries, mass = _centering_of_entries(rows, logprobs, given, row_statistics, inputs, config)
        counts = torch.zeros_like(scored, dtype=torch.int32).index_add_(0, rows.row_of_entries, (d_entries != 0).int())
        zero = scored > (upstream.have_gradient() | (counts > 0))
        statistics = with_centering(statistics, c, d_entries, logprobs, mass, zero)
    recomputed = upstream.have_gradient()[rows.full_rows].sum() * differentiated
    gradients: Gradients = (None, None, None)
    if differentiated:
        gradients = rows.gradients(row_statistics, upstream, d_entries, rounded=plan.rounded)
    fraction = formulas.over_tokens(recomputed.to(statistics["loss"].dtype), statistics)
    statistics = {**statistics, "recomputed_fraction": fraction}
    squares = rows.moments(row_statistics)[0] if plan.squares else None
    return ChunkedLoss(statistics, row_statistics.logprobs, row_statistics.entropy, upstream, gradients, squares)


def _centering_of_entries(
    rows: SupportedHead,
    logprobs: Tensor,
    sampler: Tensor,
    statistics: Statistics,
    inputs: LossInputs,
    config: GRPOLossConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """(c [E], d loss / d log p [E], the probabilities under the sampler and the policy [2, E]) of the entries."""
    row, unknown = rows.row_of_entries, rows.sums_of_rows(sampler.isnan().to(logprobs.dtype)) > 0
    present = scored_by_sampler(inputs)[row] & ~unknown
    given = logprobs[:, None], sampler.to(logprobs.dtype)[:, None], inputs.tokens.advantages[row], present[:, None]
    weighted, mass = coefficients(*given, Bounds.of(config.token_terms), whole=True)
    c = weighted[:, 0] - mass[1] * rows.sums_of_rows(weighted[:, 0])
    weights = weights_of(inputs)
    policy_weights = factors.token_factors(statistics.logprobs, statistics.entropy, inputs, config)["policy_weights"]
    weights = (weights if policy_weights is None else weights * policy_weights)[row]
    return c, torch.where(weights == 0, 0.0, weights * c), mass
