"""What each metric of docs/trainer.md is, from its definition there, in plain Python's fp64 and without our own code.

`of_batch` has those of a generated batch, or of an evaluation, from what was sampled and what the reward functions say
of it: a list of groups for each `generate` call. independent_step_metrics.py has those of an optimizer step.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

NAN = math.nan
EQUAL = 1e-6


@dataclass
class Completion:
    """One that was sampled. `rewards` has a number or None of each function; of a dropped group none counts."""

    prompt: list[int]
    ids: list[int]
    ended: bool
    rewards: list[float | None] = field(default_factory=list)
    failed: bool = False  # the engine did, for its group
    dropped: bool = False  # its group was, for whatever reason
    greedy_ids: list[int] | None = None  # the greedy completion of its prompt
    greedy: float | None = None  # the reward of that, NaN: it has none; None: there is no such completion
    logprobs: list[float] = field(default_factory=list)  # the sampler's
    kept: list[int] | None = None  # the tokens that truncated sampling kept for each of its own


Groups = list[list[Completion]]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else NAN


def std(values: Sequence[float]) -> float:
    """With Bessel's correction; NaN of fewer than two."""
    if len(values) < 2:
        return NAN
    centre = mean(values)
    return math.sqrt(sum((value - centre) ** 2 for value in values) / (len(values) - 1))


def total(one: Completion, weights: Sequence[float]) -> float | None:
    """The weighted sum of what the functions gave it; None where none gave a number."""
    parts = [weight * value for weight, value in zip(weights, one.rewards, strict=True) if value is not None]
    return None if one.dropped or not parts else sum(parts)


def totals(group: list[Completion], weights: Sequence[float]) -> list[float]:
    return [value for one in group if (value := total(one, weights)) is not None]


def distance(group: list[Completion], weights: Sequence[float]) -> float:
    """How far the rewards of a group are apart; with ReMax, how far from the greedy one."""
    if (greedy := group[0].greedy) is not None:
        return 0.0 if math.isnan(greedy) else max((abs(v - greedy) for v in totals(group, weights)), default=0.0)
    values = totals(group, weights)
    return std(values) if len(values) > 1 else 0.0


def scaled_by(groups: Groups, weights: Sequence[float], args: Any) -> list[float] | None:
    """What has the standard deviation that scales the advantages of the batch; None: each group has its own."""
    if args.multi_objective_aggregation == "normalize_then_sum":
        return normalised(groups, weights)
    if args.advantage_estimator == "reinforce_plus_plus_baseline":
        return [value - mean(totals(group, weights)) for group in groups for value in totals(group, weights)]
    if args.scale_rewards == "batch" or args.advantage_estimator == "reinforce_plus_plus":
        return [value for group in groups for value in totals(group, weights)]
    return None


def normalised(groups: Groups, weights: Sequence[float]) -> list[float]:
    """Per completion with a reward, the weighted sum over functions of (r - mean of the group) / (std + 1e-4)."""
    sums = []
    for group in groups:
        columns = list(zip(*(one.rewards for one in group), strict=True))
        numbers = [[value for value in column if value is not None] for column in columns]
        scales = [(mean(values), (std(values) if len(values) > 1 else 0.0) + 1e-4) for values in numbers]
        for one in group:
            if total(one, weights) is not None:
                parts = zip(weights, one.rewards, scales, strict=True)
                sums.append(sum(w * (r - centre) / scale for w, r, (centre, scale) in parts if r is not None))
    return sums


def kept_of(rounds: Sequence[Groups], weights: Sequence[float], wanted: int, more: int) -> tuple[Groups, int]:
    """Dynamic sampling: (the first `wanted` groups with unequal rewards, and of how many rounds these are)."""
    kept, count = [], 0
    for groups in rounds[: 1 + more]:
        count += 1
        kept += [group for group in groups if distance(group, weights) >= EQUAL]
        if len(kept) >= wanted:
            break
    return kept[:wanted], count


def of_batch(
    rounds: Sequence[Groups], names: Sequence[str], weights: Sequence[float], args: Any, *, evaluated: bool = False
) -> dict[str, float]:
    """The metrics of a batch that so many calls of `generate` made: of all of it, but with dynamic sampling."""
    sampled = [one for groups in rounds for group in groups for one in group]
    groups, metrics = [group for groups in rounds for group in groups], dict[str, float]()
    if args.dynamic_sampling and not evaluated:
        groups, count = kept_of(rounds, weights, len(rounds[0]), args.dynamic_sampling)
        assert count == len(rounds)
        metrics["dynamic_sampling/rounds"] = count
        metrics["dynamic_sampling/reward"] = mean([value for one in sampled for value in totals([one], weights)])
    batch, kept = [one for group in groups for one in group], [group for group in groups if not group[0].dropped]
    rewards = [value for group in groups for value in totals(group, weights)]
    metrics |= {"reward": mean(rewards), "reward_std": std(rewards)}
    spreads = [std(totals(group, weights)) for group in groups if len(totals(group, weights)) > 1]
    alone = [0.0 for group in groups if len(group) == 1 and totals(group, weights)]
    metrics["reward_std_within_groups"] = mean(spreads + alone)
    equal = [distance(group, weights) < EQUAL for group in kept]
    metrics["groups_with_equal_rewards"] = mean(equal)
    many = [len(totals(group, weights)) > min(1, len(group) - 1) for group in kept]
    metrics["frac_reward_zero_std"] = mean([a and b for a, b in zip(equal, many, strict=True)])
    if (scaled := scaled_by(groups, weights, args)) is not None and batch:
        metrics["frac_reward_zero_std"] = float(len(scaled) > 1 and std(scaled) < EQUAL)
    for place, name in enumerate(names):
        own = [one.rewards[place] for one in batch if not one.dropped and one.rewards[place] is not None]
        metrics |= {f"rewards/{name}/mean": mean(own), f"rewards/{name}/std": std(own)}
    sound = [one for one in batch if not one.failed]
    lengths = {"length": sound, "terminated_length": [one for one in sound if one.ended]}
    for kind, ones in lengths.items():
        counts = [len(one.ids) for one in ones] or [0]
        metrics |= {f"completions/mean_{kind}": mean(counts)}
        metrics |= {f"completions/min_{kind}": min(counts), f"completions/max_{kind}": max(counts)}
    metrics["completions/clipped_ratio"] = mean([not one.ended for one in sound])
    if "drop" in (args.reward_failure, args.rollout_failure):
        metrics["rewards/dropped"] = mean([one.dropped for one in sampled])
    if args.rollout_failure == "drop":
        metrics["rollouts/dropped"] = sum(one.failed for one in sampled)
    sizes = [size for one in batch for size in one.kept or ()]
    if sizes:
        metrics |= {"sampling/kept_tokens/mean": mean(sizes), "sampling/kept_tokens/max": max(sizes)}
    if batch and batch[0].greedy is not None:
        metrics["remax/greedy_reward"] = mean([group[0].greedy for group in kept if group[0].greedy == group[0].greedy])
    return metrics


def tokens_of(rounds: Sequence[Groups]) -> int:
    """`num_tokens` of these: prompts, once for each completion, and completions that the engine could give."""
    return sum(
        len(one.prompt) + len(one.ids) * (not one.failed) for groups in rounds for group in groups for one in group
    )


def logged_mean(calls: Sequence[tuple[Sequence[float], int]]) -> float:
    """`log_metric`: of each call its finite values, and its completions, by which their mean is weighted."""
    means = [(mean(finite), count) for values, count in calls if (finite := [v for v in values if math.isfinite(v)])]
    return sum(value * count for value, count in means) / sum(count for _, count in means) if means else NAN


def windows(records: Sequence[dict[str, Any]], size: int, *, latest: Sequence[str], once: Callable[[str], bool]) -> Any:
    """The entries of the history: of each `size` records the means of finite values, or the last ones of `latest`.

    Of a metric of the generated batch, as `once` says, a record that repeats the one before of the same batch does not
    count: `generation` numbers the batches.
    """
    entries = []
    for first in range(0, len(records), size):
        entry, part = {}, records[first : first + size]
        for name in dict.fromkeys(name for record in part for name in record):
            before = records[first - 1] if first else None
            values = []
            for record in part:
                is_repeated = before is not None and once(name) and record["generation"] == before["generation"]
                if name in record and not is_repeated and not isinstance(record[name], str):
                    values.append(record[name])
                before = record
            finite = [value for value in values if value is not None and math.isfinite(value)]
            if values:
                last = finite[-1] if finite and values[-1] == finite[-1] else None
                entry[name] = last if name in latest else (mean(finite) if finite else None)
        entries.append(entry)
    return entries
