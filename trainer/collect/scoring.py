"""`ScoredRollouts`: completions, their rewards, and the batch of those groups that may be learned from."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from fused_grpo._text import shown
from fused_grpo.trainer.collect.advantages import total_rewards
from fused_grpo.trainer.config.trl_fields import warn_once
from fused_grpo.trainer.data.datasets import Row
from fused_grpo.trainer.data.prompts import as_completion
from fused_grpo.trainer.logging.formatting import message_text
from fused_grpo.trainer.rewards import RewardOutput, Rewards
from fused_grpo.trainer.types import EffectiveBatch, Rollouts, joined, taken

_log = logging.getLogger(__name__)
_COLUMNS = ("rows", "completions", "rewards", "per_function", "dropped", "extra")
_LISTS = ("completion_ids", "sampling_logprobs", "finish_reasons", "support_ids", "support_sizes")


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
