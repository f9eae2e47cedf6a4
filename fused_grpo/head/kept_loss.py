"""The GRPO loss over the kept tokens of each row (`kept_tokens.py`)."""

from __future__ import annotations

from dataclasses import replace

import torch

from fused_grpo._maths import formulas
from fused_grpo._maths.formulas import LossInputs
from fused_grpo.config import GRPOLossConfig
from fused_grpo.head.chunked_loss import ChunkedLoss, LossPlan, rows_in_order, statistics_of, value_and_gradient
from fused_grpo.head.entries import Support
from fused_grpo.head.head import Head
from fused_grpo.head.kept_tokens import SupportedHead
from fused_grpo.passes.protocol import RowPasses


def supported_loss(
    head: Head,
    support: Support,
    inputs: LossInputs,
    config: GRPOLossConfig,
    passes: RowPasses,
    plan: LossPlan,
) -> ChunkedLoss:
    """`chunked_loss` over the kept tokens: the statistics of all rows, the loss, then the gradients."""
    differentiated = any(plan.wanted)
    order, _ = rows_in_order(inputs, config, plan.score, differentiated)
    scored = inputs.tokens.mask
    if order is not None:
        scored = torch.zeros_like(scored).index_fill_(0, order, True)
        inputs = replace(inputs, tokens=replace(inputs.tokens, mask=scored))
    rows = SupportedHead(head, support, scored, passes, chunk_bytes=plan.chunk_bytes, wanted=plan.wanted)
    row_statistics = rows.statistics(entropy=plan.entropy)
    upstream, sums = value_and_gradient(
        row_statistics.logprobs, row_statistics.entropy, inputs, config=config, passes=passes
    )
    statistics = statistics_of([sums], upstream, scored, config, passes)
    recomputed = upstream.have_gradient()[rows.others].sum() * differentiated
    gradients = rows.gradients(row_statistics, upstream, rounded=plan.rounded) if differentiated else (None, None, None)
    fraction = formulas.over_tokens(recomputed.to(statistics["loss"].dtype), statistics)
    statistics = {**statistics, "recomputed_fraction": fraction}
    return ChunkedLoss(statistics, row_statistics.logprobs, row_statistics.entropy, upstream, gradients)
