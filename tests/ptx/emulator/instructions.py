"""The instructions in the text of a PTX kernel, and what those without side effects compute from arrays over threads.

Approximations are off by the largest error that the PTX ISA allows them, up for some arguments and down for others. A
fused multiply-add is rounded to fp64 first, which in one of 2^29 cases gives other bits than rounding once.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Values, Op, Function = NDArray[Any], tuple[str, ...], Callable[..., NDArray[Any]]
KERNEL = re.compile(r"\.entry (\w+)\((.*?)\)\s*\.reqntid (\d+).*?^\{(.*)^\}", re.DOTALL | re.MULTILINE)
STATEMENT = re.compile(r"(?:@(!?)(%?\w+)\s+)?([\w.:]+)\s*(.*)", re.DOTALL)
ARGUMENT = re.compile(r"\[[^\]]*\]|\{[^}]*\}|[^,\s]+")  # a list in brackets or braces is one
DTYPES = {f"{x}{8 * size}": np.dtype(f"{y}{size}") for x, y in ("bu", "uu", "si") for size in (1, 2, 4, 8)}
DTYPES |= {"f32": np.dtype("f4"), "f64": np.dtype("f8"), "pred": np.dtype(bool), "bf16": np.dtype("u2")}


class Instruction(NamedTuple):
    """`@guard op[0].op[1]... arguments`, or `@!guard`. A label before it is its place among the instructions."""

    op: Op
    arguments: tuple[Any, ...]
    guard: str | None = None
    negated: bool = False
    text: str = ""


@dataclass
class Program:
    name: str
    threads: int
    parameters: list[str]
    code: list[Instruction]
    labels: dict[str, int]
    breakpoints: dict[int, Callable[[], None]] = field(default_factory=dict)  # called once, before an instruction

    def remove(self, place: int) -> None:
        """An instruction; with a wait also the branch of its loop."""
        gone = 2 if "try_wait" in self.code[place].op else 1
        self.code[place : place + gone] = [Instruction(("mov", "b32"), ("_", "0"))] * gone


@functools.cache
def split(text: str) -> list[str]:
    """The elements of "{a, b}" or "[a, {b, c}]", or "a" itself."""
    return ARGUMENT.findall(text[1:-1] if text[0] in "{[" else text)


def parse(ptx: str) -> Program:
    """The one kernel in a module of Triton's."""
    name, parameters, threads, body = KERNEL.search(ptx).groups()  # type: ignore[union-attr]
    code, labels = list[Instruction](), dict[str, int]()
    for line in (line.partition("//")[0].strip() for line in body.splitlines()):
        if line.endswith(":"):
            labels[line[:-1]] = len(code)  # inline assembly may give the same again, after its branches
            continue
        for text in filter(lambda x: x.strip("{}") and x[0] != ".", map(str.strip, line.split(";"))):
            negated, guard, op, rest = STATEMENT.fullmatch(text).groups()  # type: ignore[union-attr]
            arguments = tuple(labels.get(x, x) for x in ARGUMENT.findall(rest))
            code.append(Instruction(tuple(op.split(".")), arguments, guard, negated == "!", text))
    return Program(name, int(threads), re.findall(rf"{name}_param_\d+", parameters), code, labels)


def rounded(exact: Function, error: float = 0.5) -> Function:
    """A function in fp64, rounded to fp32, with a relative error of `error` * 2^-23; 0, 1, inf and NaN are exact."""

    def function(*inputs: Values) -> Values:
        values = exact(*(x.astype(np.float64) for x in inputs))
        hashed = values.astype(np.float32).view(np.uint32) * np.uint32(2654435761)
        off = np.copysign(np.float64(error - 0.5) * 2.0**-23, hashed.view(np.float32)) * (values != 1.0)
        return (values * (1.0 - off)).astype(np.float32)

    return function


def flushed(values: Values) -> Values:
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.float32(0.0) * values, values)


def from_bf16(bits: Values) -> Values:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(values: Values) -> Values:
    return torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def wide(x: Values) -> Values:
    return x.astype(f"{x.dtype.kind}{2 * x.itemsize}")


def permuted(x: Values, y: Values, choice: Values) -> Values:
    places = choice[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & np.uint32(15)  # from 8 on the sign is replicated
    return np.take_along_axis(np.stack([x, y], 1).view(np.uint8), places.astype(int), 1).view(np.uint32)[:, 0]


# By the start of an instruction's name; the longest counts. Shifts give 0 or the sign where PTX does. Comparisons with
# a NaN are false, and true with a "u". What is `sync` is executed by all threads.
FUNCTIONS: dict[str, Function] = {
    **{"mov": np.copy, "cvta": np.copy, "abs": np.abs, "neg": np.negative, "not": np.invert, "and": np.bitwise_and},
    **{"or": np.bitwise_or, "xor": np.bitwise_xor, "shl": np.left_shift, "shr": np.right_shift, "prmt": permuted},
    "bfe": lambda x, start, length: x << (top := 8 * x.itemsize - length) - start >> top,
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "mul.lo": np.multiply, "div.rn": rounded(np.divide)},
    **{"max": np.fmax, "min": np.fmin, "max.NaN": np.maximum, "min.NaN": np.minimum},
    **{"mul.wide": lambda x, y: wide(x) * wide(y), "mad.wide": lambda x, y, z: wide(x) * wide(y) + z},
    **{"mad.lo": lambda x, y, z: x * y + z, "fma": lambda x, y, z: (wide(x) * y + z).astype(x.dtype)},
    **{"div.s32": lambda x, y: np.trunc(x / y).astype(x.dtype), "selp": lambda x, y, choice: np.where(choice, x, y)},
    **{"setp.eq": np.equal, "setp.lt": np.less, "setp.le": np.less_equal, "setp.gt": np.greater},
    **{"setp.ge": np.greater_equal, "setp.ne": lambda x, y: (x < y) | (x > y), "setp.neu": np.not_equal},
    **{"setp.ltu": lambda x, y: ~(x >= y), "setp.leu": lambda x, y: ~(x > y), "setp.gtu": lambda x, y: ~(x <= y)},
    **{"setp.geu": lambda x, y: ~(x < y), "setp.equ": lambda x, y: ~((x < y) | (x > y))},
    **{"setp.nan": lambda x, y: (x != x) | (y != y), "setp.num": lambda x, y: (x == x) & (y == y)},
    **{"div.full": rounded(np.divide, 2.0), "ex2.approx": rounded(np.exp2, 2.0), "lg2.approx": rounded(np.log2, 2.0)},
    **{"rcp.approx": rounded(np.reciprocal, 1.0), "rsqrt.approx": rounded(lambda x: x**-0.5, 1.1)},
    **{"tanh.approx": rounded(np.tanh, 4096.0), "cvt.rn.bf16": to_bf16, "cvt.f32.bf16": from_bf16},
    "cvt.rn.bf16x2": lambda x, y: to_bf16(x).astype(np.uint32) << np.uint32(16) | to_bf16(y),
    "shfl.sync.bfly": lambda x, mask, *_: x[np.arange(len(x)) ^ mask],
    "shfl.sync.idx": lambda x, lane, *_: x[np.arange(len(x)) // 32 * 32 + lane % 32],
    "redux.sync.max": lambda x, _: x.reshape(-1, 32).max(1).repeat(32),
}


@functools.cache
def function_of(op: Op) -> tuple[Function, list[str]]:
    """The function of an instruction, and the types of its inputs, most of which have the one that it names."""
    if "ftz" in op:
        function, kinds = function_of(tuple(part for part in op if part != "ftz"))
        return lambda *inputs: flushed(function(*map(flushed, inputs))), kinds
    kinds = [op[-1]] * 4
    if op[0] == "selp" or op[:2] == ("mad", "wide"):
        kinds[2] = "pred" if op[0] == "selp" else f"{op[-1][0]}{2 * int(op[-1][1:])}"
    for end in range(len(op), 0, -1):
        if function := FUNCTIONS.get(".".join(op[:end])):
            assert set(op[end:-1]) <= {"rn", "approx", "param"}, op
            return function, kinds
    assert (op[0], op[-1] == "bf16", set(op[1:-2]) <= {"rn"}) == ("cvt", False, True), op
    return lambda x: x.astype(DTYPES[op[-2]]), kinds
