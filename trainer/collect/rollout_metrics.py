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

# The loss op's names, where TRL's are others or mean something else; None: TRL's metric is measured beside it.
LOSS_METRICS = {
    "num_tokens": "completion_tokens",
    "policy_loss": "policy_term",
    "loss_without_bonus": "policy_loss",
    **dict.fromkeys(("clip_ratio_low", "clip_ratio_high", "clip_ratio_region")),
    **dict.fromkeys(("sampling_difference_mean", "sampling_difference_max")),
}


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
