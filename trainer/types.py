"""What travels between the rooms of the trainer: frozen, with the shape of every field beside it.

Letters: P prompts, G completions per prompt (`num_generations`), B = P * G sequences, R rows of L tokens in a
micro-batch (prompts and completions), N its completion tokens.

The support of a token is the set of ids that top_p, top_k and min_p left for the sampler to draw from. It travels as
two tensors for each sequence of T tokens: the sizes [T] of its supports, 0 for the whole vocabulary, and their ids [K],
K = sum of the sizes, end to end, ascending within a token. Both are int32 on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor

FinishReason = Literal["stop", "length"]
SupportChoice = Literal["auto", "require", "off"]

# Options of an engine that leave the distribution of each token as it is: where to stop, how to compute.
_PLAIN_EXTRAS = {"stop", "stop_token_ids", "ignore_eos", "cache_implementation", "disable_compile"}


def taken(values: Any, places: Sequence[int]) -> Any:
    """The values at these places: of a list, of a tensor, or of each column of a dict. None stays None."""
    if isinstance(values, dict):
        return {name: taken(column, places) for name, column in values.items()}
    if isinstance(values, Tensor):
        return values[list(places)]
    return None if values is None else [values[place] for place in places]


def joined(parts: Sequence[Any]) -> Any:
    """Lists end to end, None where one is None; the tensors that there are; the columns that all dicts have."""
    some = [part for part in parts if part is not None]
    if some and isinstance(some[0], Tensor):
        return torch.cat(some)
    if some and isinstance(some[0], dict):
        return {name: joined([part[name] for part in some]) for name in some[0] if all(name in part for part in some)}
    return [entry for part in some for entry in part] if len(some) == len(parts) else None


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How an engine samples. Names and meaning are vLLM's; `temperature=0` is greedy."""

    n: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    structured_outputs_regex: str | None = None  # completions match this expression; vLLM engines only
    seed: int | None = None  # the same seed, prompts and weights give the same completions
    first_prompt: int = 0  # the place of a call's first prompt among those that share the seed, where ranks share them
    extra: dict[str, Any] = field(default_factory=dict)  # further options, under the engine's own names
    sampling_support: SupportChoice = "off"  # whether to return the support of each token, where it is truncated

    @property
    def num_sampled(self) -> int:
        """How many completions of a prompt are sampled. Greedy ones are equal, so one stands for all."""
        return self.n if self.temperature > 0 else 1

    @property
    def is_truncated(self) -> bool:
        """True where the least likely tokens are left out."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def wants_support(self) -> bool:
        """True where an engine that can is to return the support of each token."""
        return self.sampling_support != "off" and self.is_truncated and self.temperature > 0

    @property
    def is_plain(self) -> bool:
        """True where tokens come from softmax(logits / temperature) itself."""
        return not self.is_truncated and self.is_plain_within_support

    @property
    def is_plain_within_support(self) -> bool:
        """True where they come from softmax(logits / temperature) over the support of each token."""
        unforced = self.structured_outputs_regex is None and self.extra.keys() <= _PLAIN_EXTRAS
        return self.temperature > 0 and unforced and self.repetition_penalty == 1.0


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """G completions for each of P prompts. Prompt-major: completion i belongs to prompt i // G."""

    prompt_ids: list[list[int]]  # P lists of token ids
    completion_ids: list[list[int]]  # B lists of token ids, each with its end-of-sequence token where it stopped
    sampling_logprobs: list[list[float]] | None  # B lists, log-prob of each token as drawn; None: the engine cannot say
    finish_reasons: list[FinishReason]  # B
    num_generations: int  # G
    weight_version: int  # the optimizer step whose weights the engine was serving
    extra: dict[str, list[Any]] = field(default_factory=dict)  # columns of B values for the reward functions
    failures: dict[int, str] = field(default_factory=dict)  # by prompt: why its group cannot be used, and is dropped
    support_ids: list[Tensor] | None = None  # B, [K] int32; None: the engine cannot say, or keeps all tokens
    support_sizes: list[Tensor] | None = None  # B, [T] int32


@dataclass(frozen=True, kw_only=True)
class EffectiveBatch:
    """This rank's sequences of one optimizer step: its groups, or parts of groups, until they are balanced."""

    prompt_ids: list[list[int]]  # B
    completion_ids: list[list[int]]  # B
    sampling_logprobs: list[list[float]] | None  # B; None: the engine does not say
    advantages: Tensor  # [B] fp32
    rewards: Tensor | None = None  # [B] fp32, NaN: not scored; to look at, nothing is computed from them
    in_loss: Tensor | None = None  # [B] bool, False: the sequence counts in normalisers only; None: all True
    skipped: Tensor | None = None  # [B] bool, True: in the loss, but without a gradient, so not in the forward pass
    old_logprobs: list[Tensor] | None = None  # B, fp32 of its completion's length; None: on policy
    ref_logprobs: list[Tensor] | None = None  # B, the same; None: no KL term, or not computed yet
    support_ids: list[Tensor] | None = None  # B, [K] int32; None: the whole vocabulary for all tokens
    support_sizes: list[Tensor] | None = None  # B, [T] int32

    @property
    def in_forward(self) -> Tensor:
        """[B] bool, the sequences that go through the model."""
        in_loss = torch.ones(len(self.completion_ids), dtype=torch.bool) if self.in_loss is None else self.in_loss
        return in_loss if self.skipped is None else in_loss & ~self.skipped

    def take(self, indices: Sequence[int]) -> EffectiveBatch:
        """These sequences, in this order."""
        return EffectiveBatch(**{name: taken(values, indices) for name, values in vars(self).items()})

    @classmethod
    def joined(cls, batches: Sequence[EffectiveBatch]) -> EffectiveBatch:
        """Batches of the same step, one after the other."""
        return cls(**{field.name: joined([getattr(batch, field.name) for batch in batches]) for field in fields(cls)})


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Some sequences of an effective batch, packed end to end into R rows."""

    input_ids: Tensor  # [R, L] int64
    position_ids: Tensor  # [R, L] int64, from 0 in each sequence: this is what keeps sequences apart in attention
    attention_mask: Tensor  # [R, L] int64, 0 where there is padding; position ids keep attention from it without this
    predictors: Tensor  # [N] int64, the places in 0..R*L-1 whose hidden state predicts a completion token
    targets: Tensor  # [N] int64, those tokens
    cu_seqlens: Tensor  # [b+1] int32, where each sequence's completion starts among the N
    sequence_index: Tensor  # [b] int64, which sequence of the effective batch each of these is; on the CPU
    advantages: Tensor  # [b] fp32
    sampling_logprobs: Tensor | None = None  # [N] fp32; None: the engine does not say
    old_logprobs: Tensor | None = None  # [N] fp32; None: on policy
    ref_logprobs: Tensor | None = None  # [N] fp32; None: no KL term
    # Ids [K] int32 and offsets [N+1] int64, equal where a token's support is the whole vocabulary; None: of all tokens.
    support: tuple[Tensor, Tensor] | None = None
    covariance_selected: Tensor | None = None  # [N] bool, of the whole step; None: no Clip-Cov or KL-Cov
    # Of one row: where each of its sequences starts, [b+1] int32, and the length of the longest; None of several rows.
    row_cu_seqlens: Tensor | None = None
    longest: int = 0
