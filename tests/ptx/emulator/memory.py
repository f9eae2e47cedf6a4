"""Memory that knows which of its bytes were written, and who accessed each of them and when.

Barriers divide the time of a block into epochs. Two accesses of a byte in one epoch by different threads, or ever by
different blocks of a launch, come in any order; if one is a write, that is a race. A copy that runs beside the threads
may write its bytes at any time between its start and the wait for its end, so no thread may access them, nor write what
a matrix unit still reads.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Of a block: its threads, then its warps or warpgroups where those access memory as one.
AGENTS = 1 << 12
NEVER, SEVERAL = -1, AGENTS - 1
COPIED = -1  # else the number of products that read a byte
Bytes = NDArray[np.uint8]
Places = NDArray[np.int64]


class Fault(Exception):
    """What a GPU does not define, or a program that does not end."""


def check(passed: bool | np.bool_, message: str) -> None:
    if not passed:
        raise Fault(message)


@dataclass
class Clock:
    epoch: int = 0
    start_of_block: int = 0


class Memory:
    """Bytes at the addresses from `base` on. Places are offsets of bytes, [accesses, width], and agents [accesses]."""

    def __init__(self, data: Bytes, clock: Clock, *, base: int = 0, written: bool = True) -> None:
        self.data, self.base, self.clock = data, base, clock
        self.written = np.full(len(data), written)
        self._in_flight = np.zeros(len(data), np.int16)
        self.forget_accesses()

    def forget_accesses(self) -> None:
        """Launches are in order."""
        self.by_threads = np.zeros(len(self.data), bool)  # written, and not yet seen by the asynchronous units
        self._reads, self._writes = np.full((2, len(self.data)), NEVER, np.int64)

    def places(self, addresses: NDArray[np.integer], width: int, aligned: int = 1) -> Places:
        places = (addresses.astype(np.int64) - self.base)[:, None] + np.arange(width)
        check(not (addresses % aligned).any(), "misaligned access")
        check(not ((places < 0) | (places >= len(self.data))).any(), "access out of bounds")
        return places

    def read(self, places: Places, agents: Places) -> Bytes:
        check(self.written[places].all(), "read of what was never written")
        self._note(places, agents, write=False)
        return self.data[places]

    def write(self, places: Places, agents: Places, values: Bytes) -> None:
        self._note(places, agents, write=True)
        self.data[places] = values
        check((self.data[places] == values).all(), "race: two threads write different values at once")
        self.written[places] = self.by_threads[places] = True

    def start_copy(self, places: Places, agents: Places, *, is_thread: bool = True) -> None:
        check(is_thread or not self.by_threads[places].any(), "no fence between a write and an asynchronous access")
        self._note(places, agents, write=True)
        self._in_flight[places] = COPIED

    def end_copy(self, places: Places, agents: Places | None, values: Bytes) -> None:
        """Without agents all threads have waited for it; else those that did have to tell the others."""
        self._in_flight[places] = 0
        if agents is not None:
            return self.write(places, agents, values)
        self.data[places], self.written[places], self._writes[places] = values, True, NEVER
        return None

    def start_product(self, places: Places, agents: Places) -> Bytes:
        check(not self.by_threads[places].any(), "no fence between a write and an asynchronous access")
        values = self.read(places, agents)
        self._in_flight[places] += 1
        return values

    def end_product(self, places: Places, agents: Places) -> None:
        self._in_flight[places] -= 1
        self._note(places, agents, write=False)

    def _note(self, places: Places, agents: Places, *, write: bool) -> None:
        in_flight, epoch = self._in_flight[places], self.clock.epoch
        check(not (in_flight == COPIED).any(), "access where a copy is in flight")
        check(not (write and in_flight.any()), "write where a product in flight reads")
        now = np.broadcast_to(epoch * AGENTS + agents[:, None], places.shape)
        for stamps in (self._writes, self._reads)[: 1 + write]:
            seen = stamps[places]
            unordered = (seen >= epoch * AGENTS) | ((seen < self.clock.start_of_block * AGENTS) & (seen != NEVER))
            check(not (unordered & (seen != now)).any(), "race between threads")
        if write:
            self._writes[places] = now
        else:
            seen = self._reads[places]
            self._reads[places] = np.where((seen >= epoch * AGENTS) & (seen != now), epoch * AGENTS + SEVERAL, now)
            self._reads[places[self._reads[places] != now]] = epoch * AGENTS + SEVERAL
