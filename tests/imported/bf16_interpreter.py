"""Triton's interpreter with bf16. Without this its products of bf16 numbers are garbage: NumPy has no bf16, so that the
interpreter keeps the 16 bits as integers, and these are what it multiplies. It also truncates where a GPU rounds.

A sum or a comparison of blocks in bf16 would still be one of integers. Kernels compute in fp32.
"""

import functools
from typing import Any


def mend_bf16() -> None:
    """From here on, in this process: products of what the bits stand for, conversions to the nearest, ties to even."""
    try:
        import numpy
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    builder, Handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    cast, dot = builder.cast_impl, builder.create_dot

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return Handle((x.data.astype(numpy.uint32) << 16).view(numpy.float32), tl.float32)

    def narrowed(x: Any) -> Any:
        bits = x.data.view(numpy.uint32)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return Handle(numpy.where(numpy.isnan(x.data), 0x7FFF, nearest).astype(numpy.uint16), tl.bfloat16)

    @functools.wraps(cast)
    def mended_cast(self: Any, src: Any, dst_type: Any) -> Any:
        if dst_type.scalar != tl.bfloat16:
            return cast(self, widened(src), dst_type)
        return narrowed(cast(self, widened(src), tl.float32))

    @functools.wraps(dot)
    def mended_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return dot(self, widened(a), widened(b), *others)

    builder.cast_impl, builder.create_dot = mended_cast, mended_dot
