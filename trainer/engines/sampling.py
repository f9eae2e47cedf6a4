"""Prompts, stop tokens, seeds, sampling options and listed tokens, the same for all engines.

docs/engines.md says why log-probs have to be over the tokens that truncated sampling kept, and how each engine knows
them. With score centering what is kept whole is listed too. Which tokens are the most likely ones does not depend on
the token that was drawn: one that is not among them stays out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import index
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fused_grpo.errors import InputError, UnsupportedError
from fused_grpo.trainer.types import FinishReason, ListedTokens, Rollouts, SamplingParams

T = TypeVar("T")

# vLLM adds a completion's index in its group to its prompt's seed: 62 bits leave room for that in a signed int64.
SEED_BITS = 62

# Options that vLLM is passed. A list of what is allowed, because a server ignores a name that it does not know.
VLLM_EXTRAS = {"allowed_token_ids", "bad_words", "frequency_penalty", "ignore_eos", "logit_bias", "min_tokens"}
VLLM_EXTRAS |= {"presence_penalty", "stop", "stop_token_ids", "thinking_token_budget"}
_NO_PENALTIES = {"frequency_penalty": 0.0, "presence_penalty": 0.0}  # which vLLM 0.32 takes from there too
# Of GenerationConfig: processors that come before the sampling, the cache, and beams.
_EXTRAS = {"bad_words_ids", "begin_suppress_tokens", "cache_implementation", "disable_compile", "length_penalty"}
_EXTRAS |= {"min_new_tokens", "num_beams", "sequence_bias", "stop_token_ids", "suppress_tokens"}

# Of a list of the most likely tokens: the largest top_k or vocabulary; the log-prob of a token that was left out (JSON
# has no -inf, servers send -9999); and the probability of kept tokens that may be missing.
MAX_LISTED, _LEFT_OUT, _MISSING_MASS = 1024, -9000.0, 1e-4
_COLDEST = 0.01  # the lowest temperature of vLLM's


def stop_token_ids(generation_config: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that end a completion, as vLLM finds them: tokenizer's and generation config's; InputError: no ids."""
    from_model = getattr(generation_config, "eos_token_id", None)
    ids = from_model if isinstance(from_model, Iterable) else [from_model]
    try:
        return sorted({index(token) for token in [*ids, tokenizer.eos_token_id] if token is not None})
    except TypeError as error:
        raise InputError(
            f"got eos_token_id={from_model!r} in the model's generation_config, want token ids; fix: that entry of it"
        ) from error


def check_speculative(config: object, *, on_cpu: bool, engine: str, fix: str) -> None:
    """UnsupportedError for speculative decoding (vLLM's `config` of it) that draws other tokens than the model."""
    if config and on_cpu:
        raise UnsupportedError(
            f"got {engine} on a CPU, want tokens that are drawn from the model: with speculative decoding many "
            "of those of vLLM's CPU build are not (0.32), and log-probs are of others, or not finite; "
            f"fix: {fix}, or take a GPU"
        )


def prepared(
    prompt_ids: Sequence[Sequence[int]],
    sampling: SamplingParams,
    seeds: random.Random,
    *,
    engine: str,
    max_model_len: int | None = None,
) -> tuple[list[list[int]], int]:
    """A copy of the prompts, and the seed of a call, from `seeds` where `sampling` has none.

    InputError for what an engine would crash on, ignore, or silently cut a completion short for: an empty prompt, one
    without room for `max_tokens` in `max_model_len`, a key of `sampling.extra` that it does not take, a temperature
    that vLLM replaces. UnsupportedError for an expression without vLLM.
    """
    allowed = _EXTRAS if engine == "transformers" else VLLM_EXTRAS
    if sampling.structured_outputs_regex is not None and engine == "transformers":
        raise UnsupportedError(
            f"got structured_outputs_regex={sampling.structured_outputs_regex!r} for the transformers engine, want "
            "None: only vLLM constrains tokens to an expression; fix: use_vllm=True"
        )
    if engine != "transformers" and 0 < sampling.temperature < _COLDEST:
        raise InputError(
            f"got temperature={sampling.temperature}, which vLLM replaces by {_COLDEST}, want at least that, or 0 for "
            "greedy sampling; fix: raise it, or use_vllm=False"
        )
    stops = sampling.extra.get("stop_token_ids", [])
    if not isinstance(stops, list | tuple) or any(type(token) is not int for token in stops):
        raise InputError(f"got stop_token_ids={stops!r}, want a list of token ids; fix: generation_kwargs")
    for row, prompt in enumerate(prompt_ids):
        if not prompt:
            raise InputError(
                f"got prompt {row} with no tokens, want at least one; fix: drop the row, or begin prompts "
                "with the tokenizer's beginning-of-sequence token"
            )
        if max_model_len is not None and len(prompt) + sampling.max_tokens > max_model_len:
            raise InputError(
                f"got prompt {row} of {len(prompt)} tokens and max_tokens={sampling.max_tokens}, want at most "
                f"max_model_len={max_model_len} together; fix: raise it (vllm_max_model_length), or shorten either"
            )
    if unknown := sorted(sampling.extra.keys() - allowed):
        raise InputError(
            f"got generation_kwargs with {', '.join(unknown)}, want only what the {engine} engine leaves open: "
            f"{', '.join(sorted(allowed))}; fix: use the option of the trainer where there is one, or leave it out"
        )
    return list(map(list, prompt_ids)), seeds.getrandbits(SEED_BITS) if sampling.seed is None else sampling.seed


def vllm_requests(
    prompt_ids: Sequence[Sequence[int]],
    sampling: SamplingParams,
    seeds: random.Random,
    *,
    engine: str,
    max_model_len: int,
    max_listed: int,
    vocab_size: int,
) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """As `prepared`, a copy of the prompts; and vLLM's sampling options for each, in process and for servers.

    With the log-prob of each token come those of the most likely ones, `max_listed` at most, where -1 is all: none,
    where the engine should list more or no supports are wanted.

    vLLM seeds completion i of a prompt with the prompt's seed + i. Consecutive prompt seeds would therefore give
    neighbouring prompts the same random numbers: two equal prompts would share all but one of their completions.
    A prompt's seed depends on its place among the prompts of all ranks, and not on how many of them this rank has.
    """
    prompts, seed = prepared(prompt_ids, sampling, seeds, engine=engine, max_model_len=max_model_len)
    listed = num_listed(sampling, vocab_size) if sampling.wants_ids else None
    # All of them: a server takes missing ones from the model's generation config.
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    same = {**{name: getattr(sampling, name) for name in names}, **_NO_PENALTIES, **sampling.extra}
    same |= {"n": sampling.num_sampled, "logprobs": 0 if listed is None or listed > max_listed >= 0 else listed}
    generator, first = random.Random(seed), sampling.first_prompt
    places = [generator.getrandbits(SEED_BITS) for _ in range(first + len(prompts))]
    return prompts, [{**same, "seed": seed} for seed in places[first:]]


def turn_sampling(sampling: SamplingParams, max_tokens: int, *, seed: int) -> SamplingParams:
    """The options of one turn of an episode, of those of a batch."""
    # These may not be above the largest number of tokens.
    names = {"min_tokens", "min_new_tokens"} & sampling.extra.keys()
    least = {name: min(sampling.extra[name], max_tokens) for name in names}
    return replace(sampling, n=1, max_tokens=max_tokens, seed=seed, first_prompt=0, extra={**sampling.extra, **least})


class Completion(NamedTuple):
    token_ids: list[int]
    logprobs: list[float] | None  # None: the engine cannot say
    finish_reason: FinishReason
    listed_tokens: ListedTokens | None = None
    routed_experts: Tensor | None = None  # [P+T-1, layers, k] of prompt and completion; None: the engine cannot say


def as_experts(given: Any) -> Tensor | None:
    """vLLM's array of expert ids, uint8 or for more than 256 experts uint16, as a tensor."""
    return None if given is None else torch.from_numpy(given.astype("uint8" if given.dtype.itemsize == 1 else "int16"))


def rollouts_of(
    prompts: list[list[int]], completions: Sequence[Completion], sampling: SamplingParams, *, weight_version: int
) -> Rollouts:
    """Rollouts from `sampling.num_sampled` completions of each prompt."""
    repeats = sampling.n // sampling.num_sampled
    completions = [completion for completion in completions for _ in range(repeats)]
    listed = all_or_none([one.listed_tokens for one in completions]) if sampling.wants_ids else None
    if listed is not None and not sampling.wants_logprobs:  # some engines know ids by their log-probs
        listed = [replace(one, logprobs=None) for one in listed]
    return Rollouts(
        prompt_ids=prompts,
        completion_ids=[completion.token_ids for completion in completions],
        sampling_logprobs=all_or_none([completion.logprobs for completion in completions]),
        finish_reasons=[completion.finish_reason for completion in completions],
        num_generations=sampling.n,
        weight_version=weight_version,
        listed_tokens=listed,
        routed_experts=all_or_none([one.routed_experts for one in completions]),
    )


def all_or_none(values: Sequence[T | None]) -> list[T] | None:
    """The values; None where one of them is not known."""
    present = [value for value in values if value is not None]
    return present if len(present) == len(values) else None


def num_listed(sampling: SamplingParams, vocab_size: int) -> int | None:
    """How many of the most likely tokens to list: those that score centering asks for, or else so many that all that
    are kept are among them; None: more than an engine should list."""
    if sampling.top_k_listed:
        return min(sampling.top_k_listed, vocab_size)
    most = min(sampling.top_k or vocab_size, vocab_size)
    # More than top_k: of tokens with equal logits all are kept, and those of 16 bits often are equal.
    return None if most > MAX_LISTED else min(most + max(8, most // 2), vocab_size)


def check_listed(sampling: SamplingParams | None, *, max_listed: int, vocab_size: int, engine: str, fix: str) -> None:
    """Raise UnsupportedError where score centering needs the log-probs of more tokens than an engine lists."""
    if sampling is None or not sampling.wants_logprobs:
        return
    listed, kind = num_listed(sampling, vocab_size), sampling.score_centering
    if listed is None:
        raise UnsupportedError(
            f"got score_centering={kind!r} and top_k={sampling.top_k} with the {engine} engine, want a bound of the "
            f"kept tokens, whose log-probs it has to list; fix: top_k of 1 to {MAX_LISTED}, or use_vllm=False"
        )
    if listed > max_listed >= 0:
        raise UnsupportedError(
            f"got score_centering={kind!r} and a {engine} engine that lists the log-probs of {max_listed} tokens at "
            f"most, want {listed}; fix: {fix}={listed}, or fewer (score_centering_topk, top_k)"
        )


def listed_support(steps: Iterable[dict[int, float]], top: int = 0) -> ListedTokens:
    """From the log-probs of each step's most likely tokens; empty, which is wrong, where more than those were kept.

    With `top` it has so many of them, whatever was kept. A step has the token that was drawn too, however likely it is.
    """
    kept = [{token: logprob for token, logprob in step.items() if logprob > _LEFT_OUT} for step in steps]
    if top:
        likely = (sorted(step.items(), key=lambda entry: (-entry[1], entry[0]))[:top] for step in kept)
        return ListedTokens.of(map(dict, likely), is_top_k=True)
    masses = [sum(math.exp(min(logprob, 0.0)) for logprob in step.values()) for step in kept]
    return ListedTokens.of(kept if min(masses, default=1.0) >= 1.0 - _MISSING_MASS else [])
