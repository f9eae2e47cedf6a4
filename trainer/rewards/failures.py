"""Policies for a reward call that failed (`reward_failure`).

    fail    the error ends the run
    retry   the call is repeated up to `retries` times, with exponential backoff; then as above
    drop    the groups for which the call fails leave the batch

A group is dropped whole: an advantage compares the members of a group, and without one of them the others would have
another baseline. To find the failing groups, the function is called for each group alone.
"""

from __future__ import annotations

import functools
import logging
import math
import time

from fused_grpo.errors import RewardError
from fused_grpo.trainer.distributed.threads import in_thread
from fused_grpo.trainer.rewards.calling import RewardCaller, RewardInputs, Scores

FIRST_PAUSE = 0.5  # seconds; each further pause is twice as long

_log = logging.getLogger(__name__)


def call_with_retries(call: RewardCaller, inputs: RewardInputs, *, retries: int) -> Scores:
    """The scores of the first of `1 + retries` calls that succeeds.

    Raises:
        RewardError: the error of the last call.
    """
    for attempt in range(retries):
        try:
            return call(inputs, pinpoint=False)
        except RewardError as error:
            _log.warning("%s (call %d of %d, trying again)", error, attempt + 1, retries + 1)
            time.sleep(FIRST_PAUSE * 2**attempt)
    try:
        return call(inputs)
    except RewardError as error:
        raise RewardError(f"{error} (call {retries + 1} of {retries + 1})") from error


def call_dropping_groups(call: RewardCaller, inputs: RewardInputs, num_generations: int) -> Scores:
    """The scores, NaN in groups where the function fails, with the errors by group."""

    def attempt(start: int) -> Scores:
        try:
            return call(inputs.part(start, num_generations), pinpoint=False)
        except RewardError as error:
            return Scores(failures={start // num_generations: error})

    try:
        return call(inputs, pinpoint=False)
    except RewardError as error:
        groups = [Scores(failures={0: error})]
    starts = range(0, len(inputs), num_generations)
    if len(starts) > 1 and call.is_async:
        pending = [in_thread(functools.partial(attempt, start)) for start in starts]
        groups = [outcome.result() for outcome in pending]
    elif len(starts) > 1:
        groups = [attempt(start) for start in starts]
    return _joined(groups, num_generations)


def _joined(groups: list[Scores], num_generations: int) -> Scores:
    """The scores of a batch from those of its groups. A failed group has values NaN and logged columns None."""
    joined = Scores(extra={name: [] for group in groups for name in group.extra})
    for group in groups:
        joined.values.extend(group.values or [math.nan] * num_generations)
        for name, values in joined.extra.items():
            values.extend(group.extra.get(name, [None] * num_generations))
        for name, logged in group.metrics.items():
            joined.metrics.setdefault(name, []).extend(logged)
        for number, failure in group.failures.items():
            _log.warning("%s (its group is dropped)", failure)
            joined.failures[number] = failure
    return joined
