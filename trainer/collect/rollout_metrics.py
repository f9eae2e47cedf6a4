"""What a step's rollouts, or those of an evaluation, say about the run, under the names that TRL's users plot.

`GRPOTrainer.evaluate` returns all numbers of an evaluation as transformers does, `<prefix>_<metric>`, and
`<prefix>_<set>_<metric>` where eval sets have names. `metrics.jsonl` and `TrainResult` have the mean rewards, as
`eval/<metric>` and `<metric>`.

`eval_loss` is there as in TRL: the loss of a step with these completions, on policy, without the correction for the
sampler. That is about 0 plus the KL term less the entropy bonus, whatever the policy is: the metric to choose a model
by is `eval_reward`. Where it is 0 for certain (one completion per prompt, no such term), none goes through the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.trainer_utils import speed_metrics

from fused_grpo.errors import InputError
from fused_grpo.trainer.collect.advantages import nanstd
from fused_grpo.trainer.collect.scoring import ScoredRollouts
from fused_grpo.trainer.types import EffectiveBatch

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
        """The mean reward, and that of each of the functions `names`, under their `reward_keys`."""
        return dict(zip(reward_keys(names, of_set), map(self.metrics.__getitem__, reward_keys(names)), strict=True))


def reward_keys(names: Sequence[str], of_set: str = "") -> list[str]:
    """ "reward" and "rewards/<function>/mean", after "<set>_" where the set has a name."""
    keys = ["reward", *(f"rewards/{name}/mean" for name in names)]
    return [f"{of_set}_{key}" if of_set else key for key in keys]


def mean_rewards(metrics: Mapping[str, float], sets: Iterable[str], names: Sequence[str]) -> dict[str, float]:
    """The mean rewards among `metrics`, which begin with "eval_": what `TrainResult` has."""
    return {key: metrics[f"eval_{key}"] for of_set in sets for key in reward_keys(names, of_set)}


def check_best_metric(name: str | None, metrics: Mapping[str, float]) -> None:
    """Check that an evaluation has the metric that `metric_for_best_model` names, with or without "eval_".

    Raises:
        InputError: it does not.
    """
    if name is not None and not {name, f"eval_{name}"} & metrics.keys():
        some = ", ".join(known for known in metrics if "reward" in known or "length" in known)
        raise InputError(
            f"got metric_for_best_model={name!r}, want a metric of an evaluation: {some}; "
            "fix: metric_for_best_model='eval_reward', greater_is_better=True"
        )
