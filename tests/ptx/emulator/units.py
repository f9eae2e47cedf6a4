"""A block with the units that copy and multiply beside its threads, and with the matrices that its warps hold.

A copy reaches shared memory as late as the waits of the program allow: without one, threads read what was there before.
"""

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .arithmetic import Op, Values, from_bf16
from .memory import Places, check
from .program import split
from .threads import WARP, Arguments, Threads

WARPGROUP = 128
SPANS = {1: 128, 2: 64, 3: 32}  # bytes of a swizzled row, by the number in the descriptor of an operand
Groups = list[list[Callable[[], None]]]  # what ends each piece of work in flight; the last group is not committed yet


@dataclass
class Phases:
    """An mbarrier: a phase ends when all have arrived, and all bytes."""

    count: int
    pending: int
    transactions: int = 0
    parity: int = 0
    copies: list[tuple[Places, Values]] = field(default_factory=list)

    def arrive(self, arrivals: int, transactions: int) -> None:
        self.pending, self.transactions = self.pending - arrivals, self.transactions + transactions
        if self.pending == self.transactions == 0:
            self.parity, self.pending = 1 - self.parity, self.count


def swizzle(places: Places, span: int) -> Places:
    """Where the bytes of rows are: units of 16 bytes are permuted by the number of the row."""
    return places ^ ((places >> 7 & span // 16 - 1) << 4)


def numbers(bits: Values, op: Op) -> Values:
    """The bf16 or fp16 numbers in the bits of matrices, in fp64."""
    halves = bits.view(np.uint16)
    return (from_bf16(halves) if "bf16" in op else halves.view(np.float16)).astype(np.float64)


class Block(Threads):
    def __post_init__(self) -> None:
        super().__post_init__()
        self._copies: Groups = [[]]
        self._products: Groups = [[]]
        self._stores: Groups = [[]]  # until what they store was read
        self._landings: Groups = [[]]  # until it was written
        self._phases: dict[int, Phases] = {}  # by their places

    def run(self) -> None:
        super().run()
        in_shared_memory = self._copies + self._products + self._stores
        check(not any(in_shared_memory), f"end of a block before its copies and products: {self.program.name}")
        for finish in itertools.chain(*self._landings):  # the end of a launch waits for them
            finish()

    def _are_grouped(self, groups: Groups, op: Op, arguments: Arguments) -> bool:
        """Whether this is an instruction about groups; then it is executed."""
        if "commit_group" in op:
            groups.append([])
        elif "wait_group" in op:
            while len(groups) > int(arguments[0]) + 1:
                for finish in groups.pop(0):
                    finish()
        return bool({"commit_group", "wait_group"} & set(op))

    def _cp(self, op: Op, arguments: Arguments, active: Values) -> None:
        if op[2:4] == ("bulk", "tensor"):
            self._copy_block(op, arguments, active)
        elif op[2] == "bulk":
            self._are_grouped(self._stores, op, arguments)
            if "read" not in op:
                self._are_grouped(self._landings, op, arguments)
        elif not self._are_grouped(self._copies, op, arguments):
            width, threads = int(arguments[2], 0), self.threads[active]
            values = np.zeros((len(threads), width), np.uint8)
            full = self.value(arguments[3], "u32") > 0 if len(arguments) > 3 else self.everyone  # else zeros
            if (active & full).any():
                memory, source = self.locate("global", arguments[1], width, active & full)
                values[full[active]] = memory.read(source, self.threads[active & full])
            _, places = self.locate("shared", arguments[0], width, active)
            self.shared.start_copy(places, threads)
            self._copies[-1].append(lambda: self.shared.end_copy(places, threads, values))

    def _copy_block(self, op: Op, arguments: Arguments, active: Values) -> None:
        """Of a matrix, by one thread, to shared memory or from there. Past the ends are zeros; none are stored."""
        is_store, (agent,) = op[5] == "global", self.threads[active]
        handle, coordinates = split(arguments[1 - is_store])
        matrix = self.arguments[self.program.parameters[int(self.value(handle, "u64")[agent])]]
        column, row = (int(self.value(x, "s32")[agent]) for x in split(coordinates))
        item, address, block = matrix.base.element_size(), matrix.base.data_ptr(), matrix.block_shape
        rows, columns = (
            max(0, min(x)) for x in zip(block, (matrix.shape[0] - row, matrix.shape[1] - column), strict=True)
        )
        starts = address + ((row + np.arange(rows)) * matrix.strides[0] + column) * item
        memory, span, agents = self.find(address), block[1] * item, np.full(block[0], agent)
        assert span in SPANS.values(), "a block is as wide as a swizzled row"
        outside = memory.places(starts, columns * item, 16)
        to = self.locate("shared", arguments[is_store], 128, active)[1][0, 0] + span * np.arange(block[0])
        inside, values = swizzle(self.shared.places(to, span), span), np.zeros((block[0], span), np.uint8)
        if is_store:
            stored = self.shared.start_product(inside, agents)[:rows, : columns * item]
            memory.start_copy(outside, agents[:rows], is_thread=False)
            self._stores[-1].append(lambda: self.shared.end_product(inside, agents))
            self._landings[-1].append(lambda: memory.end_copy(outside, agents[:rows], stored))
        else:  # an mbarrier counts the bytes
            values[:rows, : columns * item] = memory.read(outside, agents[:rows])
            self.shared.start_copy(inside, agents, is_thread=False)
            self._phases[self._mbarrier_at(arguments[2], active)].copies.append((inside, values))

    def _mbarrier_at(self, operand: str, active: Values) -> int:
        _, places = self.locate("shared", operand, 8, active)
        self.shared.read(places, self.threads[active])
        return int(places[0, 0])

    def _mbarrier(self, op: Op, arguments: Arguments, active: Values) -> None:
        if op[1] in ("init", "inval"):
            self._st(("st", "shared", "b64"), (arguments[0], "0"), active)
            place = self._mbarrier_at(arguments[0], active)
            check((place in self._phases) == (op[1] == "inval"), "change of an mbarrier in use")
            if op[1] == "init":
                self._phases[place] = Phases(int(arguments[1]), int(arguments[1]))
            else:
                check(not self._phases.pop(place).copies, "change of an mbarrier in use")
            return
        mbarrier = self._phases[self._mbarrier_at(arguments[1], active)]
        if op[1] == "arrive":
            return mbarrier.arrive(int(active.sum()), int(arguments[2]))
        assert (active is self.everyone, op[1]) == (True, "try_wait"), "all threads wait"
        while mbarrier.parity == self.value(arguments[2], "u32")[0]:
            check(len(mbarrier.copies) > 0, "wait without end")
            places, values = mbarrier.copies.pop(0)
            self.shared.end_copy(places, None, values)
            mbarrier.arrive(0, -values.size)
        return self.set(arguments[0], active, active)

    def _fence(self, op: Op, arguments: Arguments, active: Values) -> None:
        assert op[1:3] == ("proxy", "async"), op
        self.shared.by_threads[:] = False

    def _matrices(self, operand: str, count: int) -> tuple[Places, Places]:
        """The places [rows, 16] of `count` matrices of 8 rows of each warp, and the warps as agents."""
        _, places = self.locate("shared", operand, 16, self.everyone)
        places = places.reshape(-1, WARP, 16)[:, : 8 * count]
        return places.reshape(-1, 16), len(self.threads) + np.arange(len(places)).repeat(8 * count)

    def _ldmatrix(self, op: Op, arguments: Arguments, active: Values) -> None:
        assert "trans" not in op, op
        registers = split(arguments[0])
        values = self.shared.read(*self._matrices(arguments[1], len(registers))).view(np.uint32)
        for register, column in zip(registers, values.reshape(-1, len(registers), WARP).swapaxes(0, 1), strict=True):
            self.set(register, column.ravel(), active)

    def _stmatrix(self, op: Op, arguments: Arguments, active: Values) -> None:
        assert "trans" not in op, op
        values = np.stack([self.value(x, "b32").reshape(-1, WARP) for x in split(arguments[1])], 1)
        self.shared.write(*self._matrices(arguments[0], values.shape[1]), values.view(np.uint8).reshape(-1, 16))

    def _mma(self, op: Op, arguments: Arguments, active: Values) -> None:
        """[16, 16] @ [16, 8] + [16, 8] of each warp. A register of 16-bit numbers is a quarter of a [16, 16]."""
        assert op[3:6] == ("m16n8k16", "row", "col"), op
        results, *inputs = map(split, arguments)
        a, b, c = (np.stack([self.value(x, "b32").reshape(-1, 8, 4) for x in names]) for names in inputs)
        a, b = numbers(a, op), numbers(b, op).swapaxes(2, 3)
        product = a[:2] @ b[0] + a[2:] @ b[1]
        pairs = np.stack([product[..., ::2], product[..., 1::2]], 1).reshape(c.shape)
        for register, values in zip(results, (pairs + c.view(np.float32)).astype(np.float32), strict=True):
            self.set(register, values.ravel(), active)

    def _wgmma(self, op: Op, arguments: Arguments, active: Values) -> None:
        """[64, 16] @ [N, 16].T of each warpgroup, from shared memory, added to accumulators [64, N]."""
        if op[1] == "fence":
            return self.unfenced.clear()
        if self._are_grouped(self._products, op, arguments):
            return None
        registers, N = split(arguments[0]), int(re.fullmatch(r"m64n(\d+)k16", op[4])[1])  # type: ignore[index]
        assert arguments[4:] == ("1", "1", "0", "0"), "no signs, nothing transposed"
        check(not self.unfenced.intersection(registers), "no fence between a write of accumulators and their product")
        (a, reads), (b, more) = self._operand(arguments[1], 64, op), self._operand(arguments[2], N, op)
        # A thread has pairs of two halves of the 16 rows of its warp.
        product = (a @ b.swapaxes(1, 2)).reshape(-1, 4, 2, 8, N // 8, 4, 2).transpose(4, 2, 6, 0, 1, 3, 5)
        before = np.stack([self.registers[x].view(np.float32) for x in registers])
        after = product.reshape(before.shape) + np.where(self.value(arguments[3], "pred"), before, 0.0)
        self.registers.update(zip(registers, after.astype(np.float32), strict=True))
        self.in_flight.update(registers)

        def finish() -> None:
            self.in_flight.subtract(registers)
            for places, agents in reads + more:
                self.shared.end_product(places, agents)

        return self._products[-1].append(finish)

    def _operand(self, descriptors: str, rows: int, op: Op) -> tuple[Values, list[tuple[Places, Places]]]:
        """The matrices [warpgroups, rows, 16], and what reads where."""
        matrices, reads, row = [], [], np.arange(rows)
        for group, descriptor in enumerate(self.value(descriptors, "u64")[::WARPGROUP].tolist()):
            span, stride = SPANS[descriptor >> 62], (descriptor >> 32 & 0x3FFF) << 4
            starts = ((descriptor & 0x3FFF) << 4) + row // 8 * stride + row % 8 * span
            reads.append((swizzle(self.shared.places(starts, 32), span), np.full(rows, len(self.threads) + group)))
            matrices.append(self.shared.start_product(*reads[-1]))
        return numbers(np.stack(matrices), op), reads
