"""The inputs of the loss in one layout: flat tokens, each with a weight.

Packed `[N]` with `cu_seqlens` [B+1] and padded `[B, T]` with `mask` become N flat tokens. The average of each loss type
becomes one weight per token, so that loss = sum(weights * l) for all types:

    bnpo, dapo, cispo, vespo, dppo   w = mask / num_tokens
    grpo, sapo, gmpo                 w = mask / (tokens of the sequence * num_sequences)
    luspo                            w = mask / num_sequences
    dr_grpo                          w = mask / (num_sequences * max_completion_length)

The normalisers are counts over the whole optimizer step. Because they are arguments, the losses of the micro-batches
add up to the loss of the step, for any split into micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor

from fused_grpo.config import DPPO, GRPOLossConfig


class LogitTransform(TypedDict):
    """How raw h.w becomes a logit: softcap(logit_scale * (h.w + bias)) / temperature, for the rows of a tile."""

    bias: NotRequired[Tensor | None]  # [C]
    temperature: Tensor  # [R]
    logit_scale: NotRequired[float]
    softcap: NotRequired[float | None]


@dataclass(frozen=True)
class Sequences:
    """Which of the flat tokens belong to which sequence. All sums are in fp64, so that counts are exact."""

    lengths: Tensor | tuple[int, int]  # [B] of packed sequences, or (B, T) of padded ones

    def __len__(self) -> int:
        return self.lengths[0] if isinstance(self.lengths, tuple) else len(self.lengths)

    def sum(self, values: Tensor) -> Tensor:
        """[B] fp64 from [N], in a fixed order."""
        wide = values.double()
        if isinstance(self.lengths, tuple):
            return wide.view(self.lengths).sum(1)
        if not len(self.lengths):
            return wide.sum(0, keepdim=True)[:0]
        # The lengths were checked already, where that needs no synchronization.
        return torch.segment_reduce(wide, "sum", lengths=self.lengths.long(), initial=0, unsafe=True)

    def spread(self, values: Tensor, count: int) -> Tensor:
        """[N] from [B]: the value of a sequence at each of its tokens, N = `count`."""
        repeats = self.lengths[1] if isinstance(self.lengths, tuple) else self.lengths
        return values.repeat_interleave(repeats, output_size=count)

    def mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """[B] fp64: the mean over a sequence's unmasked tokens, 0 where there are none."""
        return self.sum(torch.where(mask, values, 0.0)) / self.sum(mask).clamp_min(1.0)


@dataclass(frozen=True)
class TokenInputs:
    """What the loss of a token depends on besides its log-prob. Every field is [N]."""

    advantages: Tensor
    weights: Tensor
    mask: Tensor  # bool
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    sampling_logprobs: Tensor | None

    def of(self, rows: slice | Tensor | None) -> TokenInputs:
        """The inputs of some tokens; `rows` is None for all of them."""
        return self if rows is None else TokenInputs(**self.rows(rows))

    def rows(self, rows: slice | Tensor) -> dict[str, Any]:
        """Keyword arguments of `token_loss` for these tokens."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: None if value is None else value[rows] for name, value in values}


@dataclass(frozen=True)
class LossInputs:
    """All tokens of a call, their sequences, and what is of the whole step: threshold and normaliser of entropies (None
    where nothing needs them), and the tokens that Clip-Cov or KL-Cov selected, [N] bool."""

    tokens: TokenInputs
    sequences: Sequences
    entropy_threshold: float | Tensor | None
    num_entropy_tokens: float | Tensor | None
    covariance_selected: Tensor | None = None


def token_weights(
    mask: Tensor,
    sequences: Sequences,
    num_tokens: float | Tensor | None,
    num_sequences: float | Tensor | None,
    config: GRPOLossConfig,
) -> Tensor:
    """w [N] of the module's table, fp64 so that counts stay exact. Normalisers default to those of this call.

    Sequences of 1 and 3 tokens: "dapo" weights tokens equally, "grpo" sequences.

    >>> sequences, mask = Sequences(torch.tensor([1, 3])), torch.ones(4, dtype=torch.bool)
    >>> for loss_type in ("dapo", "grpo"):
    ...     config = GRPOLossConfig(loss_type=loss_type)
    ...     [round(x, 4) for x in token_weights(mask, sequences, None, None, config).tolist()]
    [0.25, 0.25, 0.25, 0.25]
    [0.5, 0.1667, 0.1667, 0.1667]
    """
    on = mask.double()
    if config.loss_type in ("bnpo", "dapo", "cispo", "vespo", *DPPO):
        return on / (on.sum().clamp_min(1.0) if num_tokens is None else num_tokens)
    num_sequences = max(1, len(sequences)) if num_sequences is None else num_sequences
    if config.loss_type == "luspo":
        return on / num_sequences
    if config.loss_type == "dr_grpo":
        assert config.max_completion_length is not None
        return on / (num_sequences * config.max_completion_length)
    return on / (sequences.spread(sequences.sum(mask).clamp_min(1.0), len(mask)) * num_sequences)
