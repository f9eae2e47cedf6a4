"""Completions, their rewards, the batch of those that may be learned from, and what they say about the run.

`rollout_metrics` has the names that TRL's users plot, for a step's rollouts and for those of an evaluation, of which
`metrics.jsonl` and `TrainResult` have the mean rewards alone.

`eval_loss` (docs/data.md) is on policy and without the correction for the sampler: about 0 plus the KL term less the
entropy bonus. Where it is 0 for certain (one completion per prompt, no such term), none goes through the model.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.trainer_utils import speed_metrics

from fused_grpo.errors import RewardError, shown
from fused_grpo.trainer.collect.advantages import nanstd, scaled_in_batch, spread, total_rewards
from fused_grpo.trainer.common.formatting import message_text
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.data.datasets import Row, is_conversational
from fused_grpo.trainer.data.prompts import as_completion, decoded, has_own_parser, parsed_reply
from fused_grpo.trainer.rewards import Rewards
from fused_grpo.trainer.rewards.reward_functions import logged_means
from fused_grpo.trainer.types import EQUAL_REWARDS, Sample, with_fields

_log = logging.getLogger(__name__)

FULL_REWARD = 1.0  # of a right completion
_UNSCORED = (
    "All reward functions returned None for the following kwargs:\n%s\nSuch a completion %s. Got %d of %d; fix: return "
    "a number."
)
# The loss op's names, where TRL's are others or mean something else; None: TRL's metric is measured beside it.
LOSS_METRICS = {
    "loss_tokens": "completion_tokens",
    "loss_without_bonus": "policy_loss",
    **dict.fromkeys(("clip_ratio_low", "clip_ratio_high", "clip_ratio_region")),
    **dict.fromkeys(("sampling_difference_mean", "sampling_difference_max")),
}


@dataclass(frozen=True, kw_only=True)
class Scored:
    """The samples of this rank that were generated for a batch, scored, and what is known of all of them."""

    samples: list[Sample]  # B, groups one after the other
    weight_version: int  # of the oldest of them, where a rank is left without any, too
    reward_names: list[str]  # F
    seconds: dict[str, float] = field(default_factory=dict)  # by reward function
    # What reward functions logged in each call, with its places in `samples`; after `counted`, by round: means, of so
    # many completions.
    calls: list[tuple[list[int], dict[str, list[float]]]] = field(default_factory=list)
    logged: list[tuple[dict[str, float], int]] = field(default_factory=list)
    failure: RewardError | None = None  # the first one of a reward function, where groups were dropped
    sampled: list[tuple[float, ...]] = field(default_factory=list)  # `facts_of` these and those that they replace
    metrics: dict[str, float] = field(default_factory=dict)  # of all ranks

    @staticmethod
    def joined(rounds: Sequence[Scored]) -> Scored:
        """Rounds of one batch, the oldest first. Seconds are added up."""
        return replace(
            rounds[0],
            samples=[sample for part in rounds for sample in part.samples],
            sampled=[row for part in rounds for row in part.sampled],
            seconds={name: sum(part.seconds.get(name, 0.0) for part in rounds) for name in rounds[0].seconds},
            logged=[entry for part in rounds for entry in part.logged],
        )

    def counted(self) -> Scored:
        """With the means of what was logged, without the calls for completions that are dropped by now, on any rank."""
        means = logged_means(self.calls, [sample.dropped for sample in self.samples])
        return replace(self, calls=[], logged=[*self.logged, (means, sum(not one.dropped for one in self.samples))])

    def records(self) -> list[dict[str, Any]]:
        """One record per completion, for rollouts.jsonl and the console. Logged columns are fields of it."""
        return [
            {
                **sample.logged,
                "prompt": message_text(sample.row["prompt"] if sample.episode is None else sample.episode.prompt),
                "completion": sample.text,
                **({} if sample.episode is None else sample.episode.record()),
                "reward": sample.reward,
                "rewards": dict(zip(self.reward_names, sample.rewards, strict=True)),
                "advantage": sample.advantage,
                "finish_reason": sample.finish_reason,
                "weight_version": sample.weight_version,
                **({} if sizes is None else {"kept_tokens": int(sizes.sum()) / max(1, int((sizes > 0).sum()))}),
                **({} if greedy is None else {"greedy_completion": greedy.text, "greedy_reward": greedy.reward}),
                **({"dropped": True} if sample.dropped else {}),
                **({} if sample.failure is None else {"failure": sample.failure}),
            }
            for sample, sizes, greedy in ((sample, sample.kept_sizes, sample.greedy) for sample in self.samples)
        ]


def score_rollouts(
    samples: Sequence[Sample],
    rows: Sequence[Row],
    rewards: Rewards,
    tokenizer: Any,
    *,
    trainer_state: Any = None,
    unscored_is: str = "has no reward, advantage 0 and no part in the statistics of its group",
) -> Scored:
    """Rewards of every completion; `rows` are the prompts' dataset rows, one per prompt.

    Columns that the engine returned with the completions (`Sample.extra`) are passed to reward functions like columns
    of the dataset; completions of conversations are passed as messages, which the tokenizer's response template has
    parsed, where it has one. Reward functions are not given groups with a `failure`, which are dropped.

    RewardError for a function that failed where `reward_failure` is not "drop"; InputError for an argument of one for
    which there is no column.
    """
    size = len(samples) // max(1, len(rows))
    rows = [row for row in rows for _ in range(size)]
    texts = decoded(tokenizer, [sample.completion_ids for sample in samples])
    # A group that was sampled again may have other columns.
    shared = [name for name in samples[0].extra if all(name in sample.extra for sample in samples)]
    columns = [row | {name: one.extra[name] for name in shared} for row, one in zip(rows, samples, strict=True)]
    are_messages, completions = bool(rows) and is_conversational(rows[0]), list[Any](texts)
    if are_messages:
        completions = [as_completion(row, text) for row, text in zip(rows, texts, strict=True)]
    episodes = [sample.episode for sample in samples if sample.episode is not None]  # of all samples, or of none
    if episodes:
        completions = [episode.messages for episode in episodes]
        columns = [row | {"prompt": episode.prompt} for row, episode in zip(columns, episodes, strict=True)]
    elif are_messages and has_own_parser(tokenizer):
        _parse(completions, samples, tokenizer)
    # The functions do not see groups for which the engine failed.
    sound, outcome = [place for place, sample in enumerate(samples) if sample.failure is None], dict[str, Any]()
    per_function = torch.full((len(samples), len(rewards.names)), torch.nan, dtype=torch.float32)
    dropped, logged = torch.ones(len(samples), dtype=torch.bool), [dict[str, Any]() for _ in samples]
    if sound:
        environments = [getattr(samples[place].episode, "environment", None) for place in sound]
        output = rewards(
            [columns[place] for place in sound],
            [completions[place] for place in sound],
            [samples[place].completion_ids for place in sound],
            num_generations=size,
            trainer_state=trainer_state,
            environments=None if all(one is None for one in environments) else environments,
        )
        per_function[sound], dropped[sound] = output.per_function, output.dropped
        calls = [([sound[place] for place in places], values) for places, values in output.calls]
        outcome = {"seconds": output.seconds, "calls": calls, "failure": output.failure}
        for name, values in output.extra.items():
            by_place = dict(zip(sound, values, strict=True))
            for place, record in enumerate(logged):
                record[name] = by_place.get(place)
    unscored = (per_function.isnan().all(1) & ~dropped).nonzero()[:, 0].tolist()
    if unscored:
        example = {**columns[unscored[0]], "completion": completions[unscored[0]]}
        _log.warning(_UNSCORED, shown(example), unscored_is, len(unscored), len(columns))
    scores: dict[str, Sequence[Any]] = {
        "row": rows,
        "text": texts,
        "rewards": per_function.tolist(),
        "reward": total_rewards(per_function, rewards.weights).tolist(),
        "dropped": dropped.tolist(),
        "logged": logged,
    }
    return Scored(
        samples=with_fields(samples, scores),
        weight_version=samples[0].weight_version,
        reward_names=rewards.names,
        **outcome,
    )


def score_greedy(scored: Scored, score: Callable[..., Scored]) -> Scored:
    """With what `score` gives its greedy completions, if there are some; a group whose own one is dropped is, too.

    What the functions log of these is not in the log.
    """
    greedy = greedy_of(scored.samples)
    if not greedy:
        return scored
    rows = {id(sample.greedy): sample.row for sample in scored.samples}
    unscored_is = "is greedy, and no baseline for the others of its prompt: their advantages are 0"
    result = score(list(greedy.values()), [rows[key] for key in greedy], unscored_is=unscored_is)
    baselines = dict(zip(greedy, result.samples, strict=True))
    samples = with_fields(scored.samples, {"greedy": [baselines.get(id(sample.greedy)) for sample in scored.samples]})
    return replace(
        scored,
        samples=[without_rewards(one) if one.greedy is not None and one.greedy.dropped else one for one in samples],
        seconds={name: seconds + result.seconds.get(name, 0.0) for name, seconds in scored.seconds.items()},
        failure=scored.failure or result.failure,
    )


def greedy_of(samples: Sequence[Sample]) -> dict[int, Sample]:
    """The greedy completions of their prompts, each once, by their `id`."""
    return {id(sample.greedy): sample.greedy for sample in samples if sample.greedy is not None}


def without_rewards(sample: Sample) -> Sample:
    """As one of a group that is dropped."""
    return replace(sample, dropped=True, reward=math.nan, rewards=[math.nan] * len(sample.rewards))


def _parse(completions: list[Any], samples: Sequence[Sample], tokenizer: Any) -> None:
    """Replace the messages among the completions by what TRL makes of them: `content`, `reasoning_content`, ...

    As in TRL, a completion that cannot be parsed (a malformed tool call) is a message with its whole text.
    """
    failed, places = 0, [index for index, one in enumerate(completions) if not isinstance(one, str)]
    for index in places:
        try:
            message = parsed_reply(tokenizer, samples[index].completion_ids, samples[index].prompt_ids)
            for call in message.get("tool_calls") or ():
                function = call.get("function", call)
                if not isinstance(function["name"], str):
                    raise TypeError("a tool call without a name")
                function["arguments"] = {} if function.get("arguments") is None else function["arguments"]
            completions[index] = [message]
        except Exception:  # of the template, which is a program, or of what the model wrote
            failed += 1
    if failed and failed == len(places):
        warn_once(
            "the tokenizer's response template parses no completion of a batch, so reward functions get whole texts; "
            "fix: tokenizer.parse_response(...) of one says why"
        )


def facts_of(one: Sample) -> tuple[float, ...]:
    """(tokens, with its prompt; reward; whether the engine failed for its group; whether its group is dropped)."""
    own = one.num_own if one.failure is None else 0
    return len(one.prompt_ids) + own, one.reward, one.failure is not None, one.dropped


class RolloutFacts(NamedTuple):
    """What one process knows of its B completions, small enough to send to the others."""

    scored: Scored  # without its samples
    sampled: Tensor  # [S, 4] fp64, of these and of those that they replace
    rewards: Tensor  # [B] fp32
    baselines: Tensor  # [B] of ReMax, NaN: not scored, not of this rank, or none
    lengths: Tensor  # [B] of the model's own tokens
    per_function: Tensor  # [B, F]; NaN: not scored by that function
    ended: Tensor  # [B] bool
    failed: Tensor  # [B] bool, of the groups for which the engine failed
    dropped: Tensor  # [B] bool, of these and of those for which a reward function failed
    supports: Tensor  # [3], of truncated sampling: tokens, and the sum and the largest of the sizes of their supports
    episodes: Tensor  # [e, 3], of those of several turns: turns, calls of tools, and calls that failed

    @classmethod
    def of(cls, scored: Scored) -> RolloutFacts:
        samples = scored.samples
        numbers = [(sample.reward, sample.baseline, float(sample.num_own), *sample.rewards) for sample in samples]
        table = torch.tensor(numbers, dtype=torch.float32).view(len(samples), 3 + len(scored.reward_names))
        flags = [(sample.finish_reason == "stop", sample.failure is not None, sample.dropped) for sample in samples]
        kept_sizes = [sample.kept_sizes for sample in samples if sample.kept_sizes is not None]
        sizes = torch.cat([torch.zeros(1, dtype=torch.int32), *kept_sizes])
        episodes = [sample.episode for sample in samples if sample.episode is not None]
        calls = [
            (episode.turns, len(episode.calls), sum(call.failed for call in episode.calls)) for episode in episodes
        ]
        rewards, baselines, lengths = table[:, :3].unbind(1)
        ended, failed, dropped = torch.tensor(flags, dtype=torch.bool).view(-1, 3).unbind(1)
        supports = torch.stack([(sizes > 0).sum(), sizes.sum(), sizes.amax()]).float()
        alone = replace(scored.counted() if scored.calls else scored, samples=[], sampled=[], failure=None)
        every = torch.tensor(scored.sampled or [*map(facts_of, samples)], dtype=torch.float64).view(-1, 4)
        by_call = torch.tensor(calls).view(-1, 3)
        return cls(alone, every, rewards, baselines, lengths, table[:, 3:], ended, failed, dropped, supports, by_call)


def rollout_metrics(
    ranks: Sequence[RolloutFacts], args: GRPOConfig, weights: Tensor, *, evaluated: bool = False
) -> dict[str, float]:
    """Reward and length metrics of one generated batch, or of an evaluation, over all processes.

    The facts are in the order of their ranks, since a group may be on several; `weights` [F] are of the functions.
    """
    size = (args.num_generations_eval or 1) if evaluated else args.num_generations
    rewards, baselines, lengths, per_function, ended, failed, dropped = (
        torch.cat([getattr(facts, name) for facts in ranks])
        for name in ("rewards", "baselines", "lengths", "per_function", "ended", "failed", "dropped")
    )
    lengths, ended = lengths[~failed], ended[~failed]
    groups, baselines = (values.view(-1, size) for values in (rewards, baselines))
    apart = spread(groups, None if baselines.isnan().all() else baselines[:, :1])
    # A single completion has no spread; of a larger group, one score says nothing about it.
    comparable, kept = (~groups.isnan()).sum(1) > min(1, size - 1), ~dropped.view(-1, size)[:, 0]
    is_equal = (apart < EQUAL_REWARDS)[kept]
    is_zero = is_equal & comparable[kept]
    if len(rewards) and (in_batch := scaled_in_batch(per_function, weights, args, size=size)) is not None:
        is_zero = (nanstd(in_batch) < EQUAL_REWARDS) & ((~in_batch.isnan()).sum() > 1)
    metrics = {
        "reward": rewards.nanmean(),
        "reward_std": _std(rewards[~rewards.isnan()]),
        "reward_std_within_groups": nanstd(groups)[comparable].mean(),
        "frac_reward_zero_std": is_zero.float().mean(),
        "groups_with_equal_rewards": is_equal.float().mean(),
    }
    if not baselines.isnan().all():
        metrics["remax/greedy_reward"] = baselines[kept, 0].nanmean()
    for name, values in zip(ranks[0].scored.reward_names, per_function.unbind(1), strict=True):
        scored = values[~values.isnan()]
        metrics |= {f"rewards/{name}/mean": scored.mean(), f"rewards/{name}/std": _std(scored)}
        metrics[f"time/reward/{name}"] = torch.tensor(max(facts.scored.seconds.get(name, 0.0) for facts in ranks))
    for kind, counts in (("length", lengths), ("terminated_length", lengths[ended])):
        counts = counts if len(counts) else torch.zeros(1)
        metrics |= {f"completions/{stat}_{kind}": getattr(counts, stat)() for stat in ("mean", "min", "max")}
    metrics["completions/clipped_ratio"] = (~ended).float().mean()
    logs = [entry for facts in ranks for entry in facts.scored.logged]
    logged = dict.fromkeys(name for means, _ in logs for name in means)
    _, every, failed, dropped = torch.cat([facts.sampled for facts in ranks]).unbind(1)
    # In each step where a group may be dropped: a mean over steps has those in which none was.
    if "drop" in (args.reward_failure, args.rollout_failure):
        metrics["rewards/dropped"] = dropped.mean()
    if args.rollout_failure == "drop":
        metrics["rollouts/dropped"] = failed.sum()
    if args.dynamic_sampling and not evaluated:
        metrics["dynamic_sampling/reward"] = every.nanmean()
    supports = torch.stack([facts.supports for facts in ranks])
    if tokens := supports[:, 0].sum():
        metrics["sampling/kept_tokens/mean"] = supports[:, 1].sum() / tokens
        metrics["sampling/kept_tokens/max"] = supports[:, 2].amax()
    episodes = torch.cat([facts.episodes for facts in ranks]).float()
    if len(episodes):
        turns, calls, failed_calls = episodes.sum(0)
        metrics |= {
            "tools/turns": turns / len(episodes),
            "tools/call_frequency": calls / len(episodes),
            "tools/failure_frequency": failed_calls / calls.clamp(min=1),
        }
    return {
        **{name: value.item() for name, value in metrics.items()},
        **{name: mean_of([(means[name], count) for means, count in logs if name in means]) for name in logged},
        **(pass_rates(per_function, size) if evaluated and args.num_generations_eval is not None else {}),
    }


def mean_of(means: Sequence[tuple[float, int]]) -> float:
    """Of means, each of so many completions, those that are numbers; NaN of none.

    >>> mean_of([(1.0, 8), (0.0, 4), (math.nan, 4)])
    0.6666666666666666
    """
    valid = [one for one in means if not math.isnan(one[0])]
    total = sum(count for _, count in valid)
    return fmean((mean for mean, _ in valid), [count / total for _, count in valid]) if total else math.nan


def pass_rates(per_function: Tensor, n: int) -> dict[str, float]:
    """pass@k for k = 1, 2, 4, ... and n: the probability that one of k completions of a prompt is right.

    It is the unbiased estimate of Chen et al. 2021 (arXiv 2107.03374), equation 1, from the c of n completions to which
    the first reward function gives FULL_REWARD or more; NaN where no prompt was scored:

        pass@k = mean over prompts of 1 - C(n - c, k) / C(n, k)

    Rewards are [B, F], groups of n one after the other; NaN: not scored. A prompt none of whose completions was scored
    does not count, any other such completion is wrong.

    Of the 6 pairs of four completions, 3 have the one that is right:

    >>> pass_rates(torch.tensor([[0.0], [1.0], [0.0], [0.0]]), 4)
    {'pass@1': 0.25, 'pass@2': 0.5, 'pass@4': 1.0}
    """
    scored = [group for group in per_function[:, 0].view(-1, n) if not group.isnan().all()]
    counts = [int((group >= FULL_REWARD).sum()) for group in scored]
    shares = {
        k: [1 - math.comb(n - right, k) / math.comb(n, k) for right in counts]
        for k in (*(2**exponent for exponent in range(n.bit_length())), n)
    }
    return {f"pass@{k}": fmean(probabilities) if probabilities else math.nan for k, probabilities in shares.items()}


def _std(values: Tensor) -> Tensor:
    """With Bessel's correction; NaN for fewer than two values."""
    return values.std() if len(values) > 1 else torch.tensor(torch.nan)


class Evaluation(NamedTuple):
    metrics: dict[str, float]  # of one set, with the names of `rollout_metrics`
    num_prompts: int
    started: float  # by time.time
    batch: list[Sample]  # of this rank

    def named(self, prefix: str) -> dict[str, Any]:
        """All numbers as `<prefix>_<metric>`, None for the mean of nothing as in the entries of steps, with
        `<prefix>_runtime` (s), `_samples_per_second` (prompts) and `_steps_per_second` (generate calls)."""
        speed: dict[str, float] = speed_metrics(prefix, self.started, num_samples=self.num_prompts, num_steps=1)
        kept = {name: value for name, value in self.metrics.items() if not name.startswith("time/")}
        return {f"{prefix}_{name}": None if math.isnan(value) else value for name, value in kept.items()} | speed

    def rewards(self, names: Sequence[str], *, set_name: str) -> dict[str, float]:
        """What `TrainResult` has: "reward", "rewards/<function>/mean" and "pass@<k>", after "<set>_" if it is named."""
        keys = ["reward", *(f"rewards/{name}/mean" for name in names)]
        keys += [name for name in self.metrics if name.startswith("pass@")]
        return {f"{set_name}_{key}" if set_name else key: self.metrics[key] for key in keys}
