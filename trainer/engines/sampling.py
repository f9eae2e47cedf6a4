"""Prompts, stop tokens, seeds and sampling options, the same for all engines."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fused_grpo.errors import InputError
from fused_grpo.trainer.engines.support import Support, support_fields
from fused_grpo.trainer.types import FinishReason, Rollouts, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# vLLM adds a completion's index in its group to its prompt's seed: 62 bits leave room for that in a signed int64.
SEED_BITS = 62

# Options that vLLM is passed. A list of what is allowed, because a server ignores a name that it does not know.
VLLM_EXTRAS = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "frequency_penalty",
        "ignore_eos",
        "logit_bias",
        "min_tokens",
        "presence_penalty",
        "stop",
        "stop_token_ids",
        "thinking_token_budget",
    }
)


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that end a completion, as vLLM finds them: the tokenizer's and those of the model's generation config."""
    config = getattr(model, "generation_config", None)
    from_model = getattr(config, "eos_token_id", None)
    ids = from_model if isinstance(from_model, Iterable) else [from_model]
    return sorted({int(token) for token in [*ids, tokenizer.eos_token_id] if token is not None})


def check_prompts(prompt_ids: Sequence[Sequence[int]], *, max_tokens: int, max_model_len: int | None = None) -> None:
    """Refuse prompts for which an engine would crash or silently cut a completion short.

    Raises:
        InputError: an empty prompt, or a prompt that leaves no room for `max_tokens` more in `max_model_len`.
    """
    for index, prompt in enumerate(prompt_ids):
        if not prompt:
            raise InputError(
                f"got prompt {index} with no tokens, want at least one; fix: drop the row, or begin prompts "
                "with the tokenizer's beginning-of-sequence token"
            )
        if max_model_len is not None and len(prompt) + max_tokens > max_model_len:
            raise InputError(
                f"got prompt {index} of {len(prompt)} tokens and max_tokens={max_tokens}, want at most "
                f"max_model_len={max_model_len} together; fix: raise max_model_len (vllm_max_model_length), or "
                "shorten either"
            )


def check_extra(sampling: SamplingParams, *, allowed: Collection[str], engine: str) -> None:
    """Refuse options that an engine sets itself, does not know, or would ignore.

    Raises:
        InputError: a key of `sampling.extra` that is not in `allowed`.
    """
    unknown = sorted(sampling.extra.keys() - set(allowed))
    if unknown:
        raise InputError(
            f"got generation_kwargs with {', '.join(unknown)}, want only what the {engine} engine leaves open: "
            f"{', '.join(sorted(allowed))}; fix: use the option of the trainer where there is one, or leave it out"
        )


def vllm_options(sampling: SamplingParams, *, seed: int, count: int, listed: int = 0) -> list[dict[str, Any]]:
    """vLLM's sampling options for each of `count` prompts, in process and for servers, each with a seed of its own.

    With the log-prob of each token come those of the `listed` most likely ones.

    vLLM seeds completion i of a prompt with the prompt's seed + i. Consecutive prompt seeds would therefore give
    neighbouring prompts the same random numbers: two equal prompts would share all but one of their completions.
    A prompt's seed depends on its place among the prompts of all ranks, and not on how many of them this rank has.
    """
    source = random.Random(seed)
    seeds = [source.getrandbits(SEED_BITS) for _ in range(sampling.first_prompt + count)][sampling.first_prompt :]
    # All of them: a server takes missing ones from the model's generation config.
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    same = {name: getattr(sampling, name) for name in names} | {"logprobs": listed} | sampling.extra
    same["n"] = sampling.num_sampled
    return [{**same, "seed": seed} for seed in seeds]


class Completion(NamedTuple):
    """One completion."""

    token_ids: list[int]
    logprobs: list[float] | None  # None: the engine cannot say
    finish_reason: FinishReason
    support: Support | None = None


def rollouts_of(
    prompts: list[list[int]], completions: Sequence[Completion], sampling: SamplingParams, *, weight_version: int
) -> Rollouts:
    """Rollouts from `sampling.num_sampled` completions of each prompt."""
    repeats = sampling.n // sampling.num_sampled
    completions = [completion for completion in completions for _ in range(repeats)]
    logprobs = [completion.logprobs for completion in completions if completion.logprobs is not None]
    return Rollouts(
        prompt_ids=prompts,
        completion_ids=[completion.token_ids for completion in completions],
        sampling_logprobs=logprobs if len(logprobs) == len(completions) else None,
        finish_reasons=[completion.finish_reason for completion in completions],
        num_generations=sampling.n,
        weight_version=weight_version,
        **support_fields([completion.support for completion in completions] if sampling.wants_support else [None]),
    )
