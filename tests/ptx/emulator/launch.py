"""Launchers of kernels on CPU tensors; what they launch is compiled to PTX and emulated."""

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction

from fused_grpo.kernels import _device, tuning

from .block import Block
from .instructions import Program, parse
from .memory import Clock, Memory, check

sys.path.append(str(Path(__file__).parents[2] / "kernels"))
from compile_all import TARGETS, specialise

ALLOCATORS = (torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")
COMPILED: dict[tuple[Any, ...], tuple[Program, int, Any]] = {}


class Emulation(ExitStack):
    """Inside, kernels run on CPU tensors as compiled for `arch`. `launched` are the programs that ran, of each name the
    first, which `prepare` may change before."""

    def __init__(self, arch: str, prepare: Callable[[Program], None] = lambda program: None) -> None:
        super().__init__()
        self._arch, self._prepare, self._clock = arch, prepare, Clock()
        self._memories: dict[int, Memory] = {}
        self._programs: dict[tuple[Any, ...], Program] = {}
        self.launched: dict[str, Program] = {}
        for owner, name, replacement in (
            (JITFunction, "run", lambda *args, **options: self._run(*args, **options)),
            (CUDABackend, "make_cubin", lambda *args: b""),  # half of the time of compiling
            (tuning, "architecture", lambda device: arch),
            (_device, "_check_device", lambda device: None),
            *((owner, name, self._unwritten(getattr(owner, name))) for owner, name in ALLOCATORS),
        ):
            self.enter_context(mock.patch.object(owner, name, replacement))

    def _unwritten(self, allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocated(*args: Any, **options: Any) -> Tensor:
            self._memory(tensor := allocate(*args, **options), written=False)
            return tensor

        return allocated

    def _run(self, function: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """In place of JITFunction.run."""
        source, compiler_options, name = specialise((function, args, options), self._arch)
        key = function, self._arch, name
        if key not in COMPILED:
            compiled = triton.compile(source, target=TARGETS[self._arch], options=compiler_options)
            COMPILED[key] = parse(compiled.asm["ptx"]), compiled.metadata.shared, source.signature
        program, shared_bytes, signature = COMPILED[key]
        if key not in self._programs:
            self._programs[key] = replace(program, code=[*program.code], breakpoints={})
            if program.name not in self.launched:
                self._prepare(self.launched.setdefault(program.name, self._programs[key]))
        values = [x for part in zip(signature.values(), args) for x in self._parameters(*part)]  # noqa: B905
        values += [bytes(8)] * (len(program.parameters) - len(values))  # scratch memory of Triton's, of no bytes
        parameters = dict(zip(program.parameters, values, strict=True))
        self._clock.now = 0
        for memory in self._memories.values():
            memory.start_launch()
        grid = (*grid, 1, 1)[:3]
        places = {f"%nctaid.{x}": count for x, count in zip("xyz", grid, strict=True)}
        with np.errstate(all="ignore"):
            for index in itertools.product(*map(range, grid)):
                places |= {f"%ctaid.{x}": place for x, place in zip("xyz", index, strict=True)}
                Block(self._programs[key], parameters, places, shared_bytes, self._find, self._clock).run()

    def _parameters(self, kind: Any, value: Any) -> Iterator[Any]:
        """Of the kernel for an argument of its function."""
        if isinstance(kind, tuple):
            for part in zip(kind, value, strict=True):
                yield from self._parameters(*part)
        elif kind.startswith("tensordesc"):
            self._memory(value.base)
            yield from (value, *[b""] * 4)  # its shape and strides, which the descriptor has, too
        elif kind != "constexpr":
            if isinstance(value, Tensor):
                value = self._memory(value) and value.data_ptr()
            yield np.array(value, f"f{int(kind[2:]) // 8}" if kind.startswith("fp") else np.int64).tobytes()

    def _memory(self, tensor: Tensor, *, written: bool = True) -> Memory:
        """Of the whole storage, which it keeps alive."""
        storage = tensor.untyped_storage()
        if (start := storage.data_ptr()) not in self._memories:
            data = torch.zeros(0, dtype=torch.uint8).set_(storage).numpy()
            self._memories[start] = Memory(data, self._clock, base=start, written=written)
        return self._memories[start]

    def _find(self, address: int) -> Memory:
        memories = [x for x in self._memories.values() if x.base <= address < x.end]
        check(len(memories) == 1, "access of no tensor")
        return memories[0]
