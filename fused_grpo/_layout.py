"""From the two layouts people use to the one that the passes see: flat tokens, each with a weight.

Packed `[N]` with `cu_seqlens` [B+1] and padded `[B, T]` with `mask` become N flat tokens. Everything that a loss type
says about averaging becomes one number per token, so that loss = sum(weights * l) for all of them:

    dapo   w = mask / num_tokens
    grpo   w = mask / (tokens of the sequence * num_sequences)

The normalisers are those of the whole optimizer step. Because they come in as arguments, the sum of the losses of
micro-batches is the loss of the step, however it is cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from fused_grpo._checks import check_same_device
from fused_grpo.config import GRPOLossConfig
from fused_grpo.errors import InputError


@dataclass(frozen=True)
class TokenInputs:
    """What the loss of a token depends on besides its log-prob. Every field is [N]."""

    advantages: Tensor
    weights: Tensor
    mask: Tensor  # bool
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    sampling_logprobs: Tensor | None

    def rows(self, rows: slice) -> dict[str, Any]:
        """Keyword arguments of `token_loss` for these tokens."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: None if value is None else value[rows] for name, value in values}


def token_inputs(
    shape: torch.Size,
    *,
    dtype: torch.dtype,
    device: torch.device,
    advantages: Tensor,
    mask: Tensor | None,
    kept: Tensor | None = None,
    cu_seqlens: Tensor | None,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    sampling_logprobs: Tensor | None,
    num_tokens: float | Tensor | None,
    num_sequences: float | Tensor | None,
    config: GRPOLossConfig,
) -> TokenInputs:
    """Check the loss inputs against tokens of `shape` and flatten them. `kept` [N] masks on top of `mask`.

    Raises:
        InputError: shapes, dtypes or devices that disagree, or normalisers that are not positive.
    """
    lengths = sequence_lengths(shape, cu_seqlens)
    per_token = {"mask": mask, "old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs}
    per_token["sampling_logprobs"] = sampling_logprobs
    for name, tensor in per_token.items():
        if tensor is not None and tensor.shape != shape:
            raise InputError(f"got {name} {tuple(tensor.shape)}, want {tuple(shape)}: one per token")
    if config.beta > 0 and ref_logprobs is None:
        raise InputError(f"got beta={config.beta} without ref_logprobs; fix: pass ref_logprobs, or beta=0.0")
    check_same_device(advantages=advantages, cu_seqlens=cu_seqlens, **per_token)
    if advantages.device != device:
        raise InputError(f"got advantages on {advantages.device} and tokens on {device}, want one device")
    flat_mask = torch.ones(shape, dtype=torch.bool, device=device) if mask is None else mask != 0
    flat_mask = flat_mask.reshape(-1) if kept is None else flat_mask.reshape(-1) & kept
    flat = {name: None if x is None else x.detach().to(dtype).reshape(-1) for name, x in per_token.items()}
    return TokenInputs(
        advantages=per_token_advantages(advantages, shape, lengths).to(dtype),
        weights=token_weights(flat_mask, lengths, num_tokens, num_sequences, config).to(dtype),
        mask=flat_mask,
        old_logprobs=flat["old_logprobs"],
        ref_logprobs=flat["ref_logprobs"],
        sampling_logprobs=flat["sampling_logprobs"],
    )


def sequence_lengths(shape: torch.Size, cu_seqlens: Tensor | None) -> Tensor | tuple[int, int]:
    """Lengths [B] of packed sequences, or (B, T) of padded ones."""
    if cu_seqlens is None:
        if len(shape) != 2:
            raise InputError(
                f"got tokens of shape {tuple(shape)} without cu_seqlens; "
                "want padded [B, T] (with a mask), or packed [N] with cu_seqlens [B+1]"
            )
        return shape[0], shape[1]
    if len(shape) != 1:
        raise InputError(f"got cu_seqlens with tokens of shape {tuple(shape)}, want packed tokens [N]; fix: .flatten()")
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise InputError(f"got cu_seqlens {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}, want [B+1] int32")
    lengths = cu_seqlens.diff()
    if cu_seqlens.device.type == "cpu":
        first, last, ordered = int(cu_seqlens[0]), int(cu_seqlens[-1]), bool((lengths >= 0).all())
        if first != 0 or last != shape[0] or not ordered:
            raise InputError(f"got cu_seqlens from {first} to {last}, want ascending from 0 to N={shape[0]}")
    return lengths


def per_token_advantages(advantages: Tensor, shape: torch.Size, lengths: Tensor | tuple[int, int]) -> Tensor:
    """Advantages [N] from one per sequence [B] or one per token."""
    if not advantages.is_floating_point():
        raise InputError(f"got advantages of dtype {advantages.dtype}, want a floating dtype; fix: advantages.float()")
    advantages = advantages.detach()
    num_sequences = lengths[0] if isinstance(lengths, tuple) else len(lengths)
    if advantages.shape == (num_sequences,):
        if isinstance(lengths, tuple):
            return advantages.repeat_interleave(lengths[1])
        return advantages.repeat_interleave(lengths, output_size=shape.numel())
    if advantages.shape == shape:
        return advantages.reshape(-1)
    raise InputError(
        f"got advantages {tuple(advantages.shape)}, want [B] = ({num_sequences},), one per sequence, "
        f"or {tuple(shape)}, one per token"
    )


def token_weights(
    mask: Tensor,
    lengths: Tensor | tuple[int, int],
    num_tokens: float | Tensor | None,
    num_sequences: float | Tensor | None,
    config: GRPOLossConfig,
) -> Tensor:
    """w [N] of the module's table, fp64 so that counts stay exact. Normalisers default to those of this call."""
    check_normaliser("num_tokens", num_tokens)
    check_normaliser("num_sequences", num_sequences)
    on = mask.double()
    if config.loss_type == "dapo":
        return on / (on.sum().clamp_min(1.0) if num_tokens is None else num_tokens)
    if isinstance(lengths, tuple):
        tokens = on.view(lengths).sum(1)
        of_sequence = tokens.repeat_interleave(lengths[1])
    else:
        ends, totals = lengths.cumsum(0), torch.cat([on.new_zeros(1), on.cumsum(0)])
        tokens = totals[ends] - totals[ends - lengths]
        of_sequence = tokens.repeat_interleave(lengths, output_size=len(mask))
    return on / (of_sequence.clamp_min(1.0) * (max(1, len(tokens)) if num_sequences is None else num_sequences))


def check_normaliser(name: str, value: float | Tensor | None) -> None:
    if isinstance(value, Tensor):
        if value.ndim != 0:
            raise InputError(f"got {name} of shape {tuple(value.shape)}, want a number or a 0-d tensor")
        if value.device.type != "cpu":
            return
    if value is not None and not 0 < value < math.inf:
        raise InputError(f"got {name}={value}, want a finite number > 0: the count over the whole optimizer step")
