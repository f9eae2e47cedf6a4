"""`BatchQueue`: the batches that an engine samples while the optimizer learns, in the order of their requests.

Each is sampled from the weights of its request, and the loop requests as many as leave the queue, at the same step each
time (docs/trainer.md, "Sampling while learning"). Ranks may share a server, and their threads meet in `load_weights`,
in the same order; so a rank whose batch failed loads weights for the others, and nothing more is sampled on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, wait
from types import MappingProxyType
from typing import Any, NamedTuple

from fused_grpo.trainer.common.threads import in_thread
from fused_grpo.trainer.data.datasets import Row
from fused_grpo.trainer.types import Sample

Drawn = tuple[list[Row], list[Sample]]  # rows of the dataset, and the completions of their prompts, group by group
Draw = Callable[[], Drawn | None]  # None: there is no queue
Complete = Callable[[], list[Sample]]
Load = Callable[[], None] | None


class Prefetched(NamedTuple):
    """A batch that the engine samples, or has sampled."""

    rows: list[Row]
    samples: Future[list[Sample]]
    before: dict[str, Any]  # the position of the collector before the rows were drawn
    weight_version: int  # the optimizer step whose weights sample it
    sync_metrics: Mapping[str, float] = MappingProxyType({})  # of the sync that the engine got them by, once sampled


class BatchQueue(deque[Prefetched]):
    """Batches in flight, the oldest first."""

    is_closed = False  # True: what has not begun is not sampled any more

    @property
    def is_sampling(self) -> bool:
        """Whether a batch is not sampled yet."""
        return not all(batch.samples.done() for batch in self)

    def request(
        self,
        rows: list[Row],
        sample: Complete,
        *,
        before: dict[str, Any],
        weight_version: int,
        sync_metrics: Mapping[str, float],
        load: Load = None,
    ) -> None:
        """Have `sample` called in a thread, behind all that was requested before; and `load` first, if it is given."""
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

        self.append(Prefetched(rows, in_thread(work, name="prefetch"), before, weight_version, sync_metrics))

    def restore(self, rows: list[Row], samples: list[Sample], *, before: dict[str, Any], weight_version: int) -> None:
        """Add a batch of a checkpoint."""
        sampled = Future[list[Sample]]()
        sampled.set_result(samples)
        self.append(Prefetched(rows, sampled, before, weight_version))

    def take(self) -> Drawn:
        """The oldest batch, which is waited for and leaves the queue; or its error, with which it stays there."""
        drawn = self[0].rows, self[0].samples.result()
        self.popleft()
        return drawn

    def wait(self) -> None:
        """Wait until the engine has nothing to do. `take` raises its errors, if there are some."""
        wait([batch.samples for batch in self])
