"""A block: its threads, and the units that copy and multiply beside them.

Threads that are at one place run an instruction at once; a register is an array over all of them. A copy reaches shared
memory as late as the waits of the program allow: without one, threads read what was there before.
"""

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .instructions import DTYPES, Instruction, Op, Program, Values, from_bf16, function_of, split
from .memory import AGENTS, Cells, Clock, Fault, Memory, Places, check

LIMIT = 1_000_000  # instructions of a block
WARP, WARPGROUP, LINE = 32, 128, 16  # threads, threads, bytes that swizzling keeps in order
SPANS = {1: 128, 2: 64, 3: 32}  # bytes of a swizzled row, by the number in the descriptor of an operand
Arguments = tuple[Any, ...]


@functools.cache
def constant(number: str, kind: str, threads: int) -> Values:
    bits = int(number[2:], 16) if number.startswith(("0f", "0d")) else int(number.rstrip("U"), 0)
    return np.full(threads, bits % (1 << 8 * DTYPES[kind].itemsize), f"u{DTYPES[kind].itemsize}").view(DTYPES[kind])


@functools.cache
def method_of(op: Op) -> str:
    """Of an instruction with side effects, after one of its parts; of `cp.async.bulk.tensor` the last, `_tensor`."""
    return next((f"_{part}" for part in reversed(op) if hasattr(Block, f"_{part}")), "")


def swizzled(places: Places, span: int) -> Places:
    """Lines are permuted by the number of their row."""
    return places ^ (places >> 7 & span // LINE - 1) << 4


def numbers(bits: Values, op: Op) -> Values:
    """The bf16 or fp16 numbers in the bits of matrices, in fp64."""
    halves = bits.view(np.uint16)
    return (from_bf16(halves) if "bf16" in op else halves.view(np.float16)).astype(np.float64)


@dataclass
class Mbarrier:
    """A phase ends after one arrival, and after the copies of as many bytes as that expects."""

    parity: int = 0
    expected: int | None = None
    copies: list[tuple[Cells, Values]] = field(default_factory=list)


@dataclass
class Block:
    """Methods after parts of instructions execute these, for the `active` threads."""

    program: Program
    parameters: dict[str, Any]  # bytes, or tensor descriptors
    place: dict[str, int]  # "%ctaid.x" and the like
    shared_bytes: int
    find: Callable[[int], Memory]  # the memory at an address
    clock: Clock

    def __post_init__(self) -> None:
        self.threads = np.arange(self.program.threads)
        self.active = self.everyone = np.ones(len(self.threads), bool)
        self.shared = Memory(np.zeros(self.shared_bytes, np.uint8), self.clock, written=False)
        # A descriptor is at the address of its number.
        addresses = self.place | {"global_smem": 0} | {x: number for number, x in enumerate(self.parameters)}
        self.registers = {name: np.full(len(self.threads), number, np.uint64) for name, number in addresses.items()}
        self.registers["%tid.x"] = self.threads.astype(np.uint32)
        self._changing = Counter[str]()  # registers, by products in flight
        self._unfenced = set[str]()  # registers that were written after the last wgmma.fence
        self._mbarriers: dict[int, Mbarrier] = {}  # by their places
        # By unit: what ends each piece of work in flight. The last group is not committed yet.
        self._groups: dict[str, list[list[Callable[[], Any]]]] = defaultdict(lambda: [[]])

    def run(self) -> None:
        self.clock.block = self.clock.epoch = self.clock.now = self.clock.now + AGENTS
        code, breakpoints, ready = self.program.code, self.program.breakpoints, {0: self.everyone}
        for _ in range(LIMIT):
            if not ready:
                break
            place = min(ready)  # those behind go on first, so branches join
            if place in breakpoints:
                breakpoints.pop(place)()
            try:
                onward = self._step(code[place], place, ready.pop(place))
            except Fault as fault:
                raise Fault(f"{fault}: {self.program.name}: {code[place].text}") from None
            for to, threads in onward:
                ready[to] = self._joined(threads | ready[to]) if to in ready else threads
        check(not ready, f"no end: {self.program.name}")
        landings = self._groups.pop("landing", [])  # for which the end of a launch waits
        check(not any(map(any, self._groups.values())), f"end before copies and products: {self.program.name}")
        for finish in itertools.chain(*landings):
            finish()

    def _joined(self, threads: Values) -> Values:
        return self.everyone if threads is self.everyone or threads.all() else threads

    def _step(self, instruction: Instruction, place: int, running: Values) -> list[tuple[int, Values]]:
        """Execute; which threads go on where."""
        op, arguments, guard, negated, _ = instruction
        active = running if guard is None else self._joined(running & (self.value(guard, "pred") ^ negated))
        if op[0] in ("bra", "ret"):
            onward = [(self.program.labels.get(x, x), active) for x in arguments]
            onward += [] if active is running else [(place + 1, self._joined(running & ~active))]
            return [x for x in onward if x[1].any()]
        if active is self.everyone or active.any():
            check("sync" not in op or active is self.everyone, "some threads of a block where all have to be")
            self.active = active
            if method := method_of(op):
                getattr(self, method)(op, arguments)
            else:
                function, kinds = function_of(op)
                self.set(arguments[0], function(*map(self.value, arguments[1:], kinds)))
        return [(place + 1, running)]

    def value(self, operand: str, kind: str) -> Values:
        """[threads] of the type that an instruction gives an operand: a register or an immediate."""
        if self._changing:
            check(not self._changing.get(operand), "read of a register that a product changes")
        if (bits := self.registers.get(operand)) is None:
            check(operand[0] != "%", "read of a register that was never written")
            return constant(operand, kind, len(self.threads))
        dtype = DTYPES[kind]
        if bits.dtype is dtype:
            return bits
        return (bits if bits.itemsize == dtype.itemsize else bits.astype(f"u{dtype.itemsize}")).view(dtype)

    def values(self, operands: str, kind: str) -> Values:
        """[registers, threads]."""
        return np.stack([self.value(x, kind) for x in split(operands)])

    def set(self, register: str, values: Values) -> None:
        if self._changing:
            check(not self._changing.get(register), "write of a register that a product changes")
        self._unfenced.add(register)
        if self.active is not self.everyone:
            before = self.registers.get(register, np.zeros_like(values)).view(values.dtype)
            values = np.where(self.active, values, before)
        self.registers[register] = values

    def set_all(self, registers: str, values: Iterable[Values]) -> None:
        for register, by_thread in zip(split(registers), values, strict=True):
            self.set(register, by_thread.flatten())

    def locate(self, space: str, operand: str, width: int) -> tuple[Memory, Cells]:
        """The memory and the cells that active threads access at "[%r1 + 16]"."""
        (base, *offset), is_shared = split(operand.replace("+", " ")), space.startswith("shared")
        addresses = self.value(base, "u32" if is_shared else "u64")[self.active].astype(np.int64) + int(*offset or "0")
        memory = self.shared if is_shared else self.find(int(addresses[0]))
        return memory, memory.cells(addresses, width, self.threads[self.active])

    def _ld(self, op: Op, arguments: Arguments) -> None:
        count, dtype = len(split(arguments[0])), DTYPES[op[-1]]
        values = np.zeros((count, len(self.threads)), f"u{max(2, dtype.itemsize)}")  # no register has 8 bits
        if op[1] == "param":
            values[:] = np.frombuffer(self.parameters[arguments[1][1:-1]], f"u{dtype.itemsize}", 1)
        else:
            memory, cells = self.locate(op[1], arguments[1], dtype.itemsize * count)
            values[:, self.active] = memory.read(cells).view(f"u{dtype.itemsize}").T
        self.set_all(arguments[0], values)

    def _st(self, op: Op, arguments: Arguments) -> None:
        values = np.ascontiguousarray(self.values(arguments[1], op[-1])[:, self.active].T).view(np.uint8)
        memory, cells = self.locate(op[1], arguments[0], values.shape[1])
        memory.write(cells, values)

    def _mov(self, op: Op, arguments: Arguments) -> None:
        """Also between a register and its parts, "{low, high}"."""
        (to, of), size = map(split, arguments), DTYPES[op[1]].itemsize
        values = self.values(arguments[1], op[1] if len(of) == 1 else f"b{8 * size // len(of)}")
        if len(to) != len(of):
            values = np.ascontiguousarray(values.T).view(f"u{size // len(to)}").T
        self.set_all(arguments[0], values)

    def _elect(self, op: Op, arguments: Arguments) -> None:
        """The device chooses a lane: here not the first, which a program that tests %tid.x would choose."""
        self.set(arguments[0].split("|")[1], self.threads % WARP == WARP - 1)

    def _bar(self, op: Op, arguments: Arguments) -> None:
        assert (op[1:], arguments) == (("sync",), ("0",)), op
        self.clock.epoch = self.clock.now = self.clock.now + AGENTS

    def _fence(self, op: Op, arguments: Arguments) -> None:
        assert op[1:3] in {("proxy", "async"), ("fence", "sync")}, op
        self._unfenced.clear() if op[0] == "wgmma" else self.shared.fence()

    def _group(self, op: Op, arguments: Arguments) -> None:
        """Commit the last one, or wait. A store by the unit has two ends: what it stores was read, and was written."""
        stores = ("store",) if "read" in op else ("store", "landing")
        for unit in ("product",) if op[0] == "wgmma" else stores if "bulk" in op else ("copy",):
            if "commit_group" in op:
                self._groups[unit].append([])
            while "wait_group" in op and len(self._groups[unit]) > int(arguments[0]) + 1:
                for finish in self._groups[unit].pop(0):
                    finish()

    _commit_group = _wait_group = _group

    def _cp(self, op: Op, arguments: Arguments) -> None:
        values = np.zeros((len(active := self.active), int(arguments[2], 0)), np.uint8)
        if len(arguments) > 3:  # where it is 0, zeros are written
            self.active = active & (self.value(arguments[3], "u32") > 0)
        if self.active.any():
            memory, cells = self.locate("global", arguments[1], values.shape[1])
            values[self.active] = memory.read(cells)
        self.active = active
        _, cells = self.locate("shared", arguments[0], values.shape[1])
        self.shared.start_copy(cells)
        self._groups["copy"][-1].append(lambda: self.shared.end_copy(cells, values[active]))

    def _tensor(self, op: Op, arguments: Arguments) -> None:
        """Copy a block of a matrix, by one thread, to shared memory or from there. Past the ends are zeros."""
        is_store, (agent,) = op[5] == "global", self.threads[self.active]
        handle, coordinates = split(arguments[1 - is_store])
        matrix = self.parameters[self.program.parameters[int(self.value(handle, "u64")[agent])]]
        (height, width), (stride, _) = matrix.block_shape, matrix.strides
        start, item = matrix.base.data_ptr(), matrix.base.element_size()
        check(start % LINE == stride * item % LINE == 0, "misaligned access")
        assert width * item in SPANS.values(), "a block is as wide as a swizzled row"
        column, row = self.values(coordinates, "s32")[:, agent].astype(int)
        rows, columns = row + np.arange(height)[:, None], column + np.arange(width)
        exists = ((rows < matrix.shape[0]) & (columns < matrix.shape[1])).ravel()
        places, memory = start + ((rows * stride + columns) * item).ravel()[exists], self.find(start)
        outside = memory.cells(places, item, np.full(len(places), agent))
        first = self.locate("shared", arguments[is_store], 128)[1][0][0] * 128
        lines = swizzled(first + np.arange(0, height * width * item, LINE), width * item)
        inside = self.shared.cells(lines, LINE, np.full(len(lines), agent))
        if is_store:
            values = self.shared.read(inside, products=1).reshape(-1, item)[exists]
            memory.start_copy(outside, by_unit=True)
            self._groups["store"][-1].append(lambda: self.shared.read(inside, products=-1))
            self._groups["landing"][-1].append(lambda: memory.end_copy(outside, values))
        else:  # an mbarrier counts the bytes
            values = np.zeros((height * width, item), np.uint8)
            values[exists] = memory.read(outside)
            self.shared.start_copy(inside, by_unit=True)
            self._mbarriers[self._mbarrier_at(arguments[2])].copies.append((inside, values.reshape(-1, LINE)))

    def _mbarrier_at(self, operand: str, *, write: bool = False) -> int:
        _, cells = self.locate("shared", operand, 8)
        self.shared.write(cells, np.zeros((1, 8), np.uint8)) if write else self.shared.read(cells)
        return int(cells[0][0])

    def _mbarrier(self, op: Op, arguments: Arguments) -> None:
        is_change = op[1] in ("init", "inval")
        place = self._mbarrier_at(arguments[not is_change], write=is_change)
        check((place in self._mbarriers) == (op[1] != "init"), "change of an mbarrier in use")
        mbarrier = self._mbarriers.setdefault(place, Mbarrier())
        if op[1] == "init":
            assert arguments[1] == "1", "one arrival"
        elif op[1] == "inval":
            check(not self._mbarriers.pop(place).copies, "change of an mbarrier in use")
        elif op[1] == "arrive":
            check(mbarrier.expected is None and self.active.sum() == 1, "more arrivals than an mbarrier counts")
            mbarrier.expected = int(arguments[2])
        else:
            assert (op[1], self.active is self.everyone) == ("try_wait", True), "all threads wait"
            if mbarrier.parity == self.value(arguments[2], "u32")[0]:
                while mbarrier.expected != 0:
                    check(mbarrier.expected is not None and len(mbarrier.copies) > 0, "wait without end")
                    cells, values = mbarrier.copies.pop(0)
                    self.shared.end_copy(cells, values, for_all=True)
                    mbarrier.expected -= values.size
                mbarrier.parity, mbarrier.expected = 1 - mbarrier.parity, None
            self.set(arguments[0], self.everyone)

    def _matrices(self, op: Op, arguments: Arguments) -> None:
        """Their rows of 16 bytes, eight of each matrix. A warp accesses them as one."""
        assert "trans" not in op, op
        is_load = op[0] == "ldmatrix"
        count, places = len(split(arguments[1 - is_load])), self.locate("shared", arguments[is_load], LINE)[1][0]
        places = places.reshape(-1, WARP)[:, : 8 * count]
        cells = places.ravel(), LINE, len(self.threads) + np.arange(len(places)).repeat(8 * count)
        if is_load:
            values = self.shared.read(cells).view(np.uint32).reshape(-1, count, WARP)
            return self.set_all(arguments[0], values.swapaxes(0, 1))
        values = self.values(arguments[1], "b32").reshape(count, -1, WARP).swapaxes(0, 1)
        return self.shared.write(cells, np.ascontiguousarray(values).view(np.uint8).reshape(-1, LINE))

    _ldmatrix = _stmatrix = _matrices

    def _mma(self, op: Op, arguments: Arguments) -> None:
        """[16, 16] @ [16, 8] + [16, 8] of each warp. A register of 16-bit numbers is a quarter of a [16, 16]."""
        assert op[3:6] == ("m16n8k16", "row", "col"), op
        a, b, c = (self.values(x, "b32").reshape(len(split(x)), -1, 8, 4) for x in arguments[1:])
        a, b = numbers(a, op), numbers(b, op).swapaxes(2, 3)
        product = a[:2] @ b[0] + a[2:] @ b[1]
        pairs = np.stack([product[..., ::2], product[..., 1::2]], 1).reshape(c.shape)
        self.set_all(arguments[0], (pairs + c.view(np.float32)).astype(np.float32))

    def _mma_async(self, op: Op, arguments: Arguments) -> None:
        """[64, 16] @ [N, 16].T of each warpgroup, from shared memory, added to accumulators [64, N]."""
        registers, N = split(arguments[0]), int(op[4].removeprefix("m64n").removesuffix("k16"))
        assert arguments[4:] == ("1", "1", "0", "0"), "no signs, nothing transposed"
        check(not self._unfenced.intersection(registers), "no fence between a write of accumulators and their product")
        (a, reads), (b, more) = self._operand(arguments[1], 64, op), self._operand(arguments[2], N, op)
        # A thread has pairs of two halves of the 16 rows of its warp.
        product = (a @ b.swapaxes(1, 2)).reshape(-1, 4, 2, 8, N // 8, 4, 2).transpose(4, 2, 6, 0, 1, 3, 5)
        before = np.stack([self.registers[x].view(np.float32) for x in registers])
        after = product.reshape(before.shape) + np.where(self.value(arguments[3], "pred"), before, 0.0)
        self.registers.update(zip(registers, after.astype(np.float32), strict=True))
        self._changing.update(registers)
        ends = [functools.partial(self.shared.read, cells, products=-1) for cells in reads + more]
        self._groups["product"][-1] += [*ends, lambda: self._changing.subtract(registers)]

    def _operand(self, descriptors: str, rows: int, op: Op) -> tuple[Values, list[Cells]]:
        """The matrices [warpgroups, rows, 16], and what reads where."""
        matrices, reads, row = [], [], np.arange(rows)[:, None]
        for group, descriptor in enumerate(self.value(descriptors, "u64")[::WARPGROUP].tolist()):
            span, stride = SPANS[descriptor >> 62], (descriptor >> 32 & 0x3FFF) << 4
            lines = ((descriptor & 0x3FFF) << 4) + row // 8 * stride + row % 8 * span + [0, LINE]
            agents = np.full(lines.size, len(self.threads) + WARP + group)
            reads.append(self.shared.cells(swizzled(lines.ravel(), span), LINE, agents))
            matrices.append(self.shared.read(reads[-1], products=1).reshape(rows, 2 * LINE))
        return numbers(np.stack(matrices), op), reads
