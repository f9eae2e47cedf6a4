"""From rollouts to rewards, and to what may be learned from: decode, ask, leave out what failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fused_grpo.errors import RewardError
from fused_grpo.trainer.collect.advantages import total_rewards
from fused_grpo.trainer.data.datasets import Row
from fused_grpo.trainer.data.prompts import as_completion, prompt_text
from fused_grpo.trainer.rewards import Rewards
from fused_grpo.trainer.types import EffectiveBatch, Rollouts


@dataclass(frozen=True, kw_only=True)
class ScoredRollouts:
    """Rollouts and what the reward functions thought of them."""

    rollouts: Rollouts
    rows: list[Row]  # B, the dataset row of each completion
    completions: list[str]  # B, decoded without special tokens
    rewards: Tensor  # [B], weighted sums; NaN: no function scored it
    per_function: Tensor  # [B, F]; NaN: not scored by that function
    reward_names: list[str]  # F
    dropped: Tensor  # [B] bool, whole groups that a reward function failed on: not to be learned from
    seconds: dict[str, float] = field(default_factory=dict)  # by reward function
    metrics: dict[str, float] = field(default_factory=dict)  # that reward functions logged
    extra: dict[str, list[Any]] = field(default_factory=dict)  # B each, that reward functions logged
    failure: RewardError | None = None  # the first, where groups were dropped

    def effective_batch(self, advantages: Tensor) -> EffectiveBatch:
        """What the optimizer learns from, given advantages [B]: everything but the groups that were dropped."""
        rollouts = self.rollouts
        batch = EffectiveBatch(
            prompt_ids=[ids for ids in rollouts.prompt_ids for _ in range(rollouts.num_generations)],
            completion_ids=rollouts.completion_ids,
            sampling_logprobs=rollouts.sampling_logprobs,
            advantages=advantages,
            rewards=self.rewards,
        )
        return batch.take((~self.dropped).nonzero().flatten().tolist()) if self.dropped.any() else batch

    def records(self, advantages: Tensor) -> list[dict[str, Any]]:
        """One record per completion, for rollouts.jsonl and the console. Logged columns are fields of it."""
        return [
            {
                **{name: _as_json(values[index]) for name, values in self.extra.items()},
                "prompt": prompt_text(self.rows[index]),
                "completion": completion,
                "reward": self.rewards[index].item(),
                "rewards": dict(zip(self.reward_names, self.per_function[index].tolist(), strict=True)),
                "advantage": advantages[index].item(),
                "finish_reason": self.rollouts.finish_reasons[index],
                "weight_version": self.rollouts.weight_version,
                **({"dropped": True} if self.dropped[index] else {}),
            }
            for index, completion in enumerate(self.completions)
        ]


def score_rollouts(
    rollouts: Rollouts, rows: Sequence[Row], rewards: Rewards, tokenizer: Any, *, trainer_state: Any = None
) -> ScoredRollouts:
    """Rewards of every completion; `rows` are the prompts' dataset rows, one per prompt.

    Reward functions get what the engine said about a completion (`Rollouts.extra`) as further columns, and completions
    of conversations as messages.

    Raises:
        RewardError: a function failed, and its groups are not to be dropped; or no group was left.
        InputError: a function asks for a column that is not there.
    """
    rows = [row for row in rows for _ in range(rollouts.num_generations)]
    completions = tokenizer.batch_decode(rollouts.completion_ids, skip_special_tokens=True)
    output = rewards(
        [row | {name: values[index] for name, values in rollouts.extra.items()} for index, row in enumerate(rows)],
        [as_completion(row, text) for row, text in zip(rows, completions, strict=True)],
        rollouts.completion_ids,
        num_generations=rollouts.num_generations,
        trainer_state=trainer_state,
    )
    return ScoredRollouts(
        rollouts=rollouts,
        rows=rows,
        completions=completions,
        rewards=total_rewards(output.per_function, rewards.weights),
        per_function=output.per_function,
        reward_names=rewards.names,
        dropped=output.dropped,
        seconds=output.seconds,
        metrics=output.metrics,
        extra=output.extra,
        failure=output.failure,
    )


def _as_json(value: Any) -> Any:
    """A logged value as JSON has it."""
    if isinstance(value, Tensor):
        return value.tolist()
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
