"""`metric_for_best_model`: the name of a metric of an evaluation, which is known at the start but for what a run adds.

A reward function may log metrics of its own (`log_metric`), a subclass's `evaluate` or `log` may add some.
With several eval sets each metric has the name of its set before it, and there is no mean over the sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fused_grpo.errors import InputError
from fused_grpo.trainer.collect.scoring import Evaluation, RolloutFacts, Scored, rollout_metrics
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.logging.callbacks import keys_of_best
from fused_grpo.trainer.rewards import Rewards


def check_best_name(args: GRPOConfig, rewards: Rewards, sets: Iterable[str], *, is_overridden: bool) -> None:
    """InputError where no evaluation of these sets can give `metric_for_best_model`; a warning where one hardly will.

    `is_overridden`: a subclass has an `evaluate` or a `log` of its own.
    """
    best, prefixes = args.metric_for_best_model, [f"{name}_" if name else "" for name in sets]
    if best is None or not prefixes or is_overridden:
        return
    name, metrics = best.removeprefix("eval_"), metric_names(args, rewards)
    if any(one.startswith(prefix) and one[len(prefix) :] in metrics for one in (best, name) for prefix in prefixes):
        return
    listed = [one for one in metrics if one.startswith(("reward", "pass@")) and "std" not in one]
    named = ", ".join(repr(one) for one in sets if one)
    got = f"got metric_for_best_model={best!r} with {f'the eval sets {named}' if named else 'one eval set'}"
    fix = f"fix: one of {', '.join(f'eval_{prefix}{one}' for one in listed for prefix in prefixes)}"
    may_be_logged = rewards.can_log and any(name.startswith(prefix) for prefix in prefixes)
    if may_be_logged or (args.eval_strategy == "no" and not args.eval_on_start and not args.eval_at_ends):
        warn_once(f"{got}, which no evaluation gives unless a reward function logs it: the first will say so; {fix}")
        return
    raise InputError(f"{got}, want a metric of an evaluation; {fix}")


def metric_names(args: GRPOConfig, rewards: Rewards) -> list[str]:
    """What an evaluation of one set may have, without what reward functions log."""
    nothing = RolloutFacts.of(Scored(samples=[], weight_version=0, reward_names=rewards.names))
    # With tools and truncated sampling, which other runs do not have.
    nothing = nothing._replace(episodes=torch.zeros(1, 3), supports=torch.ones(3))
    metrics = rollout_metrics([nothing], args, rewards.weights, evaluated=True)
    numbers = dict.fromkeys([*metrics, "loss", "num_tokens"], 0.0)
    return [name.removeprefix("_") for name in Evaluation(numbers, 1, 0.0, []).named("")]


def check_best_metric(name: str | None, metrics: Any) -> None:
    """InputError unless an evaluation has the metric of that name, `metric_for_best_model`, with or without "eval_".

    `metrics` is what `evaluate` returned, which may be a subclass's.
    """
    if name is None:
        return
    metric_values = metrics if isinstance(metrics, Mapping) else {}
    if not any(isinstance(metric_values.get(one, ""), int | float | None) for one in keys_of_best(name)):
        choice = ", ".join(one for one in metric_values if "reward" in one or "length" in one) or f"eval_{name}"
        raise InputError(
            f"got metric_for_best_model={name!r}, want a metric of an evaluation: {choice}; fix: "
            f"metric_for_best_model={choice.partition(',')[0]!r}, greater_is_better=True"
        )
