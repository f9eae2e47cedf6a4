"""Compile every kernel for every architecture, exactly as its launcher would launch it, without a GPU.

Run as a script in a process without TRITON_INTERPRET: `compile_all.py quick|usual|every [architecture ...]`. The
launchers are called with meta tensors while `JITFunction.run` records what they would launch, and Triton's own binder
turns that into a specialisation, so what is compiled here cannot drift from what ships. Prints one JSON object per
kernel: what it was compiled for, the bytes of shared memory and of stack (spilled registers) it takes, its registers,
its barriers, its Hopper matrix instructions, its sums and products that may be fused, and whether it computes in fp64.
Of two kernels also, for each logit, the instructions of the shortest way through the loop over tiles: one that holds
neither a target nor the end of the row. Of the GEMM it is what follows the products. Of the pass over rows there are
the barriers on that way, too.
"""

import functools
import heapq
import itertools
import json
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, compute_cache_key, create_function_from_signature

from fused_grpo import kernels
from fused_grpo.kernels import _device, tuning

CAPABILITIES = (75, 80, 86, 89, 90, 100, 103, 110, 120, 121)
TARGETS = {f"sm_{number}": GPUTarget("cuda", number, 32) for number in CAPABILITIES}
TARGETS["gfx942"] = GPUTarget("hip", "gfx942", 64)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Descriptors can carry an "aligned" weight in 16 bits. The rows of an "odd" one start anywhere, and "columns" has its
# columns where rows should be: those only pointers can read.
EVERY = tuple(itertools.product(DTYPES, ("none", "all"), ("aligned", "odd", "columns")))
# What most train in, with the registers of every option, and with the instructions of none.
QUICK = (("bfloat16", "all", "aligned"), ("bfloat16", "none", "aligned"))
# What differs in kind: fp16 takes the registers of bf16, and no option those of every option.
USUAL = (
    ("bfloat16", "none", "aligned"),
    ("bfloat16", "all", "aligned"),
    ("bfloat16", "all", "odd"),
    ("float16", "all", "aligned"),
    ("float32", "all", "aligned"),
)
POINTERS_BESIDE_TMA = ("bfloat16", "none", "odd"), ("float16", "all", "columns")
# Whose listings tests read.
DISASSEMBLED = ("_logprob_forward_kernel", "_softmax_weights_forward_kernel", "_softmax_weights_kernel")
BARRIER = re.compile(r"\b(?:ttg|gpu)\.barrier\b")  # Triton 3.6 says gpu
# "dppo_tv", "ipo" and "gmpo" have no instruction that the others lack.
FORMS = ("clipped", "cispo", "sapo", "reinforce", "dppo_kl")
GIVEN = ("old_logprobs", "ref_logprobs", "sampling_logprobs", "entropy", "entropy_weights", "policy_weights")
GIVEN += ("kl_cov_weights",)
Launch = tuple[JITFunction, tuple[Any, ...], dict[str, Any]]


def record_launches(call: Callable[[], None], arch: str) -> list[Launch]:
    """What the launchers that `call` calls would run on `arch`."""
    launches: list[Launch] = []

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append((self, args, kwargs))

    original, JITFunction.run = JITFunction.run, record
    tuning.architecture = lambda device: _device.FAMILY.get(arch, arch)
    _device._check_device = lambda device: None  # the tensors are of no GPU
    try:
        call()
    finally:
        JITFunction.run = original
    return launches


def call_head(dtype: torch.dtype, layout: str, *, full: bool) -> None:
    N, D, V = 512, 4095 if layout == "odd" else 4096, 151936
    with torch.device("meta"):
        hidden, row, targets = torch.empty(N, D, dtype=dtype), torch.empty(N), torch.empty(N, dtype=torch.int64)
        weight = torch.empty(D, V, dtype=dtype).T if layout == "columns" else torch.empty(V, D, dtype=dtype)
        options = {"bias": torch.empty(V, dtype=dtype), "softcap": 30.0} if full else {}
    kernels.logprob_forward(hidden, weight, targets, temperature=row, entropy=full, **options)
    if dtype == torch.bfloat16 and layout == "aligned" and tuning.architecture(hidden.device) in tuning.WEIGHTS:
        out = kernels.empty_tile(N, V, dtype=dtype, device=hidden.device)
        kernels.softmax_weights_forward(hidden, weight, targets, out=out, temperature=row, entropy=full, **options)


def call_divergence(dtype: torch.dtype, *, full: bool) -> None:
    N, V = 512, 151936
    with torch.device("meta"):
        logits, row, bias = (torch.empty(*shape) for shape in ((N, V), (N,), (V,)))
        given = {"targets": torch.empty(N, dtype=torch.int64), "grad_logprobs": row} if full else {}
    head = {"temperature": row} | ({"bias": bias.to(dtype), "softcap": 30.0} if full else {})
    heads = {"student_head": head, "teacher_head": head}
    for kind in ("reverse_kl", "forward_kl", "jsd"):
        given |= {"kind": kind, "beta": 0.5, "upstream": row, "dtype": dtype}
        kernels.divergence_gradient_(logits, torch.empty_like(logits), **heads, **given)


def call_passes(dtype: torch.dtype, *, full: bool) -> None:
    N, V = 512, 151936
    with torch.device("meta"):
        logits, row, bias = torch.empty(N, V), torch.empty(N), torch.empty(V, dtype=dtype)
        targets, mask = torch.empty(N, dtype=torch.int64), torch.empty(N, dtype=torch.bool)
    head = {"temperature": row} | ({"bias": bias, "softcap": 30.0} if full else {})
    kernels.row_statistics(logits, targets, entropy=full, moments=lambda fields, columns: None, **head)
    optional = row if full else None
    state, hidden = (row, optional, row, row), torch.empty(N, 4096, dtype=dtype, device="meta")
    upstream = {"grad_logprobs": row, "grad_entropy": optional, "dtype": dtype}
    kernels.logits_gradient_(logits, targets, statistics=state, **upstream, **head)
    for statistics in (None, state):
        kernels.softmax_weights_(logits, targets, statistics=statistics, entropy=full, dtype=dtype, **head)
    kernels.clean_targets(targets, ignore_index=-100, vocab_size=V)
    kernels.scale_hidden(hidden, row, row)
    kernels.scale_(hidden, row[0])
    given = dict.fromkeys(GIVEN, optional) | {"advantages": row, "weights": row, "mask": mask}
    for form in FORMS:
        correction = "sampler" if form.startswith("dppo") else "truncate"
        terms = (form, 0.2, 0.2, 2.0, (1.0, 1.05), 0.1, "k3", full, correction if full else None, 0.5, 3.0, 0.1 * full)
        sums = kernels.grpo_token_loss(row, log_ratio=optional, inputs=given, terms=terms)[2]
    kernels.token_statistics([sums, sums])


def call_support(dtype: torch.dtype, layout: str, *, full: bool) -> None:
    """With `full` a weight in fp32, and sums that are added to what is there."""
    N, D, V, E = 512, 4095 if layout == "odd" else 4096, 151936, 10240
    with torch.device("meta"):
        hidden, factors, numbers = torch.empty(N, D, dtype=dtype), torch.empty(E), torch.empty(E, dtype=torch.int64)
        weight = torch.empty(V, D, dtype=torch.float32 if full else dtype)
    kernels.entry_logits(hidden, weight, numbers, numbers, dtype=torch.float32)
    places, offsets = numbers[:N], numbers[: N + 1]
    kernels.weighted_rows_(hidden, places, offsets, numbers, factors, weight, cast=dtype, accumulate=full)
    kernels.weighted_rows_(weight, places, offsets, numbers, factors, hidden, cast=dtype, accumulate=full)


def specialise(launch: Launch, arch: str) -> tuple[ASTSource, dict[str, Any], str]:
    """What Triton would compile for this launch, its options, and the key under which it would look for it first."""
    fn, args, kwargs = launch
    backend = make_backend(TARGETS[arch])
    binder = create_function_from_signature(fn.signature, fn.params, backend)
    bound, specialization, given = binder(*args, **kwargs, debug=False)
    key = compute_cache_key({}, specialization, given)
    options, signature, constants, attributes = fn._pack_args(backend, kwargs, bound, specialization, given)
    return ASTSource(fn, signature, constants, attributes), options.__dict__, key


def measure(launch: Launch, arch: str) -> dict[str, Any]:
    source, options, _ = specialise(launch, arch)
    compiled = triton.compile(source, target=TARGETS[arch], options=options)
    facts: dict[str, Any] = {
        "in_place": any(source.signature.get(name, "constexpr") != "constexpr" for name in ("weights", "gradient")),
        "shared": compiled.metadata.shared,
        "barriers": len(BARRIER.findall(compiled.asm["ttgir"])),
        "loads": "tma" if "tensordesc" in str(source.signature) else "pointers",
    }
    if arch.startswith("gfx"):
        listing = compiled.asm["amdgcn"]
        # Scalar registers are spilled to lanes of vector registers; what goes to memory makes the segment grow.
        keys = ("vgpr_count", "private_segment_fixed_size", "vgpr_spill_count")
        registers, *spilled = (int(re.search(rf"\.{key}:\s*(\d+)", listing)[1]) for key in keys)
        return facts | {"reg": registers, "stack": sum(spilled), "hgmma": []}
    usage = said_of(compiled.asm["cubin"], "cuobjdump", "--dump-resource-usage")
    facts |= {"hgmma": [], "fp64": ".f64" in compiled.asm["ptx"]}
    # Without a rounding mode: those that a compiler may fuse.
    facts["fusible"] = len(re.findall(r"\b(?:add|sub|mul)\.(?:ftz\.)?f32", compiled.asm["ptx"]))
    if source.fn.__name__ in DISASSEMBLED:
        facts["code"] = code_of(compiled.asm["cubin"])
    return facts | {key.lower(): int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK")}


def code_of(cubin: bytes) -> bytes:
    """Of its one kernel: the section .text.* of this ELF file."""
    (table,), (count, names) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<HH", cubin, 60)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + 64 * number) for number in range(count)]
    named = [(cubin[sections[names][4] + name :], start, size) for name, _, _, _, start, size in sections]
    (code,) = (cubin[start : start + size] for name, start, size in named if name.startswith(b".text."))
    return code


def add_instructions(arch: str, built: list[tuple[Launch, dict[str, Any]]]) -> None:
    """What the listing of each "code" says. One of all of them: the disassembler takes half a second to start."""
    number = arch.removeprefix("sm_")
    suffix = "a" if int(number) >= 90 else ""
    said = said_of(b"".join(facts["code"] for _, facts in built), "nvdisasm", "--binary", f"SM{number}{suffix}")
    code = [(int(place, 16), text) for place, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);", said)]
    end = 0
    for (_, _, options), facts in built:
        start, end = end, end + len(facts.pop("code"))
        own = [(place, text) for place, text in code if start <= place < end]
        assert own, f"no listing of {len(built)} kernels for {arch}"
        facts["hgmma"] = sorted({instruction for _, text in own for instruction in re.findall(r"HGMMA\.[\w.]+", text)})
        if loop := shortest_loop(own):
            rows, (instructions, barriers) = options.get("BLOCK_N", 1), loop
            facts["per_logit"] = round(32 * options["num_warps"] * instructions / (rows * options["BLOCK_V"]), 1)
            facts |= {"per_tile": barriers} if rows == 1 else {}


def shortest_loop(code: list[tuple[int, str]]) -> tuple[int, int] | None:
    """(instructions, barriers) of the shortest way through the longest loop, after the loop over products that may be
    in it; None without tensor cores, whose products are scattered over a loop of thousands of instructions."""
    at = {place: number for number, (place, _) in enumerate(code)}
    jumps = {}
    for number, (_, text) in enumerate(code):
        if (match := re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)) and int(match[1], 16) in at:
            jumps[number] = at[int(match[1], 16)]
    # What follows the last exit is run by few or none, such as a branch for warps that have diverged.
    end_of_path = max(number for number, (_, text) in enumerate(code) if "EXIT" in text)
    loops = [(to, number) for number, to in jumps.items() if to < number < end_of_path]
    first, last = max(loops, key=lambda x: x[1] - x[0])
    for start, end in loops:
        if first < start and end < last and any("MMA" in text for _, text in code[start:end]):
            first = end + 1
    ways, visited = [(1, first, int("BAR" in code[first][1]))], set()
    while ways:
        length, here, barriers = heapq.heappop(ways)
        if here == last:
            return length, barriers
        if here in visited:
            continue
        visited.add(here)
        onward = [jumps[here]] if here in jumps else []
        if here not in jumps or code[here][1].startswith(("@", "BRA.DIV")):
            onward.append(here + 1)
        for there in onward:
            if first <= there <= last:
                heapq.heappush(ways, (length + 1, there, barriers + ("BAR" in code[there][1])))
    return None


def said_of(content: bytes, tool: str, *options: str) -> str:
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        command = [TOOLS / tool, *options, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def jobs(arch: str, which: str) -> Iterator[tuple[dict[str, Any], Launch]]:
    """(what it is, the launch) of every kernel in the cases to compile."""
    usual = USUAL + (POINTERS_BESIDE_TMA if _device.FAMILY.get(arch, arch) in tuning.ALIGNED else ())
    for name, options, layout in {"quick": QUICK, "usual": usual, "every": EVERY}[which]:
        if arch == "sm_75" and name == "bfloat16":  # which fused_grpo refuses there
            continue
        facts = {"arch": arch, "dtype": name, "options": options, "layout": layout}
        dtype, full = DTYPES[name], options == "all"
        calls = [functools.partial(call_head, dtype, layout, full=full)]
        if layout == "aligned":
            calls += [functools.partial(call, dtype, full=full) for call in (call_passes, call_divergence)]
        if layout != "columns":
            calls.append(functools.partial(call_support, dtype, layout, full=full))
        for call in calls:
            yield from ((facts, launch) for launch in record_launches(call, arch))


def main(which: str, *arches: str) -> None:
    for arch in arches or TARGETS:
        measured: dict[tuple[str, str], tuple[Launch, dict[str, Any]]] = {}
        compiled = list[tuple[dict[str, Any], tuple[str, str]]]()
        for facts, launch in jobs(arch, which):
            compiled.append((facts, (launch[0].__name__, specialise(launch, arch)[2])))
            if compiled[-1][1] not in measured:
                measured[compiled[-1][1]] = launch, measure(launch, arch)
        if listed := [each for each in measured.values() if "code" in each[1]]:
            add_instructions(arch, listed)
        for facts, key in compiled:
            print(json.dumps(facts | {"name": key[0]} | measured[key][1]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
