"""Prompts, stop tokens, seeds, sampling options and listed tokens, the same for all engines.

docs/engines.md says why log-probs have to be over the tokens that truncated sampling kept, and how each engine knows
them. With score centering what is kept whole is listed too. Which tokens are the most likely ones does not depend on
the token that was drawn: one that is not among them stays out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import index
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fused_grpo.errors import InputError, UnsupportedError, WrongTypeError
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.types import FinishReason, ListedTokens, Rollouts, Sample, SamplingParams

T = TypeVar("T")

# vLLM adds a completion's index in its group to its prompt's seed: 62 bits leave room for that in a signed int64.
SEED_BITS = 62

# Options that vLLM is passed. A list of what is allowed, because a server ignores a name that it does not know.
VLLM_EXTRAS = {"allowed_token_ids", "bad_words", "frequency_penalty", "ignore_eos", "logit_bias", "min_tokens"}
VLLM_EXTRAS |= {"presence_penalty", "stop", "stop_token_ids", "thinking_token_budget"}
# Of GenerationConfig: processors that come before the sampling, the cache, and beams.
_EXTRAS = {"bad_words_ids", "begin_suppress_tokens", "cache_implementation", "disable_compile", "length_penalty"}
_EXTRAS |= {"min_new_tokens", "num_beams", "sequence_bias", "stop_token_ids", "suppress_tokens"}

# Of a list of the most likely tokens: the largest top_k or vocabulary; the log-prob of a token that was left out (JSON
# has no -inf, servers send -9999); and the probability of kept tokens that may be missing.
MAX_LISTED, _LEFT_OUT, _MISSING_MASS = 1024, -9000.0, 1e-4
_EXPERT_KINDS = {(dtype, "cpu") for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64)}
Routers = tuple[int, Mapping[int, int]]  # the number of layers, and of the experts by layer
_MASS_ERROR = 1e-3  # of the sum of a support's probabilities: what may be missing, and rounding


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
    without room for `max_tokens` in `max_model_len`, a key of `sampling.extra` that it does not take. UnsupportedError
    for an expression without vLLM.
    """
    allowed = _EXTRAS if engine == "transformers" else VLLM_EXTRAS
    if sampling.structured_outputs_regex is not None and engine == "transformers":
        raise UnsupportedError(
            f"got structured_outputs_regex={sampling.structured_outputs_regex!r} for the transformers engine, want "
            "None: only vLLM constrains tokens to an expression; fix: use_vllm=True"
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
    same = {name: getattr(sampling, name) for name in names} | sampling.extra
    same |= {"n": sampling.num_sampled, "logprobs": 0 if listed is None or listed > max_listed >= 0 else listed}
    of_prompts, first = random.Random(seed), sampling.first_prompt
    places = [of_prompts.getrandbits(SEED_BITS) for _ in range(first + len(prompts))]
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


def wrong_experts(sample: Sample, routers: Routers | None) -> str | None:
    """What is wrong with the experts of a completion, of a model with so many layers, and experts in some of them."""
    experts = sample.routed_experts
    if experts is None or routers is None:
        return None
    num_layers, num_experts = routers
    tokens = len(sample.prompt_ids) + len(sample.completion_ids) - 1
    if experts.ndim != 3 or experts.shape[:2] != (tokens, num_layers) or not experts.shape[2]:
        return f"experts of shape {tuple(experts.shape)} for {tokens} tokens in {num_layers} layers"
    chosen = experts.permute(2, 0, 1)[:, :, list(num_experts)]  # the first of each token, and so on
    lowest, highest = chosen.amin((0, 1)).tolist(), chosen.amax((0, 1)).tolist()
    for (layer, count), least, most in zip(num_experts.items(), lowest, highest, strict=True):
        if least < 0 or most >= count:
            return f"experts {least} to {most} of {count} in layer {layer}"
    # Not what a router chooses: an engine that returns zeros for what it does not know.
    if any((chosen[apart:] == chosen[:-apart]).any() for apart in range(1, len(chosen))):
        return "an expert twice for a token"
    return None


def rollouts_of(
    prompts: list[list[int]], completions: Sequence[Completion], sampling: SamplingParams, *, weight_version: int
) -> Rollouts:
    """Rollouts from `sampling.num_sampled` completions of each prompt."""
    repeats = sampling.n // sampling.num_sampled
    completions = [completion for completion in completions for _ in range(repeats)]
    listed = all_known([one.listed_tokens for one in completions]) if sampling.wants_ids else None
    if listed is not None and not sampling.wants_logprobs:  # some engines know ids by their log-probs
        listed = [replace(one, logprobs=None) for one in listed]
    return Rollouts(
        prompt_ids=prompts,
        completion_ids=[completion.token_ids for completion in completions],
        sampling_logprobs=all_known([completion.logprobs for completion in completions]),
        finish_reasons=[completion.finish_reason for completion in completions],
        num_generations=sampling.n,
        weight_version=weight_version,
        listed_tokens=listed,
        routed_experts=all_known([one.routed_experts for one in completions]),
    )


def all_known(values: Sequence[T | None]) -> list[T] | None:
    """The values; None where one of them is not known."""
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else None


class SupportRecorder:
    """Collects the supports of a batch of B sequences, step by step; with `top` so many of the most likely tokens."""

    def __init__(self, top: int = 0) -> None:
        self._ids, self._sizes, self._logprobs, self._top = list[Tensor](), list[Tensor](), list[Tensor](), top

    def add(self, scores: Tensor, logprobs: Tensor | None = None) -> None:
        """The scores [B, V] of a step, -inf where a token was left out, and their log-probs [B, V] where those are
        wanted."""
        kept = scores > -torch.inf
        if logprobs is None:
            kept &= ~kept.all(dim=1, keepdim=True)
        elif self._top:
            likely = logprobs.topk(min(self._top, logprobs.shape[1])).indices
            kept &= torch.zeros_like(kept).scatter_(1, likely, True)
        self._ids.append(kept.nonzero()[:, 1].to("cpu", torch.int32))
        self._sizes.append(kept.sum(dim=1).to("cpu", torch.int32))
        if logprobs is not None:
            self._logprobs.append(logprobs[kept].cpu())

    def take(self) -> list[ListedTokens]:
        """Those of each sequence since the last call."""
        sizes = torch.stack(self._sizes)  # [T, B]
        sequences = torch.arange(sizes.shape[1]).repeat(len(sizes)).repeat_interleave(sizes.flatten())
        order, counts = sequences.argsort(stable=True), sizes.sum(0).tolist()
        ids, logprobs = torch.cat(self._ids)[order].split(counts), [None] * len(counts)
        if self._logprobs:
            logprobs = torch.cat(self._logprobs)[order].split(counts)
        self._ids, self._sizes, self._logprobs = [], [], []
        each = zip(ids, sizes.T.contiguous(), logprobs, strict=True)
        return [ListedTokens(*one, is_top_k=self._top > 0) for one in each]


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


def wrong_listed(listed: ListedTokens, token_ids: Sequence[int], vocab_size: int) -> str | None:
    """What is wrong with the supports of a completion, or with the most likely tokens in their place."""
    ids, sizes, logprobs = listed.ids, listed.sizes, listed.logprobs
    if not len(sizes):
        return "no complete list of the tokens that the sampler kept"
    if len(sizes) != len(token_ids) or int(sizes.min()) < 0 or int(sizes.sum()) != len(ids):
        return f"{len(ids)} kept tokens for supports of {len(sizes)} tokens"
    if not len(ids):
        return None
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        return f"kept tokens from {int(ids.min())} to {int(ids.max())}"
    place = torch.arange(len(sizes)).repeat_interleave(sizes)
    if not ((ids[1:] > ids[:-1]) | (place[1:] > place[:-1])).all():
        return "kept tokens that are not ascending, or twice there"
    # Without duplicates a token is at most once in its support.
    sampled = ids == torch.as_tensor(token_ids, dtype=torch.int32)[place]
    if not listed.is_top_k and int(sampled.sum()) != int((sizes > 0).sum()):
        return "a token that is not among those that were kept"
    if logprobs is None:
        return None
    if len(logprobs) != len(ids) or not logprobs.isfinite().all():
        return f"{len(logprobs)} log-probs for {len(ids)} kept tokens, or one that is not finite"
    sums = torch.zeros(len(sizes), dtype=torch.float64).index_add(0, place, logprobs.double().exp())[sizes > 0]
    least = 0.0 if listed.is_top_k else 1.0
    if float(sums.min()) < least - _MASS_ERROR or float(sums.max()) > 1.0 + _MASS_ERROR:
        return f"probabilities of kept tokens that sum to {float(sums.min()):.4g} to {float(sums.max()):.4g}"
    return None


def check_experts(rollouts: Rollouts, sampling: SamplingParams, engine: Any) -> None:
    """UnsupportedError where the experts of tokens are to be replayed and `rollouts` have none.

    WrongTypeError where they are something else than tensors of whole numbers on the CPU.
    """
    for one in rollouts.routed_experts or ():
        kind = (one.dtype, one.device.type) if isinstance(one, Tensor) else type(one).__name__
        if kind not in _EXPERT_KINDS:
            raise WrongTypeError(
                f"got routed_experts with {kind} from the {engine.name} engine, want a tensor [P+T-1, layers, k] of "
                "uint8 or int16 on the CPU for each completion; fix: torch.from_numpy(array.astype('int16')), or None "
                "in the place of the whole list where the engine does not know them"
            )
    if sampling.routed_experts and rollouts.routed_experts is None and rollouts.completion_ids:
        raise UnsupportedError(
            f"got router_replay=True and no experts of its tokens from the {engine.name} engine, want those of every "
            "token that it read; fix: vLLM 0.32 or newer with its model runner V2, servers with "
            "--enable-return-routed-experts, Rollouts.routed_experts of an engine of your own, or router_replay=False"
        )


def check_support(rollouts: Rollouts, sampling: SamplingParams, engine: Any) -> None:
    """Warn, or raise UnsupportedError, where the support of truncated sampling is wanted and `rollouts` have none.

    Raise it too where score centering has no log-probs of the sampler; WrongTypeError for what is no ListedTokens.
    """
    if kinds := {type(one).__name__ for one in rollouts.listed_tokens or () if not isinstance(one, ListedTokens)}:
        raise WrongTypeError(
            f"got listed_tokens with {', '.join(sorted(kinds))} from the {engine.name} engine, want ListedTokens for "
            "each completion; fix: ListedTokens.of(...), or None in the place of the whole list where the engine does "
            "not know them"
        )
    reason = getattr(engine, "why_no_support", None) or "it does not return them"
    listed, is_top_k = rollouts.listed_tokens, sampling.top_k_listed > 0
    is_known = listed is not None and all(one.logprobs is not None and one.is_top_k == is_top_k for one in listed)
    is_known = is_known and rollouts.sampling_logprobs is not None
    if sampling.wants_logprobs and rollouts.completion_ids and not is_known:
        raise UnsupportedError(
            f"got score_centering={sampling.score_centering!r} and no log-probs of the sampler's likely tokens from "
            f"the {engine.name} engine: {reason}; fix: what it needs, or score_centering='off'"
        )
    if not sampling.wants_support or listed is not None or not rollouts.completion_ids:
        return
    set_to = {"top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p}
    options = ", ".join(f"{name}={value}" for name, value in set_to.items() if value not in (0, 1.0))
    text = (
        f"got {options} and no tokens that the sampler kept from the {engine.name} engine: {reason}; without them the "
        "sampler's log-probs are normalised over the tokens that it keeps, the trainer's over all, so that the "
        "sampling correction is biased and the check of the weight sync is off"
    )
    if sampling.sampling_support == "require":
        raise UnsupportedError(f"{text}; fix: what it needs, no truncation, or sampling_support='auto'")
    warn_once(f"{text}; fix: what it needs, or no truncation (top_p=1, top_k=0, min_p=0)")
