"""Memory that knows which of its bytes were written, and who accessed each of them and when.

Barriers divide the time of a block into epochs. Two accesses of a byte in one epoch by different threads, or ever by
different blocks of a launch, come in any order; if one is a write, that is a race. A copy that runs beside the threads
may write its bytes at any time between its start and the wait for its end, so no thread may access them, nor write what
a matrix unit still reads. Those asynchronous units see what threads wrote after a fence only.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# A stamp is a time and who it was then: a thread of a block, or a warp or warpgroup where those access memory as one.
AGENTS = 1 << 12
SEVERAL, BEFORE, NEVER = AGENTS - 1, -1, -2  # who; ordered before all that follows
COPIED = -1  # else the number of products that read a byte
Bytes, Places = NDArray[np.uint8], NDArray[np.integer]


class Fault(Exception):
    """What a GPU does not define, or a program that does not end."""


def check(passed: bool | np.bool_, message: str) -> None:
    if not passed:
        raise Fault(message)


@dataclass
class Clock:
    """It goes on at barriers, fences and starts of blocks: stamps of now, of the last barrier and of the last start."""

    now: int = 0
    epoch: int = 0
    block: int = 0


class Cells(NamedTuple):
    """Aligned units of some bytes, and the agents that access them, [n] each."""

    units: Places
    width: int
    agents: Places


class Memory:
    """Bytes at the addresses from `base` on."""

    def __init__(self, data: Bytes, clock: Clock, *, base: int = 0, written: bool = True) -> None:
        assert base % 16 == 0, "units of the memory are aligned at its addresses, too"
        self.base, self.end, self._clock, self._fenced = base, base + len(data), clock, 0
        writes, reads = (np.full(len(data), stamp, np.int32) for stamp in (BEFORE if written else NEVER, BEFORE))
        self._arrays = data, writes, reads, np.zeros(len(data), np.int8)

    def start_launch(self) -> None:
        """Launches are in order."""
        for stamps in self._arrays[1:3]:
            np.minimum(stamps, BEFORE, out=stamps)
        self._fenced = 0

    def fence(self) -> None:
        self._clock.now += AGENTS
        self._fenced = self._clock.now

    def cells(self, addresses: Places, width: int, agents: Places) -> Cells:
        places = addresses - self.base
        check(not (places % width).any(), "misaligned access")
        check(not ((places < 0) | (places > self.end - self.base - width)).any(), "access out of bounds")
        return Cells(places // width, width, agents)

    def read(self, cells: Cells) -> Bytes:
        return self._access(cells, write=False)[0][cells.units]

    def write(self, cells: Cells, values: Bytes) -> None:
        data, *_ = self._access(cells, write=True)
        data[cells.units] = values
        check((data[cells.units] == values).all(), "race: two threads write different values at once")

    def start_copy(self, cells: Cells, *, is_thread: bool = True) -> None:
        check(is_thread or self._is_fenced(cells), "no fence between a write and an asynchronous access")
        self._access(cells, write=True)[3][cells.units] = COPIED

    def end_copy(self, cells: Cells, values: Bytes, *, for_all: bool) -> None:
        """All threads have waited for it; else those that did have to tell the others."""
        data, writes, _, in_flight = self._by_width(cells.width)
        in_flight[cells.units] = 0
        if not for_all:
            return self.write(cells, values)
        data[cells.units], writes[cells.units] = values, BEFORE
        return None

    def start_product(self, cells: Cells) -> Bytes:
        check(self._is_fenced(cells), "no fence between a write and an asynchronous access")
        data, _, _, in_flight = self._access(cells, write=False)
        in_flight[cells.units] += 1
        return data[cells.units]

    def end_product(self, cells: Cells) -> None:
        self._access(cells, write=False)[3][cells.units] -= 1

    def _by_width(self, width: int) -> list[NDArray[Any]]:
        """Bytes, stamps of writes and of reads, and what is in flight: [units, width] each."""
        whole = (self.end - self.base) // width * width
        return [array[:whole].reshape(-1, width) for array in self._arrays]

    def _is_fenced(self, cells: Cells) -> np.bool_:
        writes = self._by_width(cells.width)[1][cells.units]
        return ((writes < 0) | (writes < self._fenced)).all()

    def _access(self, cells: Cells, *, write: bool) -> list[NDArray[Any]]:
        units, clock, agents = cells.units, self._clock, cells.agents[:, None]
        arrays = _, writes, reads, in_flight = self._by_width(cells.width)
        busy, wrote, read, now = in_flight[units], writes[units], reads[units], clock.now + agents
        check(not (busy == COPIED).any(), "access where a copy is in flight")
        check(not (write and busy.any()), "write where a product in flight reads")
        check(write or (wrote != NEVER).all(), "read of what was never written")
        for seen in (wrote, read) if write else (wrote,):
            unordered = (seen >= clock.epoch) | (seen >= 0) & (seen < clock.block)
            check(not (unordered & (seen % AGENTS != agents)).any(), "race between threads")
        (writes if write else reads)[units] = now
        if not write:
            shared = (read >= clock.epoch) & (read % AGENTS != agents) | (reads[units] != now)
            cell, byte = shared.nonzero()
            reads[units[cell], byte] = clock.now + SEVERAL
        return arrays
