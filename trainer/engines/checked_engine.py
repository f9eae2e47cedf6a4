"""Checks that an engine returned what was asked for, sampled from the weights that it was given.

The trainer calls every engine through `checked_generate` and `checked_load_weights`, so an error of an engine ends
here, before a reward is computed. A response is used as it is or refused: nothing is cut, padded or left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from fused_grpo.errors import UnavailableError, WeightSyncError
from fused_grpo.trainer.engines.protocol import RolloutEngine
from fused_grpo.trainer.engines.rollout_func import FunctionEngine
from fused_grpo.trainer.models.weight_stream import finish
from fused_grpo.trainer.types import FinishReason, Rollouts, SamplingParams

# A log-softmax in fp32 may round to a little above 0; below the lowest fp32 number the loss would see -inf.
_MAX_LOGPROB, _MIN_LOGPROB = 1e-3, torch.finfo(torch.float32).min


def checked_generate(
    engine: RolloutEngine,
    prompt_ids: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    vocab_size: int,
    prompts: Sequence[Any] | None = None,
) -> Rollouts:
    """`engine.generate`, with its rollouts checked.

    Args:
        engine: any rollout engine.
        prompt_ids: P prompts as token ids.
        sampling: how completions are sampled.
        vocab_size: V of the model that is trained.
        prompts: the prompts as they are in the dataset, for a `rollout_func`.

    Raises:
        UnavailableError: another number of anything, other prompts, a completion that is empty or too long, a token
            id outside [0, V), a log-prob that is not finite or above 0, an unknown finish reason. The message names the
            engine, the prompt and what was got.
        WeightSyncError: completions of other weights than those that the engine was given last.
    """
    version = engine.weight_version
    options: dict[str, Any] = {"prompts": prompts} if isinstance(engine, FunctionEngine) else {}
    rollouts = engine.generate(prompt_ids, sampling, **options)
    _check_rollouts(engine, rollouts, prompt_ids, sampling, vocab_size)
    if rollouts.weight_version != version:
        raise WeightSyncError(
            f"got completions of weight version {rollouts.weight_version} from the {engine.name} engine, want version "
            f"{version}, which it was given last; fix: one trainer per engine, and rollouts that say which weights "
            "they were sampled from"
        )
    return rollouts


def checked_load_weights(engine: RolloutEngine, named_weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
    """`engine.load_weights`, with the engine's `weight_version` checked afterwards.

    Raises:
        WeightSyncError: the engine reports another version; or what the engine itself raises.
    """
    try:
        engine.load_weights(named_weights, version=version)
    finally:
        finish(named_weights)
    if engine.weight_version != version:
        raise WeightSyncError(
            f"got weight version {engine.weight_version} from the {engine.name} engine after a sync, want {version}; "
            "fix: load_weights has to serve what it is given and set weight_version, or raise"
        )


def _check_rollouts(
    engine: RolloutEngine,
    rollouts: Rollouts,
    prompt_ids: Sequence[Sequence[int]],
    sampling: SamplingParams,
    vocab_size: int,
) -> None:
    # A `rollout_func` may return other prompts, and NaN for a log-prob that is not known.
    by_user = isinstance(engine, FunctionEngine)
    if wrong := _wrong_counts(rollouts, prompt_ids, sampling.n, by_user=by_user):
        raise UnavailableError(
            f"got {wrong} from the {engine.name} engine, want {sampling.n} completions for each of {len(prompt_ids)} "
            "prompts, in their order; fix: the engine, which returns something else than it was asked for"
        )
    for ids in rollouts.prompt_ids if by_user else ():
        if wrong := _wrong_tokens(ids, vocab_size):
            raise UnavailableError(
                f"got {wrong} in a prompt from the {engine.name} engine, want token ids below {vocab_size}; fix: "
                "encode prompts with the tokenizer of the model that is trained"
            )
    logprobs = rollouts.sampling_logprobs
    for index, (ids, reason) in enumerate(zip(rollouts.completion_ids, rollouts.finish_reasons, strict=True)):
        wrong = f"{len(ids)} tokens" if len(ids) > sampling.max_tokens else _wrong_tokens(ids, vocab_size)
        if not wrong and logprobs is not None:
            wrong = _wrong_logprobs(logprobs[index], len(ids), nan_allowed=by_user)
        if not wrong and reason not in get_args(FinishReason):
            wrong = f"finish reason {reason!r}"
        if wrong:
            asked = index // sampling.n
            raise UnavailableError(
                f"got {wrong} in completion {index % sampling.n} of prompt {asked} (token ids "
                f"{list(prompt_ids[asked])[:16]}) from the {engine.name} engine, want 1 to {sampling.max_tokens} token "
                f"ids below {vocab_size}, a finite log-prob of at most 0 for each, and stop or length as its end; fix: "
                "an engine of the model that is trained; NaN means that it cannot compute that model"
            )


def _wrong_counts(rollouts: Rollouts, prompt_ids: Sequence[Sequence[int]], n: int, *, by_user: bool) -> str | None:
    lists: dict[str, Any] = {"completions": rollouts.completion_ids, "finish reasons": rollouts.finish_reasons}
    if rollouts.sampling_logprobs is not None:
        lists["lists of log-probs"] = rollouts.sampling_logprobs
    lists |= {f"values of {name!r}": values for name, values in rollouts.extra.items()}
    for name, values in lists.items():
        if len(values) != n * len(prompt_ids):
            return f"{len(values)} {name}"
    if rollouts.num_generations != n:
        return f"groups of {rollouts.num_generations}"
    if len(rollouts.prompt_ids) != len(prompt_ids):
        return f"{len(rollouts.prompt_ids)} prompts"
    same = list(map(list, rollouts.prompt_ids)) == list(map(list, prompt_ids))
    return None if by_user or same else "completions of other prompts"


def _wrong_tokens(ids: list[int], vocab_size: int) -> str | None:
    if not ids:
        return "no tokens"
    # All at once: token by token takes half a second for a million.
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return None
    wrong = next(token for token in ids if type(token) is not int or not 0 <= token < vocab_size)
    return f"token id {wrong!r}"


def _wrong_logprobs(values: list[Any], count: int, *, nan_allowed: bool) -> str | None:
    if len(values) != count:
        return f"{len(values)} log-probs for {count} tokens"
    for value in values:
        is_number = isinstance(value, float | int)
        if not is_number or not (_MIN_LOGPROB <= value <= _MAX_LOGPROB or (nan_allowed and value != value)):
            return f"log-prob {value!r}"
    return None
