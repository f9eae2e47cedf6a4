"""Completions, their rewards, the batch of those that may be learned from, and what they say about the run.

`rollout_metrics` has the names that TRL's users plot, for a step's rollouts and for those of an evaluation. Of the
latter `GRPOTrainer.evaluate` returns all as transformers does, `<prefix>_<metric>`, and `<prefix>_<set>_<metric>` where
eval sets have names. `metrics.jsonl` and `TrainResult` have the mean rewards, as `eval/<metric>` and `<metric>`.

`eval_loss` is there as in TRL: the loss of a step with these completions, on policy, without the correction for the
sampler. That is about 0 plus the KL term less the entropy bonus, whatever the policy is: the metric to choose a model
by is `eval_reward`. Where it is 0 for certain (one completion per prompt, no such term), none goes through the model.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.trainer_utils import speed_metrics

from fused_grpo.errors import InputError, shown
from fused_grpo.trainer.collect.advantages import nanstd, total_rewards
from fused_grpo.trainer.common.formatting import message_text
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.data.datasets import Row
from fused_grpo.trainer.data.prompts import as_completion
from fused_grpo.trainer.rewards import RewardOutput, Rewards
from fused_grpo.trainer.types import EffectiveBatch, Rollouts, joined, taken

_log = logging.getLogger(__name__)
_COLUMNS = ("rows", "completions", "rewards", "per_function", "dropped", "extra")
_LISTS = ("completion_ids", "sampling_logprobs", "finish_reasons", "support_ids", "support_sizes")
EQUAL_REWARDS = 1e-6  # rewards of a group that differ by less are equal but for rounding

# The loss op's names, where TRL's are others or mean something else; None: TRL's metric is measured beside it.
LOSS_METRICS = {
    "num_tokens": "completion_tokens",
    "policy_loss": "policy_term",
    "loss_without_bonus": "policy_loss",
    **dict.fromkeys(("clip_ratio_low", "clip_ratio_high", "clip_ratio_region")),
    **dict.fromkeys(("sampling_difference_mean", "sampling_difference_max")),
}


@dataclass(frozen=True, kw_only=True)
class ScoredRollouts(RewardOutput):
    """Rollouts and their rewards. Groups for which the engine failed are dropped, too."""

    rollouts: Rollouts
    rows: list[Row]  # B, the dataset row of each completion
    completions: list[str]  # B, decoded without special tokens
    rewards: Tensor  # [B], weighted sums; NaN: no function scored it
    reward_names: list[str]  # F
    num_failed: int = 0  # completions in groups for which the engine failed, those that were replaced included

    @property
    def num_groups(self) -> int:
        return len(self.rollouts.prompt_ids)

    def take_groups(self, groups: Sequence[int]) -> ScoredRollouts:
        """These groups, in this order."""
        rollouts, size = self.rollouts, self.rollouts.num_generations
        members = [group * size + member for group in groups for member in range(size)]
        return replace(
            self,
            rollouts=replace(
                rollouts,
                prompt_ids=taken(rollouts.prompt_ids, groups),
                **{name: taken(getattr(rollouts, name), members) for name in (*_LISTS, "extra")},
                failures={
                    place: rollouts.failures[group] for place, group in enumerate(groups) if group in rollouts.failures
                },
            ),
            **{name: taken(getattr(self, name), members) for name in _COLUMNS},
        )

    @classmethod
    def joined(cls, rounds: Sequence[ScoredRollouts]) -> ScoredRollouts:
        """Rounds of one batch, one after the other. Seconds are added up, logged metrics are averaged."""
        first, names = rounds[0], dict.fromkeys(name for part in rounds for name in part.metrics)
        of_rollouts = ("prompt_ids", *_LISTS, "extra")
        return replace(
            first,
            rollouts=replace(
                first.rollouts,
                **{name: joined([getattr(part.rollouts, name) for part in rounds]) for name in of_rollouts},
                failures={},  # rounds are joined without the groups that failed
            ),
            **{name: joined([getattr(part, name) for part in rounds]) for name in _COLUMNS},
            num_failed=sum(part.num_failed for part in rounds),
            seconds={name: sum(part.seconds.get(name, 0.0) for part in rounds) for name in first.seconds},
            metrics={name: fmean(part.metrics[name] for part in rounds if name in part.metrics) for name in names},
        )

    def effective_batch(self, advantages: Tensor) -> EffectiveBatch:
        """The batch of all groups but the dropped ones, given advantages [B]."""
        rollouts = self.rollouts
        batch = EffectiveBatch(
            prompt_ids=[ids for ids in rollouts.prompt_ids for _ in range(rollouts.num_generations)],
            completion_ids=rollouts.completion_ids,
            sampling_logprobs=rollouts.sampling_logprobs,
            advantages=advantages,
            rewards=self.rewards,
            support_ids=rollouts.support_ids,
            support_sizes=rollouts.support_sizes,
        )
        return batch.take((~self.dropped).nonzero().flatten().tolist()) if self.dropped.any() else batch

    def records(self, advantages: Tensor) -> list[dict[str, Any]]:
        """One record per completion, for rollouts.jsonl and the console. Logged columns are fields of it."""
        failures, size = self.rollouts.failures, self.rollouts.num_generations
        kept = [int(sizes.sum()) / max(1, len(sizes)) for sizes in self.rollouts.support_sizes or []]
        return [
            {
                **{name: values[index] for name, values in self.extra.items()},
                "prompt": message_text(self.rows[index]["prompt"]),
                "completion": completion,
                "reward": self.rewards[index].item(),
                "rewards": dict(zip(self.reward_names, self.per_function[index].tolist(), strict=True)),
                "advantage": advantages[index].item(),
                "finish_reason": self.rollouts.finish_reasons[index],
                "weight_version": self.rollouts.weight_version,
                **({"kept_tokens": kept[index]} if kept else {}),
                **({"dropped": True} if self.dropped[index] else {}),
                **({"failure": failures[index // size]} if index // size in failures else {}),
            }
            for index, completion in enumerate(self.completions)
        ]


def score_rollouts(
    rollouts: Rollouts, rows: Sequence[Row], rewards: Rewards, tokenizer: Any, *, trainer_state: Any = None
) -> ScoredRollouts:
    """Rewards of every completion; `rows` are the prompts' dataset rows, one per prompt.

    Columns that the engine returned with the completions (`Rollouts.extra`) are passed to reward functions like columns
    of the dataset; completions of conversations are passed as messages, which the tokenizer's response template has
    parsed, where it has one. Reward functions are not given the groups of `Rollouts.failures`, which are dropped.

    Raises:
        RewardError: a function failed and `reward_failure` is not "drop", or no group is left.
        InputError: a function has an argument for which there is no column.
    """
    rows = [row for row in rows for _ in range(rollouts.num_generations)]
    completions = tokenizer.batch_decode(rollouts.completion_ids, skip_special_tokens=True)
    columns = [row | {name: values[index] for name, values in rollouts.extra.items()} for index, row in enumerate(rows)]
    given = [as_completion(row, text) for row, text in zip(rows, completions, strict=True)]
    if getattr(tokenizer, "response_template", None) or getattr(tokenizer, "response_schema", None):
        _parse(given, rollouts, tokenizer)
    output = _asked(rewards, columns, given, rollouts, trainer_state)
    unscored = (output.per_function.isnan().all(1) & ~output.dropped).nonzero()[:, 0].tolist()
    if unscored:
        example = {**columns[unscored[0]], "completion": given[unscored[0]]}
        _log.warning(
            "All reward functions returned None for the following kwargs:\n%s\nSuch a completion has no reward, "
            "advantage 0 and no part in the statistics of its group. Got %d of %d; fix: return a number.",
            shown(example),
            len(unscored),
            len(columns),
        )
    return ScoredRollouts(
        **vars(output),
        rollouts=rollouts,
        rows=rows,
        completions=completions,
        rewards=total_rewards(output.per_function, rewards.weights),
        reward_names=rewards.names,
        num_failed=len(rollouts.failures) * rollouts.num_generations,
    )


def _parse(given: list[Any], rollouts: Rollouts, tokenizer: Any) -> None:
    """Replace the messages among the completions by what TRL makes of them: `content`, `reasoning_content`, ...

    As in TRL, a completion that cannot be parsed (a malformed tool call) is a message with its whole text.
    """
    failed, places = 0, [index for index, one in enumerate(given) if not isinstance(one, str)]
    for index in places:
        try:
            # Before transformers 5.13 there was a schema, which took no prompt.
            prompt = rollouts.prompt_ids[index // rollouts.num_generations]
            options = {"prefix": prompt} if getattr(tokenizer, "response_template", None) else {}
            message = tokenizer.parse_response(rollouts.completion_ids[index], **options)
            content = str(message.get("content") or "").removesuffix(tokenizer.eos_token or "")
            for call in message.get("tool_calls") or ():
                function = call.get("function", call)
                if not isinstance(function["name"], str):
                    raise TypeError("a tool call without a name")
                function["arguments"] = {} if function.get("arguments") is None else function["arguments"]
            given[index] = [{"role": "assistant", **message, "content": content}]
        except Exception:  # of the template, which is a program, or of what the model wrote
            failed += 1
    if failed and failed == len(places):
        warn_once(
            "the tokenizer's response template parses no completion of a batch, so reward functions get whole texts; "
            "fix: tokenizer.parse_response(...) of one says why"
        )


def _asked(
    rewards: Rewards, columns: list[Row], given: Sequence[Any], rollouts: Rollouts, trainer_state: Any
) -> RewardOutput:
    """What the functions say about all completions. Groups for which the engine failed are dropped, unseen by them."""
    total, size = len(columns), rollouts.num_generations
    sound = [index for index in range(total) if index // size not in rollouts.failures]
    per_function, dropped = torch.full((total, len(rewards.names)), torch.nan), torch.ones(total, dtype=torch.bool)
    output = RewardOutput(per_function=per_function, dropped=dropped, seconds={}, metrics={}, extra={})
    if sound:
        asked = (taken(values, sound) for values in (columns, given, rollouts.completion_ids))
        output = rewards(*asked, num_generations=size, trainer_state=trainer_state)
        per_function[sound], dropped[sound] = output.per_function, output.dropped
    placed = {name: dict(zip(sound, values, strict=True)) for name, values in output.extra.items()}
    extra = {name: [values.get(index) for index in range(total)] for name, values in placed.items()}
    return replace(output, per_function=per_function, dropped=dropped, extra=extra)


class RolloutFacts(NamedTuple):
    """What one process knows of its B completions, small enough to send to the others."""

    rewards: Tensor  # [B]
    per_function: Tensor  # [B, F]
    lengths: Tensor  # [b] tokens, without the groups for which the engine failed
    ended: Tensor  # [b] bool
    dropped: Tensor  # [B] bool, of the groups for which the engine or a reward function failed
    failed: int  # completions of groups for which the engine failed
    seconds: dict[str, float]  # by reward function
    logged: dict[str, float]  # by reward functions
    supports: Tensor  # [3], of truncated sampling: tokens, and the sum and the largest of the sizes of their supports

    @classmethod
    def of(cls, scored: ScoredRollouts) -> RolloutFacts:
        rollouts, size = scored.rollouts, scored.rollouts.num_generations
        kept = [index for index in range(len(rollouts.completion_ids)) if index // size not in rollouts.failures]
        return cls(
            rewards=scored.rewards,
            per_function=scored.per_function,
            lengths=torch.tensor([len(rollouts.completion_ids[index]) for index in kept], dtype=torch.float32),
            ended=torch.tensor([rollouts.finish_reasons[index] == "stop" for index in kept], dtype=torch.bool),
            dropped=scored.dropped,
            failed=scored.num_failed,
            seconds=scored.seconds,
            logged=scored.metrics,
            supports=_sizes(rollouts.support_sizes or []),
        )

    @classmethod
    def none(cls, functions: int) -> RolloutFacts:
        """Of a process without completions."""
        nothing, no_flags = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
        return cls(nothing, torch.zeros(0, functions), nothing, no_flags, no_flags, 0, {}, {}, _sizes([]))


def rollout_metrics(
    processes: Sequence[RolloutFacts], reward_names: Sequence[str], *, num_generations: int, of_batch: bool = False
) -> dict[str, float]:
    """Reward and length metrics of one generated batch, over all processes.

    Args:
        processes: in the order of their ranks: a group may be on several.
        reward_names: names of the F reward functions.
        num_generations: completions per group.
        of_batch: advantages are scaled by the whole batch, which `frac_reward_zero_std` is about then.
    """
    rewards, per_function, lengths, ended, dropped = (
        torch.cat([getattr(facts, name) for facts in processes])
        for name in ("rewards", "per_function", "lengths", "ended", "dropped")
    )
    groups = rewards.view(-1, num_generations)
    within, overall = nanstd(groups)[:, 0], _std(rewards[~rewards.isnan()])
    # A single completion has no spread; of a larger group, one score says nothing about it.
    known = (~groups.isnan()).sum(1) > min(1, num_generations - 1)
    metrics = {
        "reward": rewards.nanmean(),
        "reward_std": overall,
        "reward_std_within_groups": within.mean(),
        "frac_reward_zero_std": ((overall if of_batch else within) < EQUAL_REWARDS).logical_and(known).float().mean(),
        "groups_with_equal_rewards": (within < EQUAL_REWARDS).float().mean(),
    }
    for name, values in zip(reward_names, per_function.unbind(1), strict=True):
        scored = values[~values.isnan()]
        metrics |= {f"rewards/{name}/mean": scored.mean(), f"rewards/{name}/std": _std(scored)}
        metrics[f"time/reward/{name}"] = torch.tensor(max(facts.seconds.get(name, 0.0) for facts in processes))
    for kind, some in (("length", lengths), ("terminated_length", lengths[ended])):
        some = some if len(some) else torch.zeros(1)
        metrics |= {f"completions/{stat}_{kind}": getattr(some, stat)() for stat in ("mean", "min", "max")}
    metrics["completions/clipped_ratio"] = (~ended).float().mean()
    # What a function logs is taken for a mean over the completions that it was given.
    logged: dict[str, list[tuple[float, float]]] = {}
    for facts in processes:
        for name, value in facts.logged.items():
            logged.setdefault(name, []).append((value, len(facts.rewards) / len(rewards)))
    failed = sum(facts.failed for facts in processes)
    supports = torch.stack([facts.supports for facts in processes])
    if tokens := supports[:, 0].sum():
        metrics |= {"sampling/kept_tokens/mean": supports[:, 1].sum() / tokens}
        metrics |= {"sampling/kept_tokens/max": supports[:, 2].amax()}
    return {
        **{name: value.item() for name, value in metrics.items()},
        **({"rewards/dropped": dropped.float().mean().item()} if dropped.any() else {}),
        **({"rollouts/dropped": float(failed)} if failed else {}),
        **{name: fmean(*zip(*values, strict=True)) for name, values in logged.items()},
    }


def _sizes(supports: Sequence[Tensor]) -> Tensor:
    sizes = torch.cat([torch.zeros(1, dtype=torch.int32), *supports])
    return torch.stack([(sizes > 0).sum(), sizes.sum(), sizes.amax()]).float()


def _std(values: Tensor) -> Tensor:
    """With Bessel's correction; NaN for fewer than two values."""
    return values.std() if len(values) > 1 else torch.tensor(torch.nan)


def rename_loss_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics of an optimizer step under TRL's names."""
    named = ((LOSS_METRICS.get(name, name), value) for name, value in metrics.items())
    return {name: value for name, value in named if name is not None}


class Evaluation(NamedTuple):
    """The evaluation of one set."""

    metrics: dict[str, float]  # names of `rollout_metrics`
    num_prompts: int
    started: float  # by time.time
    batch: EffectiveBatch  # of this rank

    def named(self, prefix: str) -> dict[str, float]:
        """All numbers as `<prefix>_<metric>`, with `<prefix>_runtime` (s), `_samples_per_second` (prompts) and
        `_steps_per_second` (generate calls)."""
        speed: dict[str, float] = speed_metrics(prefix, self.started, num_samples=self.num_prompts, num_steps=1)
        kept = {name: value for name, value in self.metrics.items() if not name.startswith("time/")}
        return {f"{prefix}_{name}": value for name, value in kept.items()} | speed

    def rewards(self, names: Sequence[str], *, of_set: str) -> dict[str, float]:
        """The mean reward, and that of each of the functions `names`: what `TrainResult` has.

        They are "reward" and "rewards/<function>/mean", after "<set>_" where the set has a name.
        """
        keys = ["reward", *(f"rewards/{name}/mean" for name in names)]
        return {f"{of_set}_{key}" if of_set else key: self.metrics[key] for key in keys}


def check_best_metric(name: str | None, metrics: Mapping[str, float]) -> None:
    """InputError unless an evaluation has the metric of that name, `metric_for_best_model`, with or without "eval_"."""
    if name is not None and not {name, f"eval_{name}"} & metrics.keys():
        some = ", ".join(known for known in metrics if "reward" in known or "length" in known)
        raise InputError(
            f"got metric_for_best_model={name!r}, want a metric of an evaluation: {some}; "
            "fix: metric_for_best_model='eval_reward', greater_is_better=True"
        )
