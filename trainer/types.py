"""What travels between the rooms of the trainer: frozen, with the shape of every field beside it.

The way of a completion, from its prompt to its gradient:

    Row             a prompt and its columns, as the dataset has them                  data/
    SamplingParams  what an engine is asked for                                        config/
    Rollouts        what it answers, in columns, as TRL's `rollout_func` does          engines/
    Episode         of a completion of several turns: its messages, calls, why it ended    episodes/
    Sample          one completion: checked, or with the `failure` of its group        engines/checked_engine.py
                    + text, rewards, dropped: what the reward functions say            collect/scoring.py
                    + advantage, from its whole group; in_loss                         collect/collector.py
                    + skipped; it goes to the rank that learns from it                 batching/micro_batches.py
                    + old_logprobs, ref_logprobs, from the trainer's models            learner.py
    RolloutBuffer   a list of samples for each optimizer step, and in a checkpoint     batching/rollout_buffer.py
    MicroBatch      some of them in rows of tokens; its loss has the gradient          batching/, policy.py

Beside it, `RewardOutput` is what the reward functions return, `Scored` the samples of one generation with what their
scoring took; `RolloutFacts` and `Evaluation` lead to the logs, not to a gradient.

Letters: P prompts, G completions per prompt (`num_generations`), B = P * G sequences, T tokens of a completion, R rows
of L tokens in a micro-batch (prompts and completions), N the model's own completion tokens in it.

The support of a token is the set of ids that top_p, top_k and min_p left for the sampler to draw from. It travels as
`ListedTokens`; with score_centering="topk" so do the most likely ids, whatever was drawn.

The experts of P prompt and T completion tokens are a tensor [P+T-1, layers, k], uint8 or int16 on the CPU: those that
the sampler computed each token with. It never read the last one. Layers without experts have any numbers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fused_grpo.config import Centering

EQUAL_REWARDS = 1e-6  # rewards of a group that differ by less are equal but for rounding
FinishReason = Literal["stop", "length"]
# The model called no tool; its turn was cut; it had all its turns; the tools' answers have no room; the environment's
# `done` was true.
EpisodeEnd = Literal["stop", "length", "turn limit", "no room", "done"]
SupportChoice = Literal["auto", "require", "off"]
# Options of an engine that leave the distribution of each token as it is: where to stop, how to compute.
_PLAIN_EXTRAS = {"stop", "stop_token_ids", "ignore_eos", "cache_implementation", "disable_compile"}


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
    score_centering: Centering = "off"  # whether to return log-probs of the support ("kept") or of the most likely ids
    score_centering_topk: int = 128  # how many those are, of "topk"
    routed_experts: bool = False  # whether to return the experts of each token, of a mixture of experts

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
    def top_k_listed(self) -> int:
        """How many of the most likely tokens are to be returned in place of supports, with log-probs; 0: none."""
        return self.score_centering_topk if self.score_centering == "topk" and self.temperature > 0 else 0

    @property
    def wants_ids(self) -> bool:
        """True where an engine that can is to return ids for each token: its support, or the most likely ones."""
        return self.wants_support or self.top_k_listed > 0

    @property
    def wants_logprobs(self) -> bool:
        """True where it has to, with the sampler's log-probs of them."""
        return self.wants_ids and self.score_centering != "off"

    @property
    def is_plain(self) -> bool:
        """True where tokens come from softmax(logits / temperature) itself."""
        return not self.is_truncated and self.is_plain_within_support

    @property
    def is_plain_within_support(self) -> bool:
        """True where they come from softmax(logits / temperature) over the support of each token."""
        unforced = self.structured_outputs_regex is None and self.extra.keys() <= _PLAIN_EXTRAS
        return self.temperature > 0 and unforced and self.repetition_penalty == 1.0


@dataclass(frozen=True)
class ListedTokens:
    """For each of T sampled tokens the ids of its support, or the most likely ids in their place.

    Tensors are on the CPU, those of all tokens end to end: K is the sum of the sizes.
    """

    ids: Tensor  # [K] int32, ascending within a token
    sizes: Tensor  # [T] int32; 0: no ids, its support is the whole vocabulary
    logprobs: Tensor | None = None  # [K] fp32, the sampler's, of the distribution drawn from; None: not known
    is_top_k: bool = False  # True: the most likely ids, and log-probs over the whole vocabulary

    @classmethod
    def of(cls, steps: Iterable[Collection[int]], *, is_top_k: bool = False) -> ListedTokens:
        """From the ids of each token, in any order, or mappings from these to their log-probs."""
        given = [(step, sorted(step)) for step in steps]
        ids = torch.tensor([token for _, tokens in given for token in tokens], dtype=torch.int32)
        sizes = torch.tensor([len(tokens) for _, tokens in given], dtype=torch.int32)
        values = [step[token] for step, tokens in given if isinstance(step, Mapping) for token in tokens]
        logprobs = torch.tensor(values, dtype=torch.float32) if len(values) == len(ids) else None
        return cls(ids, sizes, logprobs, is_top_k)

    @classmethod
    def joined(cls, parts: Sequence[ListedTokens]) -> ListedTokens:
        """Of several parts of a completion, or of several completions, one after the other."""
        logprobs = [part.logprobs for part in parts if part.logprobs is not None]
        return cls(
            torch.cat([part.ids for part in parts]),
            torch.cat([part.sizes for part in parts]),
            torch.cat(logprobs) if len(logprobs) == len(parts) else None,
            any(part.is_top_k for part in parts),
        )

    def first(self, tokens: int) -> ListedTokens:
        """Of the first tokens alone."""
        sizes, logprobs = self.sizes[:tokens].clone(), self.logprobs
        count = int(sizes.sum())
        logprobs = None if logprobs is None else logprobs[:count].clone()
        return replace(self, ids=self.ids[:count].clone(), sizes=sizes, logprobs=logprobs)

    def select(self, chosen: Tensor) -> ListedTokens:
        """Of the tokens that are True in `chosen` [T]."""
        entries = chosen.repeat_interleave(self.sizes)
        logprobs = None if self.logprobs is None else self.logprobs[entries]
        return replace(self, ids=self.ids[entries], sizes=self.sizes[chosen], logprobs=logprobs)


class Turn(NamedTuple):
    """What the model is to say next in an episode."""

    episode: int  # its number in the batch
    prompt_ids: list[int]  # all that it reads
    max_tokens: int
    seed: int


class ToolCall(NamedTuple):
    """A call of a tool, and its answer."""

    name: str
    arguments: Any  # a dict, or what the model wrote in its place
    result: str  # the text that the model reads
    failed: bool
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Episode:
    """What happened in a completion of several turns."""

    prompt: list[dict[str, Any]]  # messages, with what the environment has begun with
    messages: list[dict[str, Any]]  # of the model and of tools: the completion
    turns: int  # of the model
    calls: list[ToolCall]  # also those whose answers had no room
    ended: EpisodeEnd
    environment: Any = None  # the object; None: there is none

    def record(self) -> dict[str, Any]:
        """What rollouts.jsonl has of it beside its prompt."""
        calls = [call._asdict() for call in self.calls]
        return {"messages": self.messages, "turns": self.turns, "tool_calls": calls, "ended": self.ended}


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """What an engine returns: G completions for each of P prompts. Completion i belongs to prompt i // G."""

    prompt_ids: list[list[int]]  # P lists of token ids; B where the members of a group may have others
    completion_ids: list[list[int]]  # B lists of token ids, each with its end-of-sequence token where it stopped
    sampling_logprobs: list[list[float]] | None  # B lists, log-prob of each token as drawn; None: the engine cannot say
    finish_reasons: list[FinishReason]  # B
    num_generations: int  # G
    weight_version: int  # the optimizer step whose weights the engine was serving
    extra: dict[str, list[Any]] = field(default_factory=dict)  # columns of B values for the reward functions
    completion_masks: list[list[bool]] | None = None  # B lists, True: the model's own token; None: all of them are
    listed_tokens: list[ListedTokens] | None = None  # B; None: the engine cannot say, or keeps all tokens
    routed_experts: list[Tensor] | None = None  # B, [P+T-1, layers, k]; None: the engine does not say
    episodes: list[Episode] | None = None  # B; None: each completion is one turn

    def samples(self) -> list[Sample]:
        """The completions one by one."""
        count = len(self.completion_ids)
        extra = [dict(zip(self.extra, values, strict=True)) for values in zip(*self.extra.values(), strict=True)]
        columns: dict[str, Sequence[Any] | None] = {
            "prompt_ids": [ids for ids in self.prompt_ids for _ in range(count // max(1, len(self.prompt_ids)))],
            "completion_ids": self.completion_ids,
            "completion_mask": self.completion_masks,
            "sampling_logprobs": self.sampling_logprobs,
            "listed_tokens": self.listed_tokens,
            "routed_experts": self.routed_experts,
            "finish_reason": self.finish_reasons,
            "weight_version": [self.weight_version] * count,
            "extra": extra or None,
            "episode": self.episodes,
        }
        return samples_from(columns)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One completion of T tokens and all that belongs to it. Rooms add to it by `dataclasses.replace`.

    Of the fields that may be None, all samples of a batch have one or none has it.
    """

    # From the engine.
    prompt_ids: list[int]
    completion_ids: list[int]  # T, with the end-of-sequence token where it stopped
    completion_mask: list[bool] | None = None  # T, True: the model's own token, and so in the loss; None: all of them
    sampling_logprobs: list[float] | None = None  # T, as drawn; None: the engine does not say
    listed_tokens: ListedTokens | None = None  # of its T tokens; None: their supports are the whole vocabulary
    routed_experts: Tensor | None = None  # [P+T-1, layers, k], of P prompt tokens, too; None: the engine does not say
    finish_reason: FinishReason
    weight_version: int  # the optimizer step whose weights the engine was serving
    extra: dict[str, Any] = field(default_factory=dict)  # by column, for the reward functions
    episode: Episode | None = None  # of several turns; None: it is one
    failure: str | None = None  # why its group cannot be used, and is dropped
    greedy: Sample | None = None  # of its prompt, the baseline of ReMax; None: another rank has it, or there is none

    # From the reward functions.
    row: dict[str, Any] = field(default_factory=dict)  # of the dataset
    text: str = ""  # the completion without special tokens
    rewards: list[float] = field(default_factory=list)  # F, of each function; NaN: it did not score this one
    reward: float = math.nan  # their weighted sum; NaN: no function scored it
    dropped: bool = False  # its group failed, in the engine or in a reward function, and is not learned from
    logged: dict[str, Any] = field(default_factory=dict)  # by column, for the log

    # From its group, and for the loss.
    advantage: float = 0.0  # an fp32 number
    token_advantages: Tensor | None = None  # [its own tokens] fp32, which take its place in the loss; None: it counts
    in_loss: bool = True  # False: it counts in normalisers only
    skipped: bool = False  # in the loss, but without a gradient, so not in the forward pass
    old_logprobs: Tensor | None = None  # [its own tokens] fp32, none of one without forward pass; None: on policy
    ref_logprobs: Tensor | None = None  # the same; None: no KL term, or not computed yet

    @property
    def num_own(self) -> int:
        """Completion tokens that are the model's own, and so in the loss."""
        return len(self.completion_ids) if self.completion_mask is None else sum(self.completion_mask)

    @property
    def baseline(self) -> float:
        """The reward of the greedy completion of its prompt; NaN where that was not scored, or is not here."""
        return math.nan if self.greedy is None else self.greedy.reward

    @property
    def kept_sizes(self) -> Tensor | None:
        """The sizes [T] of its supports; None where they are the whole vocabulary."""
        return None if self.listed_tokens is None or self.listed_tokens.is_top_k else self.listed_tokens.sizes

    @property
    def has_advantage(self) -> bool:
        """Whether any token has one that is not 0."""
        return self.advantage != 0 if self.token_advantages is None else bool(self.token_advantages.any())

    @property
    def in_forward(self) -> bool:
        """Whether it goes through the model."""
        return self.in_loss and not self.skipped

    def own(self, values: Sequence[Any]) -> Sequence[Any]:
        """Of a value for each completion token those of the model's own tokens."""
        return values if self.completion_mask is None else list(compress(values, self.completion_mask))


def samples_from(columns: Mapping[str, Sequence[Any] | None]) -> list[Sample]:
    """Samples from columns of B values each, under the names of their fields; None stands for a column without any."""
    given = {name: values for name, values in columns.items() if values is not None}
    return [Sample(**dict(zip(given, values, strict=True))) for values in zip(*given.values(), strict=True)]


def with_fields(samples: Sequence[Sample], columns: Mapping[str, Sequence[Any]]) -> list[Sample]:
    """The samples with other values of some fields, each a column of B values."""
    pairs = zip(samples, zip(*columns.values(), strict=True), strict=True)
    return [replace(sample, **dict(zip(columns, values, strict=True))) for sample, values in pairs]


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Some samples of a batch, packed end to end into R rows. Of tokens of an environment only the ids are in it."""

    input_ids: Tensor  # [R, L] int64
    position_ids: Tensor  # [R, L] int64, from 0 in each sequence: this is what keeps sequences apart in attention
    attention_mask: Tensor  # [R, L] int64, 0 where there is padding; position ids keep attention from it without this
    # [R, L] int64, of each place the first behind it in its row that does not see it; None: position ids say it all,
    # since no prompt is shared.
    seen_until: Tensor | None = None
    predictors: Tensor  # [N] int64, the places in 0..R*L-1 whose hidden state predicts one of the model's tokens
    targets: Tensor  # [N] int64, those tokens
    cu_seqlens: Tensor  # [b+1] int32, where each sequence's completion starts among the N
    sequence_index: Tensor  # [b] int64, which sequence of the effective batch each of these is; on the CPU
    advantages: Tensor  # [b] fp32, or of each token [N, 1]
    sampling_logprobs: Tensor | None = None  # [N] fp32; None: the engine does not say
    old_logprobs: Tensor | None = None  # [N] fp32; None: on policy
    ref_logprobs: Tensor | None = None  # [N] fp32; None: no KL term
    # Ids [K] int32 and offsets [N+1] int64, equal where a token's support is the whole vocabulary; None: of all tokens.
    support: tuple[Tensor, Tensor] | None = None
    # For score centering: ids [N, k] int64, -1 where a token has fewer, and their log-probs [N, k] fp32, the sampler's;
    # or None and those of the support's ids, [K] fp32.
    centering: tuple[Tensor | None, Tensor] | None = None
    covariance_selected: Tensor | None = None  # [N] bool, of the whole step; None: no Clip-Cov or KL-Cov
    # [R*L, layers, k] int16, -1 where the sampler's are not known; None: of no token.
    routed_experts: Tensor | None = None
    # Of one row: where each of its sequences starts, [b+1] int32, and the length of the longest; None of several rows.
    row_cu_seqlens: Tensor | None = None
    longest: int = 0
