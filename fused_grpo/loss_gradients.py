"""The gradient of the GRPO loss in the log-probs, taken together with its value. Both public losses use it.

The derivatives have a closed form (`reference.py`), so one pass over the tokens gives the loss, its metrics and
d loss / d log p. Autograd then only scales that gradient by the upstream one.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fused_grpo import reference
from fused_grpo._loss_inputs import LossInputs
from fused_grpo.config import GRPOLossConfig, TokenTerms


class LossGradients(NamedTuple):
    """The gradients of a loss for an upstream gradient of 1."""

    logprobs: Tensor  # [N]
    entropy: Tensor | None  # [N], None for 0

    def of(self, rows: slice | Tensor) -> LossGradients:
        """The gradients of some rows."""
        return self._replace(logprobs=self.logprobs[rows], entropy=None if self.entropy is None else self.entropy[rows])

    def have_gradient(self) -> Tensor:
        """Which tokens have a gradient that is not 0, [N]."""
        return self.logprobs != 0 if self.entropy is None else (self.logprobs != 0) | (self.entropy != 0)


def value_and_gradient(
    logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs, *, config: GRPOLossConfig, passes: ModuleType
) -> tuple[LossGradients, Any]:
    """The gradients, and sums for `statistics_of`, from the log-probs [N] and entropies [N] of some tokens."""
    # The torch path runs a small backward pass of its own. Hooks of the caller must not see its saved tensors: those
    # of activation checkpointing would run the whole region again to recompute them.
    with torch.no_grad(), saved_tensors_hooks(_unchanged, _unchanged):
        weights, entropy_weights = reference.policy_weights(logprobs, entropy, inputs, config)
        of_sequence = config.importance_sampling_level == "sequence"
        gradient, of_ratio, sums = passes.grpo_token_loss(
            logprobs.detach(),
            log_ratio=reference.sequence_log_ratio(logprobs.detach(), inputs) if of_sequence else None,
            inputs={
                **inputs.tokens.rows(slice(None)),
                "entropy": None if entropy is None else entropy.detach(),
                "entropy_weights": entropy_weights,
                "policy_weights": weights,
            },
            terms=TokenTerms.of(config),
        )
        if of_ratio is not None:
            # The log-ratio of a sequence is a mean over its tokens: each token gets an equal share of its gradient.
            mask, sequences = inputs.tokens.mask, inputs.sequences
            shares = sequences.sum(of_ratio) / sequences.sum(mask).clamp_min(1.0)
            gradient = gradient + torch.where(mask, sequences.spread(shares, len(mask)), 0.0).to(gradient.dtype)
        upstream = None if entropy_weights is None else -torch.where(inputs.tokens.mask, entropy_weights, 0.0)
        return LossGradients(gradient, upstream), sums


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def statistics_of(sums: Sequence[Any], done: LossGradients, mask: Tensor, passes: ModuleType) -> dict[str, Tensor]:
    """The statistics of all tokens, and the number of unmasked ones without a gradient."""
    zero = (mask & ~done.have_gradient()).sum()
    return {**passes.token_statistics(sums), "zero_gradient": zero.to(done.logprobs.dtype)}
