"""The tokens that Clip-Cov or KL-Cov selects from a whole optimizer step, marked in its micro-batches.

The selection depends on all tokens of the step, over all ranks, so it takes a forward pass of its own. It is the same
for any cut into micro-batches and for any number of ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from fused_grpo.config import GRPOLossConfig
from fused_grpo.covariance import select_by_covariance
from fused_grpo.reference import ratio_and_clipped
from fused_grpo.trainer.batching.ratio_metrics import inputs_of
from fused_grpo.trainer.types import MicroBatch


def with_covariance_selection(
    packed: Sequence[MicroBatch], logprobs: Sequence[Tensor], config: GRPOLossConfig, accelerator: Accelerator
) -> list[MicroBatch]:
    """The micro-batches of this rank with `covariance_selected`, from the log-probs [N] of each. A collective."""
    facts = [_facts(part, values.float(), config) for part, values in zip(packed, logprobs, strict=True)]
    ranks: list[Tensor] = gather_object([torch.cat(facts, dim=1)])
    current, advantages, clipped = torch.cat(ranks, dim=1)
    selected = select_by_covariance(current, advantages, clipped != 0, config)
    mine = selected.split([rank.shape[1] for rank in ranks])[accelerator.process_index]
    parts = mine.split([len(part.targets) for part in packed])
    return [
        dataclasses.replace(part, covariance_selected=values.to(part.targets.device))
        for part, values in zip(packed, parts, strict=True)
    ]


def _facts(part: MicroBatch, logprobs: Tensor, config: GRPOLossConfig) -> Tensor:
    """Log-probs, advantages and whether a token is clipped, [3, N] on the CPU."""
    inputs = inputs_of(part, config)
    clipped = ratio_and_clipped(logprobs, inputs, config)[1]
    return torch.stack([logprobs, inputs.tokens.advantages, clipped.to(logprobs)]).cpu()
