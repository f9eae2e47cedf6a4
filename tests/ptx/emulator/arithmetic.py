"""What instructions compute from the bits of registers, [threads] each.

Approximations are off by the largest error that the PTX ISA allows them, up for some arguments and down for others. A
fused multiply-add is rounded to fp64 first, which in one of 2^29 cases gives other bits than rounding once.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Values = NDArray[Any]
Op = tuple[str, ...]
DTYPES = {f"{x}{8 * size}": np.dtype(f"{y}{size}") for x, y in ("bu", "uu", "si") for size in (1, 2, 4, 8)}
DTYPES |= {"f32": np.dtype("f4"), "f64": np.dtype("f8"), "pred": np.dtype(bool)}
NUMPY = "abs:absolute add:add and:bitwise_and cvta:copy mov:copy neg:negative not:invert or:bitwise_or sub:subtract"
NUMPY += " xor:bitwise_xor eq:equal ge:greater_equal gt:greater le:less_equal lt:less ne:not_equal"
FUNCTIONS: dict[str, Callable[..., Values]] = {x: getattr(np, y) for x, y in (z.split(":") for z in NUMPY.split())}
# In fp64, and the relative error in units of 2^-23, of which rounding takes half a unit.
INEXACT = {"div": (np.divide, 2.0), "ex2": (np.exp2, 2.0), "lg2": (np.log2, 2.0), "rcp": (np.reciprocal, 1.0)}
INEXACT |= {"rsqrt": (lambda x: x**-0.5, 1.1), "tanh": (np.tanh, 4096.0)}


def approximate(exact: Values, error: float) -> Values:
    """fp64 values with that relative error, rounded to fp32; 0, 1, inf and NaN are exact."""
    hashed = exact.astype(np.float32).view(np.uint32) * np.uint32(2654435761)
    sign = np.where(hashed >> np.uint32(31), 1.0, -1.0) * (exact != 1.0)
    return (exact * (1.0 + error * sign)).astype(np.float32)


def flushed(values: Values) -> Values:
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.float32(0.0) * values, values)


def from_bf16(bits: Values) -> Values:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(values: Values) -> Values:
    return torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def operand_types(op: Op, count: int) -> list[str]:
    """Of the inputs; an instruction names one type."""
    types = [op[-1]] * count
    if op[0] in ("shl", "shr", "bfe"):
        types[1:] = ["u32"] * (count - 1)
    elif op[0] == "selp":
        types[2] = "pred"
    elif op[:2] == ("mad", "wide"):
        types[2] = f"{op[-1][0]}{2 * int(op[-1][1:])}"
    return ["b16"] if op[0] == "cvt" and op[-1] == "bf16" else types


def compute(op: Op, *inputs: Values) -> Values:
    """The result of an instruction without side effects."""
    if "ftz" in op:
        return flushed(compute(tuple(part for part in op if part != "ftz"), *map(flushed, inputs)))
    name, kind, x, (y, z) = op[0], op[-1], inputs[0], (*inputs[1:], None, None)[:2]
    width, is_float = 8 * x.itemsize, kind[0] == "f"
    if name in ("mul", "mad", "fma"):
        wide = x.astype(f"{x.dtype.kind}8") if op[1] == "wide" or name == "fma" else x
        assert is_float or op[1] in ("wide", "lo"), op
        out = wide * y if z is None else wide * y + z
        return out.astype(x.dtype if is_float else f"{x.dtype.kind}{x.itemsize * (1 + (op[1] == 'wide'))}")
    if name == "div" and not is_float:
        return np.trunc(x.astype(np.float64) / y).astype(x.dtype)  # exact for 32 bits
    if name in INEXACT:
        function, error = INEXACT[name]
        exact = function(*(value.astype(np.float64) for value in inputs))
        return approximate(exact, 0.0 if "rn" in op else (error - 0.5) * 2.0**-23)
    if name == "cvt":
        assert set(op[1:-2]) <= {"rn"}, op
        if op[-2] == "bf16x2":
            return to_bf16(x).astype(np.uint32) << np.uint32(16) | to_bf16(y)
        return to_bf16(x) if op[-2] == "bf16" else (from_bf16(x) if kind == "bf16" else x).astype(DTYPES[op[-2]])
    if name == "setp":  # "ltu" is true for NaN
        unordered = (x != x) | (y != y)
        if op[1] in ("nan", "num"):
            return unordered == (op[1] == "nan")
        return np.where(unordered, len(op[1]) == 3, FUNCTIONS[op[1][:2]](x, y))
    if name in ("shl", "shr"):  # past the width 0 comes out, or the sign
        amount = np.minimum(y, width - 1).astype(x.dtype)
        out = x << amount if name == "shl" else x >> amount
        return np.where((y < width) | ((name == "shr") & (kind[0] == "s")), out, 0).astype(x.dtype)
    if name == "bfe":
        top = (width - z.astype(np.int64)).astype(x.dtype)
        return x << (top - y.astype(x.dtype)) >> top  # with the sign, for signed types
    if name == "prmt":
        places = z[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & np.uint32(15)
        assert (places < 8).all(), "no replication of signs"
        return np.take_along_axis(np.stack([x, y], 1).view(np.uint8), places.astype(int), 1).view(np.uint32)[:, 0]
    if name in ("max", "min"):
        return getattr(np, f"{name}imum" if "NaN" in op or not is_float else f"f{name}")(x, y)
    return np.where(z, x, y) if name == "selp" else FUNCTIONS[name](*inputs)
