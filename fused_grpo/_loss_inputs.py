"""The inputs of the loss in one layout: flat tokens, each with a weight.

Packed `[N]` with `cu_seqlens` [B+1] and padded `[B, T]` with `mask` become N flat tokens. The average of each loss type
becomes one weight per token, so that loss = sum(weights * l) for all types:

    bnpo, dapo, cispo, vespo, dppo   w = mask / num_tokens
    grpo, sapo, gmpo                 w = mask / (tokens of the sequence * num_sequences)
    luspo                            w = mask / num_sequences
    dr_grpo                          w = mask / (num_sequences * max_completion_length)

The normalisers are counts over the whole optimizer step. Because they are arguments, the losses of the micro-batches
add up to the loss of the step, for any split into micro-batches.

Every function here that checks its arguments raises InputError, with what was got, what is wanted and a fix.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from fused_grpo._checks import check_dense, check_same_device, is_number
from fused_grpo.config import DPPO, GRPOLossConfig
from fused_grpo.errors import InputError
from fused_grpo.option_types import LARGEST

FLOATING = ("old_logprobs", "ref_logprobs", "sampling_logprobs")


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


def loss_inputs(
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
    entropy_threshold: float | Tensor | None,
    num_tokens: float | Tensor | None,
    num_sequences: float | Tensor | None,
    num_entropy_tokens: float | Tensor | None,
    config: GRPOLossConfig,
    covariance_selected: Tensor | None = None,
) -> LossInputs:
    """Check the loss inputs against tokens of `shape` and flatten them. `kept` [N] masks on top of `mask`."""
    per_token = {"mask": mask, "old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs}
    per_token |= {"sampling_logprobs": sampling_logprobs, "covariance_selected": covariance_selected}
    given = {name: x for name, x in {"cu_seqlens": cu_seqlens, **per_token}.items() if x is not None}
    check_dense(advantages=advantages, **given)
    sequences = Sequences(sequence_lengths(shape, cu_seqlens))
    for name, tensor in per_token.items():
        if tensor is not None and tensor.shape != shape:
            raise InputError(f"got {name} {tuple(tensor.shape)}, want {tuple(shape)}: one per token")
        if tensor is not None and name in FLOATING and not tensor.is_floating_point():
            raise InputError(f"got {name} of dtype {tensor.dtype}, want a floating dtype")
    if config.beta > 0 and ref_logprobs is None:
        raise InputError(f"got beta={config.beta} without ref_logprobs; fix: pass ref_logprobs, or beta=0.0")
    check_same_device(advantages=advantages, cu_seqlens=cu_seqlens, **per_token)
    if advantages.device != device:
        raise InputError(f"got advantages on {advantages.device} and tokens on {device}, want one device")
    counts = {"num_tokens": num_tokens, "num_sequences": num_sequences, "num_entropy_tokens": num_entropy_tokens}
    for name, value in counts.items():
        check_normaliser(name, value, device)
    check_threshold(entropy_threshold, device)
    flat_mask = torch.ones(shape, dtype=torch.bool, device=device) if mask is None else mask != 0
    flat_mask = flat_mask.reshape(-1) if kept is None else flat_mask.reshape(-1) & kept
    others = {name: per_token[name] for name in FLOATING}
    flat = {name: None if x is None else x.detach().to(dtype).reshape(-1) for name, x in others.items()}
    selected = None if covariance_selected is None else covariance_selected.reshape(-1) != 0
    weights = token_weights(flat_mask, sequences, num_tokens, num_sequences, config)
    tokens = TokenInputs(
        advantages=per_token_advantages(advantages, shape, sequences).to(dtype),
        weights=weights.to(dtype),
        mask=flat_mask,
        **flat,
    )
    if num_entropy_tokens is None and config.entropy_coef and config.top_entropy_quantile == 1.0:
        num_entropy_tokens = flat_mask.sum().clamp_min(1.0) if num_tokens is None else num_tokens
    return LossInputs(tokens, sequences, entropy_threshold, num_entropy_tokens, selected)


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


def per_token_advantages(advantages: Tensor, shape: torch.Size, sequences: Sequences) -> Tensor:
    """Advantages [N] from one per sequence [B] or one per token."""
    if not advantages.is_floating_point():
        raise InputError(f"got advantages of dtype {advantages.dtype}, want a floating dtype; fix: advantages.float()")
    advantages = advantages.detach()
    if advantages.shape == (len(sequences),):
        return sequences.spread(advantages, shape.numel())
    if advantages.shape == shape:
        return advantages.reshape(-1)
    raise InputError(
        f"got advantages {tuple(advantages.shape)}, want [B] = ({len(sequences)},), one per sequence, "
        f"or {tuple(shape)}, one per token"
    )


def token_weights(
    mask: Tensor,
    sequences: Sequences,
    num_tokens: float | Tensor | None,
    num_sequences: float | Tensor | None,
    config: GRPOLossConfig,
) -> Tensor:
    """w [N] of the module's table, fp64 so that counts stay exact. Normalisers default to those of this call."""
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


def check_normaliser(name: str, value: float | Tensor | None, device: torch.device) -> None:
    want = "a finite number > 0: the count over the whole optimizer step"
    if isinstance(value, Tensor):
        check_scalar(name, value, device)
        if value.device.type != "cpu":
            return
        value = value.item()
    if value is not None and not (is_number(value, 0, LARGEST) and value):
        raise InputError(f"got {name}={value!r}, want {want}")


def check_threshold(value: float | Tensor | None, device: torch.device) -> None:
    if isinstance(value, Tensor):
        check_scalar("entropy_threshold", value, device)
    elif value is not None and not is_number(value, -LARGEST, LARGEST):
        raise InputError(f"got entropy_threshold={value!r}, want a finite number, a 0-d tensor or None")


def check_scalar(name: str, value: Tensor, device: torch.device) -> None:
    """Check that `value` is one real number on the CPU or on `device`."""
    check_dense(**{name: value})
    if value.ndim != 0 or value.is_complex():
        raise InputError(f"got {name} of shape {tuple(value.shape)} {value.dtype}, want a number or a real 0-d tensor")
    if value.device.type not in ("cpu", device.type):
        raise InputError(f"got {name} on {value.device} and tokens on {device}, want one device")
