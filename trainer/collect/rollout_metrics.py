"""What a step's rollouts say about the run, under the names that TRL's users plot."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from fused_grpo.trainer.collect.advantages import nanstd
from fused_grpo.trainer.collect.scoring import ScoredRollouts

EQUAL_REWARDS = 1e-6  # rewards of a group that differ by less are equal but for rounding

# From the loss op's names to TRL's.
LOSS_METRICS = {
    "clip_ratio_low": "clip_ratio/low_mean",
    "clip_ratio_high": "clip_ratio/high_mean",
    "clip_ratio_region": "clip_ratio/region_mean",
    "sampling_difference_mean": "sampling/sampling_logp_difference/mean",
    "sampling_difference_max": "sampling/sampling_logp_difference/max",
}


class RolloutFacts(NamedTuple):
    """What one process knows of its B completions, small enough to send to the others."""

    rewards: Tensor  # [B]
    per_function: Tensor  # [B, F]
    spread: Tensor  # [P, 1], the standard deviation of each group's rewards
    lengths: Tensor  # [B] tokens
    ended: Tensor  # [B] bool
    dropped: float  # share of completions that a failed reward function took along
    seconds: dict[str, float]  # by reward function
    logged: dict[str, float]  # by reward functions

    @classmethod
    def of(cls, scored: ScoredRollouts) -> RolloutFacts:
        rollouts = scored.rollouts
        return cls(
            rewards=scored.rewards,
            per_function=scored.per_function,
            spread=nanstd(scored.rewards.view(-1, rollouts.num_generations)),
            lengths=torch.tensor([len(ids) for ids in rollouts.completion_ids], dtype=torch.float32),
            ended=torch.tensor([reason == "stop" for reason in rollouts.finish_reasons], dtype=torch.bool),
            dropped=scored.dropped.float().mean().item() if len(scored.dropped) else 0.0,
            seconds=scored.seconds,
            logged=scored.metrics,
        )


def rollout_metrics(processes: Sequence[RolloutFacts], reward_names: Sequence[str]) -> dict[str, float]:
    """Reward and length metrics of one generated batch, over all processes."""
    rewards, per_function, spread, lengths, ended = (
        torch.cat([getattr(facts, name) for facts in processes])
        for name in ("rewards", "per_function", "spread", "lengths", "ended")
    )
    metrics = {
        "reward": rewards.nanmean(),
        "reward_std": spread.mean(),
        "frac_reward_zero_std": (spread < EQUAL_REWARDS).float().mean(),
    }
    for name, values in zip(reward_names, per_function.unbind(1), strict=True):
        known = values[~values.isnan()]
        metrics[f"rewards/{name}/mean"] = known.mean()
        metrics[f"rewards/{name}/std"] = known.std() if len(known) > 1 else torch.zeros(())
        metrics[f"time/reward/{name}"] = torch.tensor(max(facts.seconds.get(name, 0.0) for facts in processes))
    for kind, some in (("length", lengths), ("terminated_length", lengths[ended])):
        some = some if len(some) else torch.zeros(1)
        metrics |= {f"completions/{stat}_{kind}": getattr(some, stat)() for stat in ("mean", "min", "max")}
    metrics["completions/clipped_ratio"] = (~ended).float().mean()
    logged = dict.fromkeys(name for facts in processes for name in facts.logged)
    dropped = fmean(facts.dropped for facts in processes)
    return {
        **{name: value.item() for name, value in metrics.items()},
        **({"rewards/dropped": dropped} if dropped else {}),
        **{name: fmean(facts.logged[name] for facts in processes if name in facts.logged) for name in logged},
    }


def rename_loss_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """The loss op's metrics under TRL's names."""
    return {LOSS_METRICS.get(name, name): value for name, value in metrics.items()}
