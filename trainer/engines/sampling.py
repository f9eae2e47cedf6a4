"""What every engine means by a prompt, a stop token and a seed, so that swapping engines changes nothing else."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from fused_grpo.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from fused_grpo.trainer.types import SamplingParams


# A child seed is its prompt's seed plus its index in the group; the top of the signed 64-bit range is left for that.
SEED_BITS = 62

# What a user may pass on to vLLM. A list of what is allowed, because a server ignores a name that it does not know.
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
    ids = from_model if isinstance(from_model, list) else [from_model]
    return sorted({token for token in [*ids, tokenizer.eos_token_id] if isinstance(token, int)})


def check_prompts(prompt_ids: Sequence[Sequence[int]], *, max_tokens: int, max_model_len: int | None = None) -> None:
    """Refuse what an engine would answer with a crash or with a completion that is silently cut short.

    Errors:
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
                f"max_model_len={max_model_len} together; fix: raise max_model_len, or shorten either"
            )


def prompt_seeds(seed: int, count: int) -> list[int]:
    """One seed for each of `count` prompts, far apart.

    vLLM seeds completion i of a prompt with the prompt's seed + i. Consecutive prompt seeds would therefore give
    neighbouring prompts the same random numbers: two equal prompts would share all but one of their completions.
    """
    source = random.Random(seed)
    return [source.getrandbits(SEED_BITS) for _ in range(count)]


def check_extra(sampling: SamplingParams, *, allowed: Collection[str], engine: str) -> None:
    """Refuse what an engine decides itself, does not know, or would quietly ignore.

    Errors:
        InputError: a key of `sampling.extra` that is not in `allowed`.
    """
    unknown = sorted(sampling.extra.keys() - set(allowed))
    if unknown:
        raise InputError(
            f"got generation_kwargs with {', '.join(unknown)}, want only what the {engine} engine leaves open: "
            f"{', '.join(sorted(allowed))}; fix: use the option of the trainer where there is one, or leave it out"
        )
