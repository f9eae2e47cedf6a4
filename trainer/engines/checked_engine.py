"""Checks that an engine returned what was asked for, sampled from the weights that the trainer trains.

The trainer calls every engine through `checked_generate` and `checked_load_weights`, so an error of an engine ends
here, before a reward is computed. docs/engines.md ("What is checked") has the checks, and the bounds of `WeightCheck`.

A policy that has become sure of itself has larger logits, which round further, and a step may have few tokens. So
where the mean of a 16-bit engine is above its bound, the policy's own log-probs are computed in 16 bits too, and
ROUNDINGS times what that moves them is allowed.

Each of several turns is checked. A user's function may sample with anything; where its first turn agrees, its later
ones have to.
"""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fused_grpo.errors import UnavailableError, UnsupportedError, WeightSyncError, WrongTypeError
from fused_grpo.trainer.batching.micro_batch_metrics import FIRST_TURN, MOST_TURNS, turn_differences
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.engines import RolloutEngine, SamplingEngine
from fused_grpo.trainer.engines.rollout_func import FunctionEngine
from fused_grpo.trainer.engines.sampling import SEED_BITS
from fused_grpo.trainer.models.loading import wants_bf16
from fused_grpo.trainer.models.quantized import layers_in_4bit
from fused_grpo.trainer.models.router_replay import ROUTING
from fused_grpo.trainer.models.weight_stream import WeightStream, weights_stay
from fused_grpo.trainer.rewards.reward_call import own_copy
from fused_grpo.trainer.types import FinishReason, ListedTokens, Rollouts, Sample, SamplingParams

_log = logging.getLogger(__name__)
RETRIES = 2  # further calls with rollout_failure="retry"

# A log-softmax in fp32 may round to a little above 0; below the lowest fp32 number the loss would see -inf.
_MAX_LOGPROB, _MIN_LOGPROB = 1e-3, torch.finfo(torch.float32).min

_MAX_BOUND = 1e-3
# The mean was 1.05 to 2.12 times what 16 bits move the policy's own log-probs, in 16 steps of a real model
# (bench/results/cpu-2-cores/rounding-2026-11-26.json).
ROUNDINGS = 3.0
TURN_FACTOR = 3.0  # times the bound of the mean: a turn may have few tokens
_MEAN_BOUND = {torch.float32: 0.02, torch.float16: 0.02, torch.bfloat16: 0.1}

_EXPERT_KINDS = {(dtype, "cpu") for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64)}
Routers = tuple[int, Mapping[int, int]]  # the number of layers, and of the experts by layer
_MASS_ERROR = 1e-3  # of the sum of a support's probabilities: what may be missing, and rounding


def checked_generate(
    engine: SamplingEngine,
    prompt_ids: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    vocab_size: int,
    rows: Sequence[tuple[int, Mapping[str, Any]]] | None = None,
    failure: Literal["fail", "retry", "drop"] = "fail",
    routers: Routers | None = None,
) -> list[Sample]:
    """`engine.generate`, checked: `sampling.n` samples for each prompt, in their order.

    Args:
        rows: of the dataset, with their numbers, for an engine with prompts of its own.
        failure: what to do with a completion that cannot be used. "fail": raise. "retry": sample all completions of its
            prompt again, with another seed, at most RETRIES times; then raise. "drop": empty it, and give all samples
            of its prompt a `failure`.
        routers: the number of the model's layers, and of the experts by layer; None: experts are not checked.

    Raises:
        UnavailableError: another number of anything, other prompts, or a completion that cannot be used, as
            docs/engines.md has it. The message names the engine, the prompt and what was got.
        UnsupportedError: no supports, with `sampling_support="require"`; no experts, with `router_replay`.
        WeightSyncError: completions of other weights than those that the engine was given last.
    """
    samples, size, attempt = generated(engine, prompt_ids, sampling, vocab_size, rows), sampling.n, 0
    by_user = isinstance(engine, FunctionEngine)  # which may return NaN for a log-prob that is not known
    while True:
        wrong = dict[int, str]()
        for index, sample in enumerate(samples):
            is_long = len(sample.completion_ids) > sampling.max_tokens
            what = f"{len(sample.completion_ids)} tokens" if is_long else None
            if what := what or wrong_completion(sample, routers, vocab_size=vocab_size, nan_allowed=by_user):
                number = index // size
                wrong[index] = (
                    f"got {what} in completion {index % size} of prompt {number} (token ids "
                    f"{list(prompt_ids[number])[:16]}) from the {engine.name} engine, want 1 to {sampling.max_tokens} "
                    f"token ids below {vocab_size}, a finite log-prob of at most 0 for each, k unequal experts of the "
                    "model for each that was read (where there are any), and stop or length as its end; fix: an engine "
                    "of the model that is trained; NaN means that it cannot compute that model; if it is rare, "
                    "rollout_failure='retry' or 'drop'"
                )
        if not wrong:
            return samples
        if failure == "drop":
            return _dropped(samples, wrong, size)
        problem, groups = min(wrong.items())[1], sorted({index // size for index in wrong})
        if failure == "fail" or attempt == RETRIES:
            raise UnavailableError(problem)
        _log.warning("%s (sampling %d prompt(s) again, %d of %d)", problem, len(groups), attempt + 1, RETRIES)
        # With the same seed, a model that fails would fail again.
        seed = None if sampling.seed is None else random.Random(f"{sampling.seed}/{attempt}").getrandbits(SEED_BITS)
        given = None if rows is None else [rows[group] for group in groups]
        asked, params = [prompt_ids[group] for group in groups], replace(sampling, seed=seed)
        again = generated(engine, asked, params, vocab_size, given)
        for place, group in enumerate(groups):
            samples[group * size : (group + 1) * size] = again[place * size : (place + 1) * size]
        attempt += 1


def checked_load_weights(
    engine: RolloutEngine, named_weights: Iterable[tuple[str, Tensor]], *, version: int, model: nn.Module | None = None
) -> None:
    """`engine.load_weights`; WeightSyncError where the engine reports another `weight_version` afterwards.

    Or where it changes weights of the `model` that they are of, if no other thread trains that meanwhile.
    """
    is_stream = isinstance(named_weights, WeightStream)
    try:
        with weights_stay(model, engine) if is_stream and model is not None else nullcontext():
            engine.load_weights(named_weights, version=version)
    finally:
        if isinstance(named_weights, WeightStream):
            named_weights.finish()
    if engine.weight_version != version:
        raise WeightSyncError(
            f"got weight version {engine.weight_version} from the {engine.name} engine after a sync, want {version}; "
            "fix: load_weights has to serve what it is given and set weight_version, or raise"
        )


class WeightCheck:
    """Refuses sampling log-probs and log-probs of the trainer that cannot come from the same weights.

    Args:
        args: `logprob_mismatch` "fail" raises, "warn" logs one warning; `max_logprob_difference` is the bound, in nats.
        model: the model that is trained, on `device`.
        own_weights: whether the engine has weights of its own, which can be stale: None is "fail" then, else "warn".
    """

    def __init__(
        self,
        args: GRPOConfig,
        model: nn.Module,
        device: torch.device,
        *,
        own_weights: bool = True,
        is_mixture: bool = False,
    ) -> None:
        # Layers in 4 bits cast what they multiply to a dtype of their own, where they say one.
        own = [layer.compute_dtype for layer in layers_in_4bit(model).values() if layer.compute_dtype is not None]
        dtypes = [torch.bfloat16] if wants_bf16(args) else [next(model.parameters()).dtype, *own]
        self._dtype = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        self._device, self._bound = device.type, args.max_logprob_difference
        self._reaction, self._own_weights, self._has_warned = args.logprob_mismatch, own_weights, False
        self._may_route_otherwise = is_mixture and own_weights and not args.router_replay
        # Whether the policy's distribution is what is sampled from: over all tokens, over the support of each.
        sampling = args.sampling(seed=0)
        self.is_plain, self.is_plain_within_support = sampling.is_plain, sampling.is_plain_within_support

    def check_step(
        self, metrics: Mapping[str, float], rounding: Callable[[torch.dtype], float], *, engine: Any
    ) -> None:
        """Check the completion tokens of a step by its metrics; without log-probs of the sampler there are none."""
        if "sampling_difference_mean" not in metrics:
            return
        turns = turn_differences(metrics) if FIRST_TURN in metrics else ()
        mean, largest = (metrics[f"sampling_difference_{kind}"] for kind in ("mean", "max"))
        self(mean, largest, engine=engine, rounding=rounding, turns=turns)
        if self._may_route_otherwise and largest > _MAX_BOUND:
            self._warn_of_routing(mean, largest, metrics.get(ROUTING), engine)

    def __call__(
        self,
        mean_difference: float,
        max_difference: float,
        *,
        engine: RolloutEngine,
        rounding: Callable[[torch.dtype], float] = lambda dtype: 0.0,
        turns: Sequence[tuple[float, float]] = (),
    ) -> None:
        """Check the completion tokens of a step.

        Args:
            mean_difference, max_difference: of |sampling log-prob - trainer log-prob|, in nats.
            rounding: called where it may explain them: how far a 16-bit dtype moves the policy's own log-probs.
            turns: (mean, maximum) of each turn, where there are several.

        WeightSyncError where a difference is above its bound, or is NaN.
        """
        rounding, is_function = functools.cache(rounding), isinstance(engine, FunctionEngine)
        if is_function and (not turns or self._error(*turns[0], 1, engine, lambda dtype: 0.0)):
            return  # it may sample with anything
        parts = (*enumerate(turns, 1), (None, (mean_difference, max_difference)))
        errors = (self._error(*differences, turn, engine, rounding) for turn, differences in parts)
        error = next(filter(None, errors), None)
        if error is None:
            return
        if (self._reaction or ("fail" if self._own_weights and not is_function else "warn")) == "fail":
            raise error
        if not self._has_warned:
            _log.warning("%s (the run goes on; this is said once; logprob_mismatch='fail' would end it)", error)
        self._has_warned = True

    def _warn_of_routing(self, mean: float, largest: float, share: float | None, engine: RolloutEngine) -> None:
        """Log one warning where a share of the choices of experts differs; None: the engine does not say them."""
        if share == 0.0:
            return
        self._may_route_otherwise = False
        choices = "" if share is None else f", and {share:.2%} of the choices of experts,"
        _log.warning(
            f"got log-probs of a mixture of experts that differ by {mean:.3g} on average and {largest:.3g} at most"
            f"{choices} between the {engine.name} engine and the trainer, want the same experts in both: where scores "
            "are close, rounding chooses (said once); fix: router_replay=True, where the engine returns its experts"
        )

    def _error(
        self, mean: float, largest: float, turn: int | None, engine: RolloutEngine, rounding: Callable[..., float]
    ) -> WeightSyncError | None:
        """What is wrong with the tokens of one turn, where those before it agree; with `turn` None, of all."""
        computed_in = (self._dtype, getattr(engine, "weight_dtype", None) or self._dtype)
        dtype = max(computed_in, key=lambda dtype: torch.finfo(dtype).eps)
        exact = dtype not in _MEAN_BOUND or (dtype == torch.float32 and self._device == "cpu")
        kind, got = ("max", largest) if exact else ("mean", mean)
        bound = self._bound or (_MAX_BOUND if exact else _MEAN_BOUND[dtype] * (1.0 if turn is None else TURN_FACTOR))
        if got <= bound:  # which NaN is not
            return None
        may_round = dtype.itemsize == 2 and self._bound is None
        if may_round and mean <= ROUNDINGS * rounding(dtype):
            return None
        differs = (
            f"got a {kind} difference of {got:.3g} between the log-probs of the {engine.name} engine and the trainer's "
            f"at weight version {engine.weight_version}, want at most {bound:g} in {str(dtype).removeprefix('torch.')}"
        )
        if turn is not None and turn > 1:
            or_later = " or a later one" if turn == MOST_TURNS else ""
            return WeightSyncError(
                f"{differs}: turn {turn}{or_later} differs, and the turns before it agree, so what the engine read "
                "before it is not what is trained on; fix: token ids as they were read and sampled, never text that is "
                "tokenised anew, no second BOS, no template that rewrites earlier turns, a mask of what was sampled"
            )
        base = ", servers of the base that is trained (they are sent its adapter alone)"
        base *= engine.name == "vllm-server" and getattr(engine, "takes_adapter", False)
        return WeightSyncError(
            f"{differs}: the engine does not serve the trainer's weights, one of the two computes at lower precision, "
            "or (from version 0 on) vLLM computes this model differently; fix: load_weights after every optimizer "
            f"step{base}, one dtype for both (float32 without TF32), plain sampling (no top_p, top_k, min_p, penalty), "
            "use_vllm=False for a model that vLLM gets wrong; if it is rounding, a larger max_logprob_difference"
        )


def generated(
    engine: SamplingEngine,
    prompt_ids: Sequence[Sequence[int]],
    sampling: SamplingParams,
    vocab_size: int = 0,  # of an engine with prompts of its own
    rows: Sequence[tuple[int, Mapping[str, Any]]] | None = None,
) -> list[Sample]:
    """One call of the engine. Its rollouts are of these prompts and of the last weights; completions are unchecked."""
    version = engine.weight_version
    own_prompts = getattr(engine, "own_prompts", False)  # which is no attribute of a user's engine
    options: dict[str, Any] = {"rows": rows} if own_prompts else {}
    # An engine may take some of the further options out, and is asked again with the same ones.
    sampling = replace(sampling, extra=own_copy(sampling.extra))
    rollouts = engine.generate([list(ids) for ids in prompt_ids], sampling, **options)
    if wrong := _wrong_counts(rollouts, prompt_ids, sampling.n, own_prompts=own_prompts):
        raise UnavailableError(
            f"got {wrong} from the {engine.name} engine, want {sampling.n} completions for each of {len(prompt_ids)} "
            "prompts, in their order, as Rollouts with lists; fix: the engine, which returns something else"
        )
    for ids in rollouts.prompt_ids if own_prompts else ():
        if wrong := wrong_tokens(ids, vocab_size):
            raise UnavailableError(
                f"got {wrong} in a prompt from the {engine.name} engine, want token ids below {vocab_size}; fix: "
                "encode prompts with the tokenizer of the model that is trained"
            )
    if rollouts.weight_version != version:
        raise WeightSyncError(
            f"got completions of weight version {rollouts.weight_version} from the {engine.name} engine, want version "
            f"{version}, which it was given last; fix: one trainer per engine, and the weight_version that sampled"
        )
    if sampling.wants_ids or rollouts.listed_tokens is not None:
        check_support(rollouts, sampling, engine)
    if sampling.routed_experts or rollouts.routed_experts is not None:
        check_experts(rollouts, sampling, engine)
    return rollouts.samples()


def _dropped(samples: Sequence[Sample], wrong: Mapping[int, str], size: int) -> list[Sample]:
    """The samples with the `failure` of their group of `size`, and with empty completions where they are wrong."""
    failures: dict[int, str] = {}
    for index, problem in sorted(wrong.items()):
        _log.warning("%s (its group is dropped)", problem)
        failures.setdefault(index // size, problem)
    dropped = []
    for index, sample in enumerate(samples):
        if index in wrong:
            sample = replace(
                sample,
                completion_ids=[],
                completion_mask=None if sample.completion_mask is None else [],
                sampling_logprobs=None if sample.sampling_logprobs is None else [],
                listed_tokens=None if sample.listed_tokens is None else sample.listed_tokens.first(0),
                routed_experts=None if sample.routed_experts is None else torch.zeros(0, dtype=torch.uint8),
                finish_reason="length",
            )
        dropped.append(replace(sample, failure=failures.get(index // size)))
    return dropped


def _wrong_counts(rollouts: Any, prompt_ids: Sequence[Sequence[int]], n: int, *, own_prompts: bool) -> str | None:
    if not isinstance(rollouts, Rollouts):
        return f"a {type(rollouts).__name__}"
    needed: dict[str, Any] = {"completions": rollouts.completion_ids, "finish reasons": rollouts.finish_reasons}
    for name, values in {**needed, "prompts": rollouts.prompt_ids, "extra columns": rollouts.extra}.items():
        if values is None:
            return f"no {name}"
    for ids in needed["completions"]:  # whose truth, as of a tensor, may be an error
        if not isinstance(ids, list | tuple):
            return f"a {type(ids).__name__} as a completion"
    columns = {**needed, "lists of log-probs": rollouts.sampling_logprobs, "episodes": rollouts.episodes}
    columns |= {"completion masks": rollouts.completion_masks, "arrays of experts": rollouts.routed_experts}
    columns |= {"lists of kept tokens": rollouts.listed_tokens}
    columns |= {f"values of {name!r}": values for name, values in rollouts.extra.items()}
    for name, values in columns.items():
        if values is not None and (count := getattr(values, "__len__", int)()) != n * len(prompt_ids):
            return f"{count} {name}"
    if rollouts.num_generations != n:
        return f"groups of {rollouts.num_generations}"
    if len(rollouts.prompt_ids) not in {len(prompt_ids), len(prompt_ids) * (n if own_prompts else 1)}:
        return f"{len(rollouts.prompt_ids)} prompts"
    same = list(map(list, rollouts.prompt_ids)) == list(map(list, prompt_ids))
    return None if own_prompts or same else "completions of other prompts"


def wrong_completion(sample: Sample, routers: Routers | None, *, vocab_size: int, nan_allowed: bool) -> str | None:
    """Why a completion cannot be trained on; None if it can. `nan_allowed`: log-probs of the sampler may be unknown."""
    ids, mask, logprobs = sample.completion_ids, sample.completion_mask, sample.sampling_logprobs
    if wrong := wrong_tokens(ids, vocab_size):
        return wrong
    if mask is not None and (len(mask) != len(ids) or not set(map(type, mask)) <= {bool}):
        return f"a completion mask of {len(mask)} values for {len(ids)} tokens"
    # An episode ends with a turn of the model.
    if mask is not None and not any(mask if sample.episode is None else mask[-1:]):
        return "no token of the model's own" if sample.episode is None else "no token in its last turn"
    if logprobs is not None and len(logprobs) != len(ids):
        return f"{len(logprobs)} log-probs for {len(ids)} tokens"
    if wrong := wrong_logprob(() if logprobs is None else sample.own(logprobs), nan_allowed=nan_allowed):
        return wrong
    if sample.listed_tokens is not None:
        wrong = wrong_listed(sample.listed_tokens, ids, vocab_size)
    if sample.finish_reason not in get_args(FinishReason):
        wrong = wrong or f"finish reason {sample.finish_reason!r}"
    if sample.routed_experts is not None and routers is not None:
        wrong = wrong or wrong_experts(sample, sample.routed_experts, routers)
    return wrong


def wrong_tokens(ids: list[int], vocab_size: int) -> str | None:
    """The first that is no token id below `vocab_size`."""
    if not ids:
        return "no tokens"
    # All at once: token by token takes half a second for a million.
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return None
    wrong = next(token for token in ids if type(token) is not int or not 0 <= token < vocab_size)
    return f"token id {wrong!r}"


def wrong_logprob(values: Sequence[float], *, nan_allowed: bool = False) -> str | None:
    """The first that is no log-prob."""
    for value in values:
        is_number = isinstance(value, float | int)
        if not is_number or not (_MIN_LOGPROB <= value <= _MAX_LOGPROB or (nan_allowed and value != value)):
            return f"log-prob {value!r}"
    return None


def wrong_experts(sample: Sample, experts: Tensor, routers: Routers) -> str | None:
    """What is wrong with the experts of a completion, of a model with so many layers, and experts in some of them."""
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
