"""From rollouts to advantages: decode, reward, compare within groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fused_grpo.trainer.advantages import total_rewards
from fused_grpo.trainer.data import Row
from fused_grpo.trainer.rewards import RewardFunction, call_reward_functions, reward_name
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

    def effective_batch(self, advantages: Tensor) -> EffectiveBatch:
        """What the optimizer step learns from, given advantages [B]."""
        rollouts = self.rollouts
        return EffectiveBatch(
            prompt_ids=[ids for ids in rollouts.prompt_ids for _ in range(rollouts.num_generations)],
            completion_ids=rollouts.completion_ids,
            sampling_logprobs=rollouts.sampling_logprobs,
            advantages=advantages,
        )

    def records(self, advantages: Tensor) -> list[dict[str, object]]:
        """One record per completion, for rollouts.jsonl and the console."""
        return [
            {
                "prompt": row["prompt"],
                "completion": completion,
                "reward": reward,
                "rewards": dict(zip(self.reward_names, by_function, strict=True)),
                "advantage": advantage,
                "finish_reason": reason,
                "weight_version": self.rollouts.weight_version,
            }
            for row, completion, reward, by_function, advantage, reason in zip(
                self.rows,
                self.completions,
                self.rewards.tolist(),
                self.per_function.tolist(),
                advantages.tolist(),
                self.rollouts.finish_reasons,
                strict=True,
            )
        ]


def score(
    rollouts: Rollouts, rows: Sequence[Row], functions: Sequence[RewardFunction], weights: Tensor, tokenizer: Any
) -> ScoredRollouts:
    """Rewards of every completion; `rows` are the prompts' dataset rows, one per prompt.

    Raises:
        RewardError: a function raised, or returned something unusable.
    """
    rows = [row for row in rows for _ in range(rollouts.num_generations)]
    completions = tokenizer.batch_decode(rollouts.completion_ids, skip_special_tokens=True)
    per_function = call_reward_functions(functions, rows, completions, rollouts.completion_ids)
    return ScoredRollouts(
        rollouts=rollouts,
        rows=rows,
        completions=completions,
        rewards=total_rewards(per_function, weights),
        per_function=per_function,
        reward_names=[reward_name(function) for function in functions],
    )
