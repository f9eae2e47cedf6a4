"""Compile every kernel for every architecture, exactly as its launcher would launch it, without a GPU.

Run as a script in a process without TRITON_INTERPRET. The launchers are called with meta tensors while
`JITFunction.run` records what they would launch (arguments, constants, warps, stages), so what is compiled here cannot
drift from what ships. Prints one JSON object per kernel: its name, arch and dtype, the bytes of shared memory and of
stack (spilled registers) it takes, and its barriers.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from fused_grpo import kernels
from fused_grpo.kernels import tuning

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
Launch = tuple[JITFunction, dict[str, Any], dict[str, int]]


def record_launches(arch: str, dtype: torch.dtype, *, full: bool) -> list[Launch]:
    """What the launchers would run on `arch`, with every option on or none."""
    launches: list[Launch] = []

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {key: kwargs.pop(key) for key in kwargs.keys() - self.signature.parameters.keys()}
        launches.append((self, self.signature.bind(*args, **kwargs).arguments, options))

    original, JITFunction.run = JITFunction.run, record
    tuning.architecture = lambda device: arch
    try:
        call_launchers(dtype, full=full)
    finally:
        JITFunction.run = original
    return launches


def call_launchers(dtype: torch.dtype, *, full: bool) -> None:
    N, D, V = 512, 4096, 151936
    with torch.device("meta"):
        hidden, weight, logits = torch.empty(N, D, dtype=dtype), torch.empty(V, D, dtype=dtype), torch.empty(N, V)
        row, targets, mask = torch.empty(N), torch.empty(N, dtype=torch.int64), torch.empty(N, dtype=torch.bool)
        bias = torch.empty(V, dtype=dtype)
    head = {"temperature": row} | ({"bias": bias, "softcap": 30.0} if full else {})
    kernels.logprob_forward(hidden, weight, targets, entropy=full, **head)
    kernels.row_statistics(logits, targets, entropy=full, **head)
    optional = row if full else None
    upstream = {"grad_logprobs": row, "grad_entropy": optional, "dtype": dtype}
    kernels.logits_gradient_(logits, targets, lse=row, logprobs=row, entropy=optional, **upstream, **head)
    given = dict.fromkeys(("old_logprobs", "ref_logprobs", "sampling_logprobs", "entropy"), optional)
    config = {"epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.1, "bias_correction_kl": full}
    kernels.grpo_token_loss(row, advantages=row, weights=row, mask=mask, **given, **config)


def source_of(fn: JITFunction, arguments: dict[str, Any]) -> ASTSource:
    """The specialisation that a launch with these arguments would get: None and 1 fold, 16-byte alignment is known."""
    signature, constants, attributes = {}, {}, {}
    for index, param in enumerate(fn.params):
        value = arguments[param.name]
        is_one = type(value) is int and value == 1 and not param.do_not_specialize
        if param.is_constexpr or value is None or is_one:
            signature[param.name], constants[param.name] = "constexpr", value
            continue
        signature[param.name] = param.annotation_type or mangle_type(value)
        aligned = isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0)
        if aligned and not param.do_not_specialize:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(fn, signature, constants, attributes)


def report(launch: Launch, arch: str) -> dict[str, Any]:
    fn, arguments, options = launch
    compiled = triton.compile(source_of(fn, arguments), target=TARGETS[arch], options=options)
    facts: dict[str, Any] = {"name": fn.__name__, "arch": arch, "shared": compiled.metadata.shared}
    facts["barriers"] = compiled.asm["ttgir"].count("ttg.barrier")
    if arch.startswith("gfx"):
        spilled = re.search(r"\.vgpr_spill_count:\s*(\d+)", compiled.asm["amdgcn"])
        return facts | {"stack": int(spilled[1]) if spilled else None}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = dump("--dump-resource-usage", file.name)
        facts |= {key.lower(): int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK")}
        if fn.__name__ == "_logprob_forward_kernel" and arch == "sm_90":
            facts["hgmma"] = dump("--dump-sass", file.name).count("HGMMA")
    return facts


def dump(what: str, path: str) -> str:
    return subprocess.run([str(CUOBJDUMP), what, path], check=True, capture_output=True, text=True).stdout


def main(arches: list[str]) -> None:
    for arch in arches:
        for dtype, full in ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, True)):
            for launch in record_launches(arch, dtype, full=full):
                facts = report(launch, arch) | {"dtype": str(dtype).removeprefix("torch.")}
                print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(TARGETS))
