"""All reward functions of a run, called on a batch, reward models among them.

Plain functions are called one after another, `async` functions concurrently and at the same time. docs/rewards.md says
what becomes of a call that fails, and why a group is dropped whole and for all functions.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, Literal, cast, get_args

import torch
from accelerate.utils import patch_environment
from torch import Tensor, nn

from fused_grpo.errors import InputError, RewardError
from fused_grpo.trainer.common.process_state import process_kept
from fused_grpo.trainer.common.threads import LONGEST, in_thread
from fused_grpo.trainer.data.datasets import NOT_PASSED, Row, as_row, clean_prompt
from fused_grpo.trainer.data.prompts import as_completion
from fused_grpo.trainer.logging.run_log import free_name
from fused_grpo.trainer.rewards.builtin_rewards import builtin_reward, no_reward
from fused_grpo.trainer.rewards.reward_call import (
    RewardCaller,
    RewardFunction,
    RewardInputs,
    Scores,
    load_reward,
    names_a_function,
    reward_name,
)

FailurePolicy = Literal["fail", "retry", "drop"]
FIRST_PAUSE, DOUBLINGS = 0.5, 7  # seconds before the first retry; each further pause is twice as long, up to 64 s
BATCH_SIZE = 16  # sequences in one forward pass
_ONLY_RANK_0 = "FSDP_CPU_RAM_EFFICIENT_LOADING"  # which Accelerate sets, for transformers

_NOT_FINITE = "got reward_weights={}, want finite numbers; fix: 0 for a function that takes no part"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RewardOutput:
    """The scores of F functions for B completions."""

    per_function: Tensor  # [B, F] fp32; NaN: not scored by that function
    dropped: Tensor  # [B] bool, whole groups for which a function failed: they must not reach the loss
    seconds: dict[str, float]  # by function
    metrics: dict[str, float]  # from log_metric, the mean of all finite values but those of calls that are dropped
    calls: list[tuple[list[int], dict[str, list[float]]]]  # the values, with the completions that a call was for
    extra: dict[str, list[Any]]  # B each, from log_extra
    failure: RewardError | None = None  # the first, where groups were dropped


class Rewards:
    """The reward functions of a run; InputError for what is not callable, or options that contradict each other.

    Args:
        functions: one or several of: a function, plain or `async`; its name as "module:name", "module.name" or
            "path.py:name"; a short name of builtin_rewards.py; a sequence-classification model, or its path or hub id.
        weights: one per function, for the weighted sum. None: all 1.
        processing_classes: tokenizers of reward models, one per function (None: the tokenizer saved with the model).
        failure, retries: what to do when a call fails: "fail", "retry" so many times, or "drop".
        timeout: seconds that a call may take. None: no limit.
        device: the device of reward models. None: a model given by name stays on the CPU, a module where it is.
        chat_template_kwargs: variables for the chat templates of reward models.
        trust_remote_code: run code that comes with a reward model.
        model_init_kwargs: arguments of `from_pretrained`, for reward models given by path or hub id.
    """

    def __init__(
        self,
        functions: Any,
        *,
        weights: Sequence[float] | None = None,
        processing_classes: Any = None,
        failure: FailurePolicy = "fail",
        retries: int = 2,
        timeout: float | None = None,
        device: torch.device | str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        model_init_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        given = list(functions) if isinstance(functions, list | tuple) else [functions]
        _check_options(given, failure=failure, retries=retries, timeout=timeout)
        classes = _one_each("reward_processing_classes", processing_classes, len(given))
        self.weights = torch.tensor(_one_each("reward_weights", weights, len(given), default=1.0), dtype=torch.float32)
        if not self.weights.isfinite().all():
            raise InputError(_NOT_FINITE.format(self.weights.tolist()))
        loading = {**(model_init_kwargs or {}), "trust_remote_code": trust_remote_code}
        make_model = partial(
            RewardModel, device=device, chat_template_kwargs=chat_template_kwargs, trust_remote_code=trust_remote_code
        )
        self.functions = [_resolve(one, make_model, cls, loading) for one, cls in zip(given, classes, strict=True)]
        for one in self.functions:
            if isinstance(one, type):
                name = one.__name__
                raise InputError(f"got the class {name} as a reward function, want an object of it; fix: {name}()")
        self.names = _unique(map(reward_name, self.functions))
        self.failure, self.retries = failure, retries
        self._callers = [RewardCaller(*each, timeout=timeout) for each in zip(self.functions, self.names, strict=True)]

    @property
    def can_log(self) -> bool:
        """Whether a function may log metrics of its own: it takes `log_metric`, or any argument."""
        return any(one.accepted is None or "log_metric" in one.accepted for one in self._callers)

    def check_columns(self, columns: Iterable[str]) -> None:
        """InputError unless a dataset with these columns has what the functions need."""
        names = {"prompts", "completions", "completion_ids", *columns} - {"prompt", "completion"}
        for caller in self._callers:
            caller.check_columns(names)

    def check_models(self, row: Row) -> None:
        """RewardError unless the reward models can score two answers to a row's prompt, of which one is padded."""
        row = as_row(row)
        answers = [as_completion(row, text) for text in ("1", "1 1 1")]
        inputs = RewardInputs(columns={"prompts": [row["prompt"]] * 2, "completions": answers})
        for caller in self._callers if self.failure != "drop" else ():
            if isinstance(caller.function, RewardModel):
                caller(inputs)

    def __call__(
        self,
        rows: Sequence[Row],
        completions: Sequence[Any],
        completion_ids: Sequence[list[int]],
        *,
        num_generations: int,
        trainer_state: Any = None,
        environments: Sequence[Any] | None = None,
    ) -> RewardOutput:
        """Rewards of B completions, in groups of `num_generations`.

        Args:
            rows: B, the dataset row of each completion.
            completions: B strings; in conversations, B lists of messages.
            completion_ids: B lists of token ids.
            trainer_state, environments: passed to functions that have parameters of these names.

        RewardError for a failed call, unless `failure` is "drop"; InputError for a parameter that no column fills.
        """
        if not self.weights.isfinite().all():  # which a script may change in place
            raise InputError(_NOT_FINITE.format(self.weights.tolist()))
        functions = [caller.function for caller in self._callers]
        if functions != self.functions or len(self.names) != len(functions):
            raise InputError(
                "got another function in the list of reward_funcs, or number of reward_func_names, of a trainer that "
                "is made, want those that it was made with; fix: a new GRPOTrainer"
            )
        if not rows or len(rows) % num_generations or not len(rows) == len(completions) == len(completion_ids):
            raise InputError(
                f"got {len(rows)} rows, {len(completions)} completions and {len(completion_ids)} lists of ids, "
                f"want equally many, in groups of num_generations={num_generations}"
            )
        columns: dict[str, list[Any]] = {
            **{name: [row[name] for row in rows] for name in rows[0] if name not in NOT_PASSED},
            "prompts": [row["prompt"] for row in rows],
            "completions": list(completions),
            "completion_ids": list(completion_ids),
        }
        shared = dict[str, list[Any]]() if environments is None else {"environments": list(environments)}
        inputs = RewardInputs(columns=columns | shared, trainer_state=trainer_state, shared=frozenset(shared))
        call = partial(self._call, inputs=inputs, num_generations=num_generations)
        with process_kept():
            try:
                pending = {one: in_thread(partial(call, one), name="reward") for one in self._callers if one.is_async}
                results = {one: call(one) for one in self._callers if not one.is_async}
                outcomes = [pending[one].result() if one.is_async else results[one] for one in self._callers]
            finally:  # behind Ctrl-C, or another function's error, coroutines go no further
                inputs.over.set_result(None)
        scores, seconds = zip(*outcomes, strict=True)
        return self._output(scores, dict(zip(self.names, seconds, strict=True)), num_generations)

    def _call(self, caller: RewardCaller, inputs: RewardInputs, num_generations: int) -> tuple[Scores, float]:
        start = time.perf_counter()
        match self.failure:
            case "fail":
                scores = caller(inputs)
            case "retry":
                scores = _call_with_retries(caller, inputs, self.retries)
            case "drop":
                scores = _call_dropping_groups(caller, inputs, num_generations)
        return scores, time.perf_counter() - start

    def _output(self, scores: Sequence[Scores], seconds: dict[str, float], num_generations: int) -> RewardOutput:
        per_function = torch.tensor([one.values for one in scores], dtype=torch.float32).T.contiguous()
        failures = {number: error for one in scores for number, error in one.failures.items()}
        dropped = torch.tensor([place // num_generations in failures for place in range(len(per_function))])
        per_function[dropped] = math.nan
        extra: dict[str, list[Any]] = {}
        calls: dict[range, dict[str, list[float]]] = {}  # by the completions that they were for
        for name, one in zip(self.names, scores, strict=True):
            # Names that become one, as None and "None" do, are one column of a function.
            for place, values in {free_name(column): values for column, values in one.extra.items()}.items():
                while place in extra:
                    place = f"{name}/{place}"
                extra[place] = values
            for places, metrics in (one.group_metrics or {range(len(dropped)): one.metrics}).items():
                for metric, logged in metrics.items():
                    values = calls.setdefault(places, {}).setdefault(free_name(metric), [])
                    values.extend(filter(math.isfinite, logged))
        logged_calls = [(list(places), logged) for places, logged in calls.items()]
        return RewardOutput(
            per_function=per_function,
            dropped=dropped,
            seconds=seconds,
            metrics=logged_means(logged_calls, dropped.tolist()) if logged_calls else {},
            calls=logged_calls,
            extra=extra,
            failure=failures[min(failures)] if failures else None,
        )


def logged_means(
    calls: Sequence[tuple[list[int], Mapping[str, list[float]]]], dropped: Sequence[bool]
) -> dict[str, float]:
    """The mean of what was logged under each name, without the calls all of whose completions are dropped."""
    by_name: dict[str, list[float]] = {}
    for places, metrics in calls:
        for name, logged in metrics.items():
            by_name.setdefault(name, []).extend(() if all(dropped[place] for place in places) else logged)
    return {name: fmean(logged) if logged else math.nan for name, logged in by_name.items()}


def _call_with_retries(call: RewardCaller, inputs: RewardInputs, retries: int) -> Scores:
    calls = 1 + retries
    for attempt in range(retries):
        try:
            return call(inputs, pinpoint=False)
        except RewardError as error:
            _log.warning("%s (call %d of %d, trying again)", error, attempt + 1, calls)
            time.sleep(FIRST_PAUSE * 2 ** min(attempt, DOUBLINGS))
    try:
        return call(inputs)
    except RewardError as error:
        raise RewardError(f"{error} (call {calls} of {calls})") from error


def _call_dropping_groups(call: RewardCaller, inputs: RewardInputs, num_generations: int) -> Scores:
    """The scores, NaN in groups where the function fails, with the errors by group."""

    def attempt(start: int) -> Scores:
        try:
            return call(inputs.part(start, num_generations), pinpoint=False)
        except RewardError as error:
            return Scores(failures={start // num_generations: error})

    try:
        return call(inputs, pinpoint=False)
    except RewardError as error:
        groups = [Scores(failures={0: error})]
    starts = range(0, len(inputs), num_generations)
    if len(starts) > 1 and call.is_async:
        pending = [in_thread(partial(attempt, start), name="reward") for start in starts]
        groups = [outcome.result() for outcome in pending]
    elif len(starts) > 1:
        groups = [attempt(start) for start in starts]
    return _joined(groups, num_generations)


def _joined(groups: list[Scores], num_generations: int) -> Scores:
    """The scores of a batch from those of its groups; of a failed group, NaN and None in logged columns."""
    joined = Scores(extra={name: [] for group in groups for name in group.extra})
    for place, group in enumerate(groups):
        joined.values.extend(group.values or [math.nan] * num_generations)
        for name, values in joined.extra.items():
            values.extend(group.extra.get(name, [None] * num_generations))
        joined.group_metrics[range(place * num_generations, (place + 1) * num_generations)] = group.metrics
        for number, failure in group.failures.items():
            _log.warning("%s (its group is dropped)", failure)
            joined.failures[number] = failure
    return joined


def _check_options(functions: list[Any], *, failure: str, retries: int, timeout: float | None) -> None:
    if not functions or not all(callable(function) or isinstance(function, str) for function in functions):
        what = functions[0] if len(functions) == 1 else functions
        raise InputError(
            f"{'No reward source provided: ' * (what is None)}got reward_funcs={what!r}, want a function or a "
            "non-empty list of functions, names or reward models; fix: reward_funcs, or an environment with get_reward"
        )
    if failure not in get_args(FailurePolicy):
        raise InputError(f"got failure={failure!r}, want one of {', '.join(map(repr, get_args(FailurePolicy)))}")
    if retries < 0:
        raise InputError(f"got retries={retries}, want at least 0")
    if timeout is not None and not 0 < timeout <= LONGEST:
        raise InputError(f"got timeout={timeout}, want seconds > 0, {LONGEST} at most, or None for no limit")


def _one_each(name: str, given: Any, count: int, *, default: Any = None) -> list[Any]:
    if given is None:
        return [default] * count
    listed = list(given) if isinstance(given, Iterable) else [given]
    if len(listed) != count:
        raise InputError(f"got {len(listed)} {name} for {count} reward functions, want one each: they must match")
    return listed


def _resolve(
    function: RewardFunction | str, make_model: Callable[..., RewardModel], tokenizer: Any, loading: dict[str, Any]
) -> RewardFunction:
    if isinstance(function, nn.Module):
        return make_model(function, tokenizer)
    if not isinstance(function, str):
        return function
    if named := builtin_reward(function):
        return named
    if names_a_function(function):
        return load_reward(function)
    model = load_reward_model(function, **loading)
    return make_model(model, tokenizer, revision=loading.get("revision", "main"))


def _unique(names: Iterable[str]) -> list[str]:
    """The names, with a suffix where one is repeated: f, f_2, f_3."""
    unique: list[str] = []
    for name in names:
        candidates = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
        unique.append(next(candidate for candidate in candidates if candidate not in unique))
    return unique


def is_reward_model(name: str) -> bool:
    """Whether it names neither a function nor a built-in reward; InputError for a file alone or an unknown name."""
    if name.endswith(".py"):
        raise InputError(f"got reward function {name!r}, a file, want a function in it; fix: {name}:<its name>")
    return builtin_reward(name) is None and not names_a_function(name)


def unloaded(model: str) -> Callable[..., list[float]]:
    """What has the place and the name of a reward model in a dry run."""

    def score(prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
        return no_reward(completions)

    score.__name__ = model.rstrip("/").split("/")[-1]
    return score


class RewardModel:
    """A reward function that returns the scores of a model; InputError for no tokenizer, or one that cannot pad.

    Args:
        model: a sequence-classification model of transformers, with one label.
        processing_class: its tokenizer. None: the one saved with the model, by `trust_remote_code` and `revision`.
        device: the model is moved to this device. None, or loaded with a device map: it stays where it is.
        chat_template_kwargs: variables for the chat template, in conversations.
    """

    def __init__(
        self,
        model: nn.Module,
        processing_class: Any = None,
        *,
        device: torch.device | str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        revision: str = "main",
    ) -> None:
        from transformers import AutoTokenizer

        config: Any = getattr(model, "config", None)
        source = str(getattr(config, "_name_or_path", ""))
        self.__name__ = source.rstrip("/").split("/")[-1] or type(model).__name__
        if processing_class is None:
            if not source:
                raise InputError(
                    f"got the reward model {self.__name__} without a path and no tokenizer; "
                    "fix: pass reward_processing_classes=<tokenizer>"
                )
            options = {"trust_remote_code": trust_remote_code, "revision": revision}
            try:
                processing_class = AutoTokenizer.from_pretrained(source, **options)
            except Exception as error:  # of the network, the hub, a file
                raise InputError(
                    f"got the reward model {source!r}, whose tokenizer cannot be loaded: "
                    f"{' '.join(str(error).split())[:500]}; want one beside it; fix: pass "
                    "reward_processing_classes=<tokenizer>"
                ) from error
        if processing_class.pad_token_id is None:
            if processing_class.eos_token is None:
                raise InputError(f"got a tokenizer of the reward model {self.__name__} that has no padding token")
            processing_class.pad_token = processing_class.eos_token
        if config is not None:  # the score is that of the last token that is not padding
            config.get_text_config().pad_token_id = processing_class.pad_token_id
        stays = device is None or getattr(model, "hf_device_map", None)
        self.model = model.eval() if stays else model.eval().to(device)
        self.tokenizer, self.template_options = processing_class, dict(chat_template_kwargs or {})

    @torch.inference_mode()
    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
        texts = [self._text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        options: Any = {"return_tensors": "pt", "padding": True, "padding_side": "right", "add_special_tokens": False}
        device, scores = next(self.model.parameters()).device, list[float]()
        for start in range(0, len(texts), BATCH_SIZE):
            encoded = self.tokenizer(text=texts[start : start + BATCH_SIZE], **options).to(device)
            # Of several labels the list, which is refused as no number.
            try:
                scores += self.model(**encoded).logits.squeeze(1).float().tolist()
            except (IndexError, RuntimeError) as error:
                config: Any = self.model.config
                most, got = getattr(config.get_text_config(), "max_position_embeddings", None), encoded["input_ids"]
                if most is None or got.shape[1] <= most - 2:  # RoBERTa's first two places are of padding
                    raise
                raise InputError(
                    f"got {got.shape[1]} tokens of prompt and completion for the reward model {self.__name__}, want "
                    f"no more than its places, max_position_embeddings={most} ({error}); fix: a smaller "
                    "max_completion_length, shorter prompts, or another reward model"
                ) from error
        return scores

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return prompt + str(completion)
        messages = [*clean_prompt(prompt), *completion]
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **self.template_options))


def load_reward_model(name: str, **options: Any) -> nn.Module:
    """The model at a path or hub id, by `options` of `from_pretrained`; InputError for none, or one without a score."""
    from transformers import AutoModelForSequenceClassification

    try:
        # Under FSDP, rank 0 may be the only one to read weights: the others would have zeros, and nothing shards these.
        with patch_environment(**{_ONLY_RANK_0: ""}):
            del os.environ[_ONLY_RANK_0]  # until the end of the block
            load: Any = AutoModelForSequenceClassification.from_pretrained
            model, loading = load(name, num_labels=1, output_loading_info=True, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"got reward {name!r}, which names no function (module:name, module.name or path.py:name) "
            f"and no model with one score that can be loaded: {error}"
        ) from error
    if missing := sorted(loading["missing_keys"]):
        raise InputError(
            f"got the reward model {name!r} without trained weights for {', '.join(missing)}, "
            "want a sequence-classification model with one label"
        )
    return cast(nn.Module, model)
