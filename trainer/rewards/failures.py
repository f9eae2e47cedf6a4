"""What becomes of a reward call that failed.

    fail    the error ends the run, and nothing was updated
    retry   the call is made again, up to `retries` times and after growing pauses; then as above
    drop    the groups that the failure touches leave the batch, whole

Dropping is by group because an advantage compares the members of a group: without one of them, the baseline of the
others would be another. Which groups fail is found by calling the function on each of them.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Sequence
from typing import Literal

from fused_grpo.errors import RewardError
from fused_grpo.trainer.rewards.calling import RewardCaller, RewardInputs, Scores, in_thread

FailurePolicy = Literal["fail", "retry", "drop"]
FIRST_PAUSE = 0.5  # seconds; the next ones are twice as long each

_log = logging.getLogger(__name__)


def call_with_retries(call: RewardCaller, inputs: RewardInputs, *, retries: int) -> Scores:
    """The scores of the first call that succeeds, of `1 + retries`.

    Raises:
        RewardError: that of the last one.
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


def call_dropping_groups(
    call: RewardCaller, inputs: RewardInputs, num_generations: int
) -> tuple[Scores, dict[int, RewardError]]:
    """The scores, NaN in groups where the function fails; and why it did, by the group's number."""
    try:
        return call(inputs, pinpoint=False), {}
    except RewardError as error:
        outcomes: list[Scores | RewardError] = [error]
    if len(inputs) > num_generations:
        outcomes = _group_by_group(call, inputs, num_generations)
    failures = {number: outcome for number, outcome in enumerate(outcomes) if isinstance(outcome, RewardError)}
    for failure in failures.values():
        _log.warning("%s (its group is dropped)", failure)
    return _joined(outcomes, num_generations), failures


def _group_by_group(call: RewardCaller, inputs: RewardInputs, num_generations: int) -> list[Scores | RewardError]:
    def attempt(start: int) -> Scores | RewardError:
        try:
            return call(inputs.part(start, num_generations), pinpoint=False)
        except RewardError as error:
            return error

    starts = range(0, len(inputs), num_generations)
    if not call.is_async:
        return [attempt(start) for start in starts]
    pending = [in_thread(functools.partial(attempt, start)) for start in starts]
    return [outcome.result() for outcome in pending]


def _joined(outcomes: Sequence[Scores | RewardError], num_generations: int) -> Scores:
    """One batch from its groups. A group that failed has NaN as its values and None as whatever others logged."""
    columns = dict.fromkeys(name for outcome in outcomes if isinstance(outcome, Scores) for name in outcome.extra)
    blank: list[None] = [None] * num_generations
    joined = Scores(values=[], extra={name: [] for name in columns})
    for outcome in outcomes:
        scores = outcome if isinstance(outcome, Scores) else Scores(values=[math.nan] * num_generations)
        joined.values.extend(scores.values)
        for name, values in joined.extra.items():
            values.extend(scores.extra.get(name, blank))
        for name, logged in scores.metrics.items():
            joined.metrics.setdefault(name, []).extend(logged)
    return joined
