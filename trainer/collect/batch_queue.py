"""`BatchQueue`: the batches that an engine samples while the optimizer learns; `Pace`: how many there may be.

Each is sampled from the weights of its request (docs/trainer.md, "Sampling while learning").
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

from fused_grpo.trainer.common.threads import in_thread
from fused_grpo.trainer.data.datasets import Row
from fused_grpo.trainer.types import Sample

Drawn = tuple[list[Row], list[Sample]]  # rows of the dataset, and the completions of their prompts, group by group
Complete = Callable[[], list[Sample]]


class Prefetched(NamedTuple):
    rows: list[Row]
    samples: Future[list[Sample]]
    before: dict[str, Any]  # the position of the collector before the rows were drawn
    weight_version: int  # the optimizer step whose weights sample it
    sync_metrics: Mapping[str, float]  # of the sync that the engine got them by, once sampled


class BatchQueue(deque[Prefetched]):
    """Batches in flight, the oldest first."""

    is_closed = False  # True: what has not begun is not sampled any more

    def in_turn(self, sample: Complete, load: Callable[[], None] | None) -> Future[list[Sample]]:
        """What `sample` returns in a thread, behind all that was requested before; `load`, if given, comes first."""
        earlier = self[-1].samples if self else None

        def work() -> list[Sample]:
            failure = None if earlier is None else earlier.exception()  # which waits
            if self.is_closed:
                raise CancelledError
            if load is not None:
                load()
            if failure is not None:
                raise failure
            return sample()

        return in_thread(work, name="prefetch")

    def take(self) -> Drawn:
        """The oldest batch, which is waited for and leaves the queue; or its error, with which it stays there."""
        drawn = self[0].rows, self[0].samples.result()
        self.popleft()
        return drawn

    def wait(self) -> None:
        """Wait until the engine has nothing to do. `take` raises its errors, if there are some."""
        wait([batch.samples for batch in self])


@dataclass
class Pace:
    """How many batches may be in flight: `most`, or fewer where rollouts are further than `limit` from the policy.

    The divergence of a policy that goes on in one direction grows with the square of its steps, so the rollouts that
    were learned from last say how many are within the limit. An engine's rounding, as on policy, does not count.
    """

    most: int
    limit: float | None  # of KL(sampler || policy), in nats per token; None: `most` at any distance
    steps: int  # that the optimizer makes with each batch
    allowed: int = 1
    on_policy_kl: float = 0.0

    @property
    def batches(self) -> int:
        """At least 1: the next batch says how far the policy moves."""
        return self.most if self.limit is None else max(1, min(self.allowed, self.most))

    def learned_from(self, off_policy_steps: int, kl: float | None) -> None:
        """Take note of rollouts, at the last optimizer step with them; `kl` is None where it is not known."""
        if self.limit is None or kl is None or math.isnan(kl):
            return
        if off_policy_steps < self.steps:
            self.on_policy_kl = kl
            return
        generations = off_policy_steps // self.steps
        within = generations * math.sqrt(self.limit / max(kl - self.on_policy_kl, self.limit / 1e6))
        self.allowed = max(1, min(int(within), self.allowed + 1, self.most))

    def state(self) -> list[float]:
        """The last arguments of the one that goes on."""
        return [self.allowed, self.on_policy_kl]
