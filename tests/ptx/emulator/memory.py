"""Memory that knows which of its bytes were written, and who accessed each of them and when.

Barriers divide the time of a block into epochs. Two accesses of a byte in one epoch by different threads, or ever by
different blocks of a launch, come in any order; if one is a write, that is a race. A copy that runs beside the threads
may write its bytes at any time between its start and the wait for its end, so no thread may access them, nor write what
a matrix unit still reads. Those asynchronous units see what threads wrote after a fence only.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

# A stamp is a time and who it was then: a thread of a block, or a warp or warpgroup where those access memory as one.
AGENTS = 1 << 12
SEVERAL, BEFORE, NEVER = AGENTS - 1, -1, -2  # who; ordered before all that follows
COPIED = -1  # else the number of products that read a byte
Places = NDArray[np.integer]
Cells = tuple[Places, int, Places]  # aligned units [n] of some bytes, and the agents [n] that access them


class Fault(Exception):
    """What a GPU does not define, or a program that does not end."""


def check(passed: bool | np.bool_, message: str) -> None:
    if not passed:
        raise Fault(message)


class Clock:
    """Stamps of now, of the last barrier, and of the start of the block."""

    now = epoch = block = 0


class Memory:
    """Bytes at the addresses from `base` on."""

    def __init__(self, data: NDArray[np.uint8], clock: Clock, *, base: int = 0, written: bool = True) -> None:
        assert base % 16 == 0, "units of the memory are aligned at its addresses, too"
        self.base, self.end, self._clock = base, base + len(data), clock
        reads, in_flight = np.full(len(data), BEFORE, np.int32), np.zeros(len(data), np.int8)
        self._arrays = data, np.full(len(data), BEFORE if written else NEVER, np.int32), reads, in_flight
        self.start_launch()

    def start_launch(self) -> None:
        """Launches are in order."""
        for stamps in self._arrays[1:3]:
            np.minimum(stamps, BEFORE, out=stamps)
        self._fenced = 0

    def fence(self) -> None:
        self._fenced = self._clock.now = self._clock.now + AGENTS

    def cells(self, addresses: Places, width: int, agents: Places) -> Cells:
        places = addresses - self.base
        check(not (places % width).any(), "misaligned access")
        check(not ((places < 0) | (places > self.end - self.base - width)).any(), "access out of bounds")
        return places // width, width, agents

    def read(self, cells: Cells, *, products: int = 0) -> NDArray[np.uint8]:
        """By threads; or by a product that starts (1) or ends (-1)."""
        data, _, _, in_flight = self._access(cells, by_unit=products > 0)
        in_flight[cells[0]] += products
        return data[cells[0]]

    def write(self, cells: Cells, values: NDArray[np.uint8]) -> None:
        data, *_ = self._access(cells, write=True)
        data[cells[0]] = values
        check((data[cells[0]] == values).all(), "race: two threads write different values at once")

    def start_copy(self, cells: Cells, *, by_unit: bool = False) -> None:
        self._access(cells, write=True, by_unit=by_unit)[3][cells[0]] = COPIED

    def end_copy(self, cells: Cells, values: NDArray[np.uint8], *, for_all: bool = False) -> None:
        """All threads have waited for it; else those that did have to tell the others."""
        data, writes, _, in_flight = self._units(cells[1])
        in_flight[cells[0]] = 0
        if not for_all:
            return self.write(cells, values)
        data[cells[0]], writes[cells[0]] = values, BEFORE
        return None

    def _units(self, width: int) -> list[NDArray[Any]]:
        """Bytes, stamps of writes and of reads, and what is in flight: [units, width] each."""
        whole = (self.end - self.base) // width * width
        return [array[:whole].reshape(-1, width) for array in self._arrays]

    def _access(self, cells: Cells, *, write: bool = False, by_unit: bool = False) -> list[NDArray[Any]]:
        units, agents, clock = cells[0], cells[2][:, None], self._clock
        arrays = _, writes, reads, in_flight = self._units(cells[1])
        busy, wrote, read, now = in_flight[units], writes[units], reads[units], clock.now + agents
        check(not (by_unit and (wrote >= self._fenced).any()), "no fence between a write and an asynchronous access")
        check(not (busy == COPIED).any(), "access where a copy is in flight")
        check(not (write and busy.any()), "write where a product in flight reads")
        check(write or (wrote != NEVER).all(), "read of what was never written")
        for seen in (wrote, read) if write else (wrote,):
            unordered = (seen >= clock.epoch) | (seen >= 0) & (seen < clock.block)
            # A remainder takes longer than all else here, and most accesses are the first of their epoch.
            if unordered.any():
                check(not (unordered & (seen % AGENTS != agents)).any(), "race between threads")
        (writes if write else reads)[units] = now
        if not write:
            shared, again = reads[units] != now, read >= clock.epoch
            if again.any():
                shared |= again & (read % AGENTS != agents)
            cell, byte = shared.nonzero()
            reads[units[cell], byte] = clock.now + SEVERAL
        return arrays
