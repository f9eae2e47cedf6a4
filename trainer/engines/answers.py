"""Holds an engine to its contract: what it was asked for is what it answered, from the weights that it was given.

The trainer asks every engine through these two functions, its own as well as a user's, so that whatever goes wrong in
one ends here, before a reward is computed from it. An answer is whole or it is refused: nothing is cut, padded or
left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from fused_grpo.errors import UnavailableError, WeightSyncError
from fused_grpo.trainer.engines.engine import RolloutEngine
from fused_grpo.trainer.engines.function import FunctionEngine
from fused_grpo.trainer.types import FinishReason, Rollouts, SamplingParams

# A log-softmax in fp32 may round to a little above 0; and what fp32 does not hold would be -inf in the loss.
_HIGHEST_LOGPROB, _LOWEST_LOGPROB = 1e-3, torch.finfo(torch.float32).min
_FINISH_REASONS = get_args(FinishReason)


def complete(
    engine: RolloutEngine,
    prompt_ids: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    vocab_size: int,
    prompts: Sequence[Any] | None = None,
) -> Rollouts:
    """`engine.generate`, with its answer checked.

    Args:
        prompt_ids: P prompts as token ids.
        sampling: how completions are drawn.
        vocab_size: V of the model that is trained.
        prompts: what the prompts were made from, for a function of the user's.

    Errors:
        UnavailableError: an answer that is not what was asked for: it names the engine, the prompt and what was got.
        WeightSyncError: completions of other weights than those that the engine was given last.
    """
    version, of_user = engine.weight_version, isinstance(engine, FunctionEngine)
    if isinstance(engine, FunctionEngine):
        rollouts = engine.generate(prompt_ids, sampling, prompts=prompts)
    else:
        rollouts = engine.generate(prompt_ids, sampling)
    check_rollouts(rollouts, prompt_ids, sampling, engine=engine.name, vocab_size=vocab_size, of_user=of_user)
    if rollouts.weight_version != version:
        raise WeightSyncError(
            f"got completions of weight version {rollouts.weight_version} from the {engine.name} engine, want version "
            f"{version}, which it was given last; fix: one trainer per engine, and rollouts that say which weights "
            "they were sampled from"
        )
    return rollouts


def sync(engine: RolloutEngine, named_weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
    """`engine.load_weights`, after which the engine has to say that it serves them.

    Errors:
        WeightSyncError: it says that it serves others; or what the engine itself raises.
    """
    engine.load_weights(named_weights, version=version)
    if engine.weight_version != version:
        raise WeightSyncError(
            f"got weight version {engine.weight_version} from the {engine.name} engine after a sync, want {version}; "
            "fix: load_weights has to serve what it is given and set weight_version, or raise"
        )


def check_rollouts(
    rollouts: Rollouts,
    prompt_ids: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    engine: str,
    vocab_size: int,
    of_user: bool = False,
) -> None:
    """Raise where rollouts are not `sampling.n` completions of each of `prompt_ids`.

    Args:
        of_user: made by a `rollout_func`, which may bring prompts of its own, and NaN for a log-prob that it lacks.

    Errors:
        UnavailableError: another number of anything, other prompts, a completion that is empty or longer than
            `sampling.max_tokens`, a token id outside [0, V), a log-prob that cannot be one, an unknown finish reason.
    """
    if shape := _wrong_shape(rollouts, prompt_ids, sampling.n, of_user=of_user):
        raise UnavailableError(
            f"got {shape} from the {engine} engine, want {sampling.n} completions for each of {len(prompt_ids)} "
            "prompts, in their order; fix: the engine, which answers something else than it was asked"
        )
    # A function's own prompts; of any other engine they are those that it was asked.
    for ids in rollouts.prompt_ids if of_user else ():
        if wrong := _wrong_tokens(ids, len(ids), vocab_size):
            raise UnavailableError(
                f"got {wrong} in a prompt from the {engine} engine, want token ids below {vocab_size}; fix: encode "
                "prompts with the tokenizer of the model that is trained"
            )
    logprobs = rollouts.sampling_logprobs
    for index, (ids, reason) in enumerate(zip(rollouts.completion_ids, rollouts.finish_reasons, strict=True)):
        wrong = _wrong_tokens(ids, sampling.max_tokens, vocab_size)
        if wrong is None and logprobs is not None:
            wrong = _wrong_logprobs(logprobs[index], len(ids), gaps=of_user)
        if wrong is None and reason not in _FINISH_REASONS:
            wrong = f"finish reason {reason!r}"
        if wrong is not None:
            asked = index // sampling.n
            raise UnavailableError(
                f"got {wrong} in completion {index % sampling.n} of prompt {asked} (token ids "
                f"{list(prompt_ids[asked])[:16]}) from the {engine} engine, want 1 to {sampling.max_tokens} token ids "
                f"below {vocab_size}, a finite log-prob of at most 0 for each, and stop or length as its end; fix: an "
                "engine of the model that is trained; NaN means that it cannot compute that model"
            )


def _wrong_shape(rollouts: Rollouts, prompt_ids: Sequence[Sequence[int]], n: int, *, of_user: bool) -> str | None:
    lists: dict[str, Sequence[Any]] = {"completions": rollouts.completion_ids}
    lists["finish reasons"] = rollouts.finish_reasons
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
    pairs = zip(rollouts.prompt_ids, prompt_ids, strict=True)
    others = not of_user and any(list(got) != list(asked) for got, asked in pairs)
    return "completions of other prompts" if others else None


def _wrong_tokens(ids: list[int], max_tokens: int, vocab_size: int) -> str | None:
    if not ids:
        return "no tokens"
    if len(ids) > max_tokens:
        return f"{len(ids)} tokens"
    # At once and not token by token, which takes half a second for a million.
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return None
    wrong = next(token for token in ids if type(token) is not int or not 0 <= token < vocab_size)
    return f"token id {wrong!r}"


def _wrong_logprobs(values: list[float], count: int, *, gaps: bool) -> str | None:
    if len(values) != count:
        return f"{len(values)} log-probs for {count} tokens"
    plain = set(map(type, values)) <= {float, int} and _LOWEST_LOGPROB <= min(values) <= max(values) <= _HIGHEST_LOGPROB
    if plain and not any(map(math.isnan, values)):
        return None
    wrong = [value for value in values if not _is_logprob(value, gaps=gaps)]
    return f"log-prob {wrong[0]!r}" if wrong else None


def _is_logprob(value: Any, *, gaps: bool) -> bool:
    if not isinstance(value, float | int):
        return False
    return _LOWEST_LOGPROB <= value <= _HIGHEST_LOGPROB or (gaps and value != value)
