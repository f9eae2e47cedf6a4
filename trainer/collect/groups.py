"""Scored rollouts by whole groups: some of them, and several rounds of them as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch

from fused_grpo.trainer.collect.scoring import ScoredRollouts
from fused_grpo.trainer.types import Rollouts


def num_groups(scored: ScoredRollouts) -> int:
    return len(scored.rollouts.prompt_ids)


def choose_groups(scored: ScoredRollouts, groups: Sequence[int]) -> ScoredRollouts:
    """These groups, in this order."""
    rollouts, size = scored.rollouts, scored.rollouts.num_generations
    members = [group * size + member for group in groups for member in range(size)]

    def some(values: list[Any]) -> list[Any]:
        return [values[index] for index in members]

    logprobs = rollouts.sampling_logprobs
    return replace(
        scored,
        rollouts=replace(
            rollouts,
            prompt_ids=[rollouts.prompt_ids[group] for group in groups],
            completion_ids=some(rollouts.completion_ids),
            sampling_logprobs=None if logprobs is None else some(logprobs),
            finish_reasons=some(rollouts.finish_reasons),
            extra={name: some(values) for name, values in rollouts.extra.items()},
        ),
        rows=some(scored.rows),
        completions=some(scored.completions),
        rewards=scored.rewards[members],
        per_function=scored.per_function[members],
        dropped=scored.dropped[members],
        extra={name: some(values) for name, values in scored.extra.items()},
    )


def join(parts: Sequence[ScoredRollouts]) -> ScoredRollouts:
    """Rounds of one batch, one after the other. Seconds add up, logged metrics are means."""
    first = parts[0]

    def all_of(lists: Sequence[list[Any]]) -> list[Any]:
        return [value for values in lists for value in values]

    rounds: list[Rollouts] = [part.rollouts for part in parts]
    known = [rollouts.sampling_logprobs for rollouts in rounds if rollouts.sampling_logprobs is not None]
    return replace(
        first,
        rollouts=replace(
            first.rollouts,
            prompt_ids=all_of([rollouts.prompt_ids for rollouts in rounds]),
            completion_ids=all_of([rollouts.completion_ids for rollouts in rounds]),
            sampling_logprobs=all_of(known) if len(known) == len(rounds) else None,
            finish_reasons=all_of([rollouts.finish_reasons for rollouts in rounds]),
            extra=_columns([rollouts.extra for rollouts in rounds]),
        ),
        rows=all_of([part.rows for part in parts]),
        completions=all_of([part.completions for part in parts]),
        rewards=torch.cat([part.rewards for part in parts]),
        per_function=torch.cat([part.per_function for part in parts]),
        dropped=torch.cat([part.dropped for part in parts]),
        seconds={name: sum(part.seconds.get(name, 0.0) for part in parts) for name in first.seconds},
        metrics=_means([part.metrics for part in parts]),
        extra=_columns([part.extra for part in parts]),
    )


def _columns(parts: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """The columns that all parts have."""
    names = [name for name in parts[0] if all(name in part for part in parts)]
    return {name: [value for part in parts for value in part[name]] for name in names}


def _means(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: fmean(part[name] for part in parts if name in part) for name in names}
