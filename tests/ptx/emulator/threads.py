"""The threads of a block. Those that are at one place run an instruction at once; a register is an array over them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .arithmetic import DTYPES, Op, Values, compute, operand_types
from .memory import Clock, Fault, Memory, Places, check
from .program import Instruction, Program, split

WARP, LIMIT = 32, 1_000_000  # instructions of a block
Arguments = tuple[str, ...]


@dataclass
class Threads:
    """A method `_ld` is the instruction ld, for the `active` threads."""

    program: Program
    arguments: dict[str, Any]  # the bytes of parameters
    index: tuple[int, int, int]
    grid: tuple[int, int, int]
    shared_bytes: int
    find: Callable[[int], Memory]  # the memory at an address
    clock: Clock

    def __post_init__(self) -> None:
        self.threads, self.everyone = np.arange(self.program.threads), np.ones(self.program.threads, bool)
        self.shared = Memory(np.zeros(self.shared_bytes, np.uint8), self.clock, written=False)
        self.registers: dict[str, Values] = {"%tid.x": self.threads.astype(np.uint32)}
        for name, values in {"%ctaid": self.index, "%nctaid": self.grid}.items():
            for axis, value in zip("xyz", values, strict=True):
                self.registers[f"{name}.{axis}"] = np.full(len(self.threads), value, np.uint32)
        self.in_flight = Counter[str]()  # registers that products change
        self.unfenced: set[str] = set()  # registers that were written after the last wgmma.fence

    def run(self) -> None:
        self.clock.epoch += 1
        self.clock.start_of_block = self.clock.epoch
        ready = {0: self.everyone}  # threads by the place of their next instruction
        for _ in range(LIMIT):
            place = min(ready)  # those behind go on first, so branches join
            instruction = self.program.code[place]
            try:
                onward = self._step(instruction, place, ready.pop(place))
            except Fault as fault:
                raise Fault(f"{fault}: {self.program.name}: {instruction.text}") from None
            for to, threads in onward.items():
                ready[to] = self._joined(threads, ready.get(to, threads))
            if not ready:
                return
        raise Fault(f"no end: {self.program.name}")

    def _joined(self, *masks: Values) -> Values:
        """Of threads; `everyone` itself if it is all of them."""
        if masks[0] is self.everyone or (joined := masks[0] | masks[-1]).all():
            return self.everyone
        return joined

    def _step(self, instruction: Instruction, place: int, running: Values) -> dict[int, Values]:
        """Execute; where threads go on."""
        op, arguments, active = instruction.op, instruction.arguments, running
        if instruction.guard is not None:
            guard = (self.value(instruction.guard, "pred") ^ instruction.negated) & running
            active = self._joined(guard)
        if op[0] in ("bra", "ret"):
            jumps = {self.program.labels[arguments[0]]: active} if op[0] == "bra" else {}
            return {to: x for to, x in (jumps | {place + 1: running & ~active}).items() if x.any()}
        if active is self.everyone or active.any():
            if special := getattr(self, f"_{op[0]}", None):
                special(op, arguments, active)
            else:
                inputs = map(self.value, arguments[1:], operand_types(op, len(arguments) - 1))
                self.set(arguments[0], compute(op, *inputs), active)
        return {place + 1: running}

    def value(self, operand: str, kind: str) -> Values:
        """[threads] of the type that an instruction gives an operand: a register or an immediate."""
        dtype = DTYPES[kind]
        check(not self.in_flight.get(operand), "read of a register that a product in flight changes")
        if (bits := self.registers.get(operand)) is not None:
            same = bits.itemsize == dtype.itemsize
            return bits.view(dtype) if same else bits.astype(f"u{dtype.itemsize}").view(dtype)
        check(operand[0] != "%", "read of a register that was never written")
        if operand in self.arguments:  # the address of a tensor descriptor
            operand = str(self.program.parameters.index(operand))
        is_float = operand.startswith(("0f", "0d"))
        number = int(operand[2:], 16) if is_float else int(operand.replace("global_smem", "0").rstrip("U"), 0)
        return np.full(len(self.threads), number % (1 << 8 * dtype.itemsize), f"u{dtype.itemsize}").view(dtype)

    def set(self, register: str, values: Values, active: Values) -> None:
        check(not self.in_flight.get(register), "write of a register that a product in flight changes")
        self.unfenced.add(register)
        if active is not self.everyone:
            values = np.where(active, values, self.registers.get(register, np.zeros_like(values)).view(values.dtype))
        self.registers[register] = np.ascontiguousarray(values)

    def locate(self, space: str, operand: str, width: int, active: Values) -> tuple[Memory, Places]:
        """The memory, and the places [threads, width] of aligned accesses of active threads at "[%r1 + 16]"."""
        (base, *plus), is_shared = operand.strip("[] ").split("+"), space.startswith("shared")
        addresses = self.value(base.strip(), "u32" if is_shared else "u64")[active].astype(np.int64)
        addresses += int(*plus or "0")
        memory = self.shared if is_shared else self.find(int(addresses[0]))
        return memory, memory.places(addresses, width, width)

    def _ld(self, op: Op, arguments: Arguments, active: Values) -> None:
        registers, dtype = split(arguments[0]), DTYPES[op[-1]]
        if op[1] == "param":
            values = np.frombuffer(self.arguments[arguments[1][1:-1]][: dtype.itemsize], dtype)[None]
            values = values.repeat(len(active), 0)
        else:
            memory, places = self.locate(op[1], arguments[1], dtype.itemsize * len(registers), active)
            values = memory.read(places, self.threads[active]).view(f"u{dtype.itemsize}")
        for register, column in zip(registers, values.T, strict=True):
            out = np.zeros(len(active), f"u{max(2, dtype.itemsize)}")  # no register has 8 bits
            out[active] = column
            self.set(register, out, active)

    def _st(self, op: Op, arguments: Arguments, active: Values) -> None:
        values = np.stack([self.value(x, op[-1])[active] for x in split(arguments[1])], 1).view(np.uint8)
        memory, places = self.locate(op[1], arguments[0], values.shape[1], active)
        memory.write(places, self.threads[active], values)

    def _mov(self, op: Op, arguments: Arguments, active: Values) -> None:
        """Also between a register and its parts, "{low, high}"."""
        to, of = map(split, arguments)
        kind = op[1] if len(of) == 1 else f"b{int(op[1][1:]) // len(of)}"
        values = np.stack([self.value(x, kind) for x in of], 1)
        if len(to) + len(of) > 2:
            values = values.view(f"u{DTYPES[op[1]].itemsize // len(to)}")
        for register, column in zip(to, values.T, strict=True):
            if register != "_":
                self.set(register, column, active)

    def _shfl(self, op: Op, arguments: Arguments, active: Values) -> None:
        assert (active is self.everyone, arguments[3:]) == (True, ("31", "-1")), "by all lanes of a warp"
        lanes, operand = self.threads % WARP, self.value(arguments[2], "u32")
        source = {"bfly": lanes ^ operand, "idx": operand % WARP}[op[2]]
        self.set(arguments[0], self.value(arguments[1], op[-1])[self.threads - lanes + source], active)

    def _redux(self, op: Op, arguments: Arguments, active: Values) -> None:
        reduced = getattr(np, op[2])(self.value(arguments[1], op[-1]).reshape(-1, WARP), axis=1)
        self.set(arguments[0], np.repeat(reduced, WARP), active)

    def _elect(self, op: Op, arguments: Arguments, active: Values) -> None:
        """The device chooses a lane: here not the first, which a program that tests %tid.x would choose."""
        self.set(arguments[0].split("|")[1], self.threads % WARP == WARP - 1, active)

    def _bar(self, op: Op, arguments: Arguments, active: Values) -> None:
        assert (op[1:], arguments) == (("sync",), ("0",)), op
        check(active is self.everyone, "barrier of some threads of a block")
        self.clock.epoch += 1
