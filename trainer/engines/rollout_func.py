"""A user's `rollout_func` in place of an engine: another inference server, a sampler of your own.

`rollout_func(prompts, trainer)` is TRL's hook, with its shapes; docs/engines.md ("Your own function") has what it
returns. A column that is no list is repeated; in "sampling_support" None in the place of a list is the whole
vocabulary. It may sample with any model, so its log-probs need not be the trainer's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import nan
from operator import index as as_index
from typing import Any

from torch import Tensor

from fused_grpo.errors import DataError
from fused_grpo.trainer.data.datasets import NOT_PASSED, RESERVED
from fused_grpo.trainer.engines import RolloutEngine
from fused_grpo.trainer.engines.sampling import stop_token_ids
from fused_grpo.trainer.rewards.reward_call import own_copy
from fused_grpo.trainer.types import ListedTokens, Rollouts, SamplingParams

RolloutFunction = Callable[[list[Any], Any], Mapping[str, Any]]

_REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
_NO_COLUMNS = ("env_mask", "logprob_token_ids", "sampling_support")


class FunctionEngine(RolloutEngine):
    """A RolloutEngine that calls a function.

    Args:
        rollout_func: `f(prompts, trainer)`, as above.
        trainer: its second argument. The stop tokens are those of `trainer.model` and `trainer.processing_class`.
        inner: an engine that the function samples with (as `trainer.engine.inner`); the loop syncs its weights. None:
            the function needs no weights, or takes them from `trainer.model`.
    """

    name = "rollout_func"
    own_prompts = True
    why_no_support = 'it needs "sampling_support" in what the function returns'

    def __init__(self, rollout_func: RolloutFunction, trainer: Any, *, inner: RolloutEngine | None = None) -> None:
        self._function = rollout_func
        self._trainer = trainer
        self._version = 0
        self.inner = inner
        self.weight_dtype = getattr(inner, "weight_dtype", None)
        self.takes_adapter, self.has_own_weights = getattr(inner, "takes_adapter", False), inner is not None

    @property
    def weight_version(self) -> int:  # type: ignore[override]
        """The inner engine's version; without one, that of the last `load_weights`."""
        return self._version if self.inner is None else self.inner.weight_version

    @property
    def sync_metrics(self) -> Mapping[str, float]:  # type: ignore[override]
        return getattr(self.inner, "sync_metrics", {})

    def generate(
        self,
        prompt_ids: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        rows: Sequence[tuple[int, Mapping[str, Any]]] | None = None,
    ) -> Rollouts:
        """Return `sampling.n` completions for each prompt from the function; see RolloutEngine.

        The function is given the prompts of the dataset's `rows`, which come with their numbers; None: `prompt_ids`
        decoded. DataError for a return value of another shape.
        """
        tokenizer = self._trainer.processing_class
        if rows is None:
            prompts: list[Any] = tokenizer.batch_decode([list(ids) for ids in prompt_ids])
        else:
            prompts = [row["prompt"] for _, row in rows]
        repeated = [own_copy(prompt) for prompt in prompts for _ in range(sampling.n)]
        output = self._function(repeated, self._trainer)
        try:
            columns = _checked(output, len(prompts) * sampling.n)
            # int() would cut numbers, and read text.
            prompt_ids, ids = ([list(map(as_index, one)) for one in output[name]] for name in _REQUIRED[:2])
            masks = _masks(output.get("env_mask"), ids)
            given = output["logprobs"]  # in which None is a log-prob that the sampler could not compute
            logprobs = None if given is None else [[nan if p is None else float(p) for p in one] for one in given]
        except TypeError as error:
            raise DataError(
                f"got {error} from rollout_func, want lists of token ids and of their log-probs, 0 or 1 in env_mask; "
                "fix: numbers, and None in logprobs alone"
            ) from error
        kept = None if sampling.sampling_support == "off" else output.get("sampling_support")
        model_stops = stop_token_ids(getattr(self._trainer.model, "generation_config", None), tokenizer)
        stops = {*model_stops, tokenizer.pad_token_id}  # as in TRL, a completion that is padded has ended
        return Rollouts(
            prompt_ids=prompt_ids,
            completion_ids=ids,
            sampling_logprobs=logprobs,
            finish_reasons=["stop" if stops & set(tokens[-1:]) else "length" for tokens in ids],
            num_generations=sampling.n,
            weight_version=self.weight_version,
            extra=columns,
            completion_masks=masks,
            listed_tokens=_supports(kept, ids),
        )

    def load_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load them into the inner engine, where there is one, and store the version."""
        if self.inner is not None:
            self.inner.load_weights(named_weights, version)
        self._version = version

    def sleep(self) -> None:
        if self.inner is not None:
            self.inner.sleep()

    def wake(self) -> None:
        if self.inner is not None:
            self.inner.wake()

    def close(self) -> None:
        if self.inner is not None:
            self.inner.close()


def _checked(output: Any, count: int) -> dict[str, list[Any]]:
    """The extra columns of the function's output, each with `count` values, as the required ones have."""
    if not isinstance(output, Mapping) or not set(_REQUIRED) <= output.keys():
        got = sorted(output) if isinstance(output, Mapping) else type(output).__name__
        raise DataError(f"got {got} from rollout_func, want a dict with {', '.join(_REQUIRED)}; fix: return all three")
    extra = {name: own_copy(values) for name, values in output.items() if name not in (*_REQUIRED, *_NO_COLUMNS)}
    if taken := sorted((NOT_PASSED | RESERVED) & extra.keys()):
        raise DataError(
            f"got columns {taken} from rollout_func, want names that reward functions do not have already; fix: rename"
        )
    columns = {name: values if isinstance(values, list) else [values] * count for name, values in extra.items()}
    for name, values in [*columns.items(), *((name, output[name]) for name in _REQUIRED[:2])]:
        if len(values) != count:
            raise DataError(
                f"got {len(values)} {name} from rollout_func for {count} prompts, want one each; fix: answer each "
                "prompt once, since it comes num_generations times already"
            )
    return columns  # single completions are checked with those of all engines, in checked_engine.py


def _masks(given: Any, completion_ids: list[list[int]]) -> list[list[bool]] | None:
    """True for the model's own tokens; None where all of them are."""
    if given is None:
        return None
    plain = [mask.tolist() if hasattr(mask, "tolist") else mask for mask in given]  # NumPy's truths are no numbers
    masks = [[int(one) if one in (0, 1) else as_index(one) for one in mask] for mask in plain]  # 1.0 is 1
    values, tokens = list(map(len, masks)), list(map(len, completion_ids))
    if values != tokens or not {0, 1}.issuperset(chain.from_iterable(masks)):
        raise DataError(
            f"got an env_mask of {values[:8]} values for completions of {tokens[:8]} tokens from rollout_func, "
            "want 0 or 1 for each token; fix: 1 where the model sampled it, 0 where the environment wrote it"
        )
    return [list(map(bool, mask)) for mask in masks]


def _supports(kept: Any, completion_ids: list[list[int]]) -> list[ListedTokens] | None:
    if kept is None:
        return None
    if len(kept) != len(completion_ids):
        raise DataError(
            f"got sampling_support of {len(kept)} completions from rollout_func for {len(completion_ids)}, want one "
            "each; fix: for each token of each completion a list of ids"
        )
    pairs = zip(completion_ids, kept, strict=True)
    steps = [[()] * len(ids) if one is None else [tokens or () for tokens in one] for ids, one in pairs]
    return [replace(ListedTokens.of(one), logprobs=None) for one in steps]  # not even where nothing is listed
