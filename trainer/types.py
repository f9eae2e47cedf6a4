"""What travels between the rooms of the trainer: frozen, with the shape of every field beside it.

Letters: P prompts, G completions per prompt (`num_generations`), B = P * G sequences, R rows of L tokens in a
micro-batch (prompts and completions), N its completion tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

FinishReason = Literal["stop", "length"]


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
    seed: int | None = None  # the same seed, prompts and weights give the same completions

    @property
    def is_plain(self) -> bool:
        """True where tokens come from softmax(logits / temperature) itself, as the trainer's log-probs assume."""
        untruncated = self.top_p == 1.0 and self.top_k == 0 and self.min_p == 0.0
        return self.temperature > 0 and untruncated and self.repetition_penalty == 1.0


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """G completions for each of P prompts. Prompt-major: completion i belongs to prompt i // G."""

    prompt_ids: list[list[int]]  # P lists of token ids
    completion_ids: list[list[int]]  # B lists of token ids, each with its end-of-sequence token where it stopped
    sampling_logprobs: list[list[float]]  # B lists, log-prob of each token under the distribution it was drawn from
    finish_reasons: list[FinishReason]  # B
    num_generations: int  # G
    weight_version: int  # the optimizer step whose weights the engine was serving


@dataclass(frozen=True, kw_only=True)
class EffectiveBatch:
    """Everything one optimizer step learns from, on this process: B sequences in order, each with its advantage."""

    prompt_ids: list[list[int]]  # B
    completion_ids: list[list[int]]  # B
    sampling_logprobs: list[list[float]]  # B
    advantages: Tensor  # [B] fp32


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Some sequences of an effective batch, packed end to end into R rows."""

    input_ids: Tensor  # [R, L] int64
    position_ids: Tensor  # [R, L] int64, from 0 in each sequence: this is what keeps sequences apart in attention
    predictors: Tensor  # [N] int64, the places in 0..R*L-1 whose hidden state predicts a completion token
    targets: Tensor  # [N] int64, those tokens
    cu_seqlens: Tensor  # [b+1] int32, where each sequence's completion starts among the N
    advantages: Tensor  # [b] fp32
    sampling_logprobs: Tensor  # [N] fp32
    old_logprobs: Tensor | None = None  # [N] fp32; None: on policy
    ref_logprobs: Tensor | None = None  # [N] fp32; None: no KL term
