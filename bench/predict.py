"""Times of the GPU suite as a roofline predicts them: `python -m fused_grpo.bench.predict [--write]`.

Each implementation does its work on fake CUDA tensors (predictions/cuda_trace.py). Every operation that it launches
takes the time

    max(FLOP / (FLOP/s), bytes / (bytes/s), instructions / (instructions/s), tiles of a program * tile, launch)

and begins when the host has launched it and the operation before has ended. The host launches one after the other, and
where it waits for the device, it goes on when the device has ended. Shapes and operations are those of the code. The
rates are assumptions, which the page holds against what was published (predictions/published.py) and measured:

- **FLOP/s** of bf16 GEMMs at full size with random data, in calls of tens of ms: then the power limit sets the clock.
  On an H200 a single product runs at 783 TFLOP/s, three of them one after the other at 700. An H100 has the compute
  units of an H200.
- **bytes/s** of passes over memory that no cache holds: 75 to 90 % of the vendor's peak.
- **instructions/s** of all threads: four warps in a cycle of each multiprocessor, at the clock of the vendor's peak
  rates.
- **tile**: the least time of a program for a tile of a row. Measured on an H200 with 64 rows, 4,096 columns, 8 warps:
  47.6 us for 38 tiles. With few rows that is what a pass takes; with 512 it is no longer seen.
- **launch**: the least time of an operation.
- **host**: the time for a launch of torch, for one of a kernel in Triton with the Python around it, and for the start
  of a backward pass in the thread of autograd. The three numbers are fitted to the 18 calls with up to 1,024 tokens of
  bench/results/nvidia-h200/2026-11-27.jsonl, whose host is slow; without the third, TRL is off by 0.7 and ours by 1.3.
  Machines without a measurement have a host that takes no time.
- **TRITON_GEMM**: the share of the vendor's FLOP/s that a GEMM in Triton reaches.

The model leaves out: operations that overlap on the device; waves of tiles that fill a part of the device; GEMMs that
are too small for full speed, or short enough to run above the clock of the power limit; caches, from which small
tensors are read again; Python that launches nothing; the launches inside a sort or an index by a mask.

`--write` makes predicted.json and predictions/README.md again. It needs a CUDA build of torch, no GPU, and TRL, whose
kernels are traced as they are; `--site-packages FOLDER` is the folder where TRL is installed, if not here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fused_grpo.bench import pages
from fused_grpo.bench.heads.peers import named
from fused_grpo.bench.heads.suites import FLOOR
from fused_grpo.bench.heads.work import Batch, Gradients, Kind, Work
from fused_grpo.bench.predictions.cuda_trace import Operation, Trace, fake_gpu, fake_with_values
from fused_grpo.bench.predictions.predicted import PATH, plan_of, shape_of
from fused_grpo.bench.predictions.published import MEASURED, POINTS, Point
from fused_grpo.bench.report.gpu_results import latest, read_lines
from fused_grpo.errors import FusedGRPOError, UnavailableError

PAGE = Path(__file__).resolve().parent / "predictions" / "README.md"
GIB = 2**30
# Measured on an H200: 0.87 of the assumed FLOP/s with 8192 rows, 0.96 with 2048.
TRITON_GEMM = 0.9
TENSOR_CORES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Machine:
    """A GPU and its assumed rates."""

    name: str
    device: str
    """The beginning of its name in torch."""
    capability: tuple[int, int]
    memory: int
    flops: float
    """FLOP a second of GEMMs in 16 bits."""
    bytes_per_s: float
    instructions_per_s: float
    """Instructions a second of all threads."""
    launch_s: float = 4e-6
    tile_s: float = 1.25e-6
    # Of a host that is not known: it takes no time.
    host_torch_s: float = 0.0
    host_triton_s: float = 0.0
    host_backward_s: float = 0.0


def threads(multiprocessors: int, ghz: float) -> float:
    """Instructions a second of all threads."""
    return multiprocessors * 4 * 32 * ghz * 1e9


HOPPER: dict[str, Any] = {"capability": (9, 0), "flops": 710e12, "instructions_per_s": threads(132, 1.83)}
HOST: dict[str, Any] = {"host_torch_s": 35e-6, "host_triton_s": 160e-6, "host_backward_s": 1.05e-3}
H200 = Machine("H200", "NVIDIA H200", memory=141 * GIB, bytes_per_s=4.3e12, **HOPPER, **HOST)
H100 = Machine("H100 SXM", "NVIDIA H100 80GB", memory=80 * GIB, bytes_per_s=3.0e12, **HOPPER)
A100 = Machine("A100-80", "NVIDIA A100-SXM4-80GB", (8, 0), 80 * GIB, 250e12, 1.7e12, threads(108, 1.41))
B200 = Machine("B200", "NVIDIA B200", (10, 0), 180 * GIB, 1600e12, 7.0e12, threads(148, 1.85))
MACHINES = (H200, H100, A100, B200)

OURS = "fused-grpo"
IMPLEMENTATIONS = (FLOOR, OURS, "full logits", "TRL", "TRL divergence")
# The last two: targets per token, and kept tokens.
WORKS: tuple[tuple[Kind, Gradients, int | None, int | None], ...] = (
    ("loss", "trainable", None, None),
    ("loss", "frozen", None, None),
    ("logprobs", "trainable", None, None),
    ("logprobs", "frozen", None, None),
    ("logprobs", "no_grad", None, None),
    ("logprobs", "trainable", 8, None),
    ("divergence", "trainable", None, None),
    ("loss", "trainable", None, 20),
)
HEADS = {1024: "Qwen3-0.6B", 2048: "Qwen3-1.7B", 4096: "Qwen3-8B"}
VOCAB, SEQUENCES, DTYPE = 151936, 16, "bfloat16"
TOKENS = (64, 256, 1024, 4096, 8192, 16384, 65536)
# Tokens on machines that no measurement is expected of.
FEW_TOKENS = (1024, 8192)
# The (D, N) and the plans of which the page lists the operations.
SHOWN = (4096, 8192)
LISTED = (
    plan_of(OURS, "loss", "trainable"),
    plan_of(OURS, "logprobs", "no_grad"),
    plan_of(OURS, "divergence", "trainable"),
    plan_of(OURS, "loss", "trainable", kept=20),
)


@dataclass(frozen=True)
class Job:
    """One trace."""

    machine: Machine
    implementation: str
    kind: Kind
    gradients: Gradients
    several: int | None
    kept: int | None
    D: int
    N: int

    @property
    def plan(self) -> str:
        return plan_of(self.implementation, self.kind, self.gradients, self.several, self.kept)

    @property
    def work(self) -> Work:
        options: dict[str, Any] = {"dtype": DTYPE, "sequences": SEQUENCES, "gradients": self.gradients}
        options |= {"several": self.several, "kept": self.kept}
        return Work(kind=self.kind, head=HEADS[self.D], tokens=self.N, **options)


def seconds_of(operation: Operation, machine: Machine) -> float:
    """The time of one operation on the device.

    Raises:
        ValueError: it is a GEMM of a dtype without an assumed rate.
    """
    if operation.flops and operation.dtype not in TENSOR_CORES:
        raise ValueError(f"got a GEMM of {operation.dtype}, want one of {TENSOR_CORES}: no other rate is assumed")
    rate = machine.flops * (TRITON_GEMM if operation.triton else 1.0)
    memory_s, thread_s = operation.bytes / machine.bytes_per_s, operation.instructions / machine.instructions_per_s
    return max(operation.flops / rate, memory_s, thread_s, operation.tiles * machine.tile_s, machine.launch_s)


def seconds_of_call(trace: Trace, machine: Machine) -> float:
    """From the first launch to the end of the last operation."""
    host = device = 0.0
    for number, operation in enumerate(trace.operations):
        if number in trace.waited:
            host = max(host, device)
        host += machine.host_backward_s * trace.backwards.count(number)
        host += machine.host_triton_s if operation.triton else machine.host_torch_s
        device = max(device, host) + seconds_of(operation, machine)
    return device


def traced(job: Job) -> tuple[Trace, int]:
    """The trace of a run, and the bytes of its inputs. All tokens are scored and have a gradient."""
    implementation, work = named(job.implementation), job.work
    with fake_gpu(capability=job.machine.capability, memory=job.machine.memory):
        batch = empty_batch(work)
        if implementation.floor:  # its first run makes the memory that later runs write to
            with Trace():
                implementation.run(batch, work)
            batch.hidden.grad = batch.weight.grad = None
        with Trace() as trace:
            kept = implementation.run(batch, work)
        del kept
        return trace, sum(x.nbytes for x in batch if x is not None)


def empty_batch(work: Work) -> Batch:
    """`batch_of` without numbers, but for the targets and the mask from which the plan of kept tokens follows."""
    b, t, head = work.sequences, work.tokens // work.sequences, work.shape
    half: dict[str, Any] = {"dtype": getattr(torch, work.dtype), "device": "cuda"}
    single, ids = partial(torch.empty, device="cuda"), partial(torch.empty, dtype=torch.int64, device="cuda")
    k = () if work.several is None else (work.several,)
    vectors, matrix = (b, t, head.hidden), (head.vocab, head.hidden)
    teacher = [torch.empty(shape, **half) for shape in (vectors, matrix) if work.kind == "divergence"]
    targets, mask = ids(b, t, *k), ids(b, t)
    if work.kept is not None:
        with _disable_current_modes():
            spread, ones = (31 * torch.arange(b * t) % head.vocab).view(b, t), torch.ones(b, t, dtype=torch.int64)
        targets, mask = fake_with_values(spread), fake_with_values(ones)
    return Batch(
        torch.empty(vectors, **half, requires_grad=work.gradients != "no_grad"),
        torch.empty(matrix, **half, requires_grad=work.gradients == "trainable"),
        targets,
        mask,
        single(b),
        single(b, t),
        single(b, t, *k),
        *teacher,
    )


def predict(job: Job) -> dict[str, Any]:
    """An entry of predicted.json, without a time where memory runs out."""
    trace, inputs = traced(job)
    device = sum(seconds_of(operation, job.machine) for operation in trace.operations)
    fits = trace.peak + inputs <= job.machine.memory
    facts: dict[str, Any] = {"ms": rounded(seconds_of_call(trace, job.machine)) if fits else None}
    facts |= {"device_ms": rounded(device) if fits else None, "launches": len(trace.operations)}
    facts |= {"waits": len(trace.waits), "peak": trace.peak}
    if job.plan in LISTED and (job.D, job.N) == SHOWN and job.machine == H200:
        facts["operations"] = operations_of(trace, job.machine)
    return facts


def operations_of(trace: Trace, machine: Machine) -> list[list[Any]]:
    """[name, launches, total ms], the longest first."""
    durations: dict[str, list[float]] = {}
    for operation in trace.operations:
        durations.setdefault(operation.name, []).append(seconds_of(operation, machine))
    ordered = sorted(durations.items(), key=lambda item: -sum(item[1]))
    return [[name, len(seconds), rounded(sum(seconds))] for name, seconds in ordered]


def rounded(seconds: float) -> float:
    """Milliseconds, to three digits."""
    return float(f"{1000 * seconds:.3g}")


def jobs(names: Sequence[str] = IMPLEMENTATIONS) -> list[Job]:
    """The traces of these implementations, in the order of the file: of each the works for which it has an op.

    Raises:
        UnavailableError: one of them is not installed.
    """
    able = {name: named(name) for name in names}
    for name, implementation in able.items():
        if implementation.missing is not None:
            raise UnavailableError(f"got no {name}: it {implementation.missing}, or --site-packages FOLDER")
    asked = [
        Job(machine, implementation, *work, D, N)
        for machine in MACHINES
        for implementation, work in itertools.product(names, WORKS)
        for D, N in itertools.product(HEADS, TOKENS if machine.capability == (9, 0) else FEW_TOKENS)
    ]
    # The others compute the whole vocabulary all the same, which has a row of its own.
    asked = [job for job in asked if job.kept is None or job.implementation == OURS]
    return [job for job in asked if able[job.implementation].why_not(job.work, "cuda") is None]


def content(predictions: Iterable[tuple[Job, dict[str, Any]]]) -> dict[str, Any]:
    """predicted.json."""
    machines, times = {machine.name: asdict(machine) for machine in MACHINES}, dict[str, Any]()
    operations: dict[str, Any] = {}
    for job, facts in predictions:
        if shown := facts.pop("operations", None):
            operations[job.plan] = shown
        times.setdefault(job.machine.name, {}).setdefault(job.plan, {})[shape_of(job.D, job.N)] = facts
    return {
        "made_by": "python -m fused_grpo.bench.predict --write",
        "torch": torch.__version__,
        "dtype": DTYPE,
        "vocab": VOCAB,
        "sequences": SEQUENCES,
        "triton_gemm": TRITON_GEMM,
        "machines": machines,
        "published": [point_of(point, machines[point.machine]) for point in POINTS],
        "measured": measured(times[H200.name]),
        "operations": {H200.name: {shape_of(*SHOWN): operations}},
        "predicted": times,
    }


def point_of(point: Point, machine: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the page: what was published or measured, and the same by the model."""
    N, D, V = point.size
    facts = {"machine": point.machine, "what": point.what, "N": N, "D": D, "V": V, "source": point.source}
    return facts | {
        "ms": point.ms,
        "predicted": rounded(point.predicted(machine["flops"], machine["bytes_per_s"]) / 1e3),
    }


def measured(times: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was measured of the predicted works, in interleaved rounds where there were such, else alone."""
    entries: dict[tuple[str, int, int], dict[str, Any]] = {}
    lines = [line for line in latest(read_lines(MEASURED)) if line["stage"] in ("peers", "losses")]
    for line in sorted(lines, key=lambda line: line["stage"] == "losses"):
        shape, plan, ms = line.get("shape") or {}, line["figure"], line["value"]
        if line.get("unit") != "ms" or ms is None or not shape.keys() <= {"N", "D", "V"}:
            continue
        expected = times.get(plan, {}).get(shape_of(shape["D"], shape["N"]), {}).get("ms")
        facts = {"plan": plan, "D": shape["D"], "N": shape["N"], "ms": rounded(ms / 1e3), "predicted": expected}
        if expected is not None:
            entries.setdefault((plan, shape["D"], shape["N"]), facts)
    return [*entries.values()]


def text_of(value: Any, depth: int = 0) -> str:
    """JSON with a line for each dictionary or list that holds no other dictionary."""
    if not isinstance(value, dict) or not any(isinstance(part, dict | list) for part in value.values()):
        return json.dumps(value)
    indent = " " * (depth + 1)
    lines = [f"{indent}{json.dumps(name)}: {text_of(part, depth + 1)}" for name, part in value.items()]
    return "{\n" + ",\n".join(lines) + "\n" + " " * depth + "}"


def predictions() -> dict[str, Any]:
    """The content of predicted.json, from as many processes as there are CPUs.

    Raises:
        UnavailableError: torch is built without CUDA, or Triton's interpreter is on.
    """
    if torch.version.cuda is None or os.environ.get("TRITON_INTERPRET") == "1":
        want = "want a CUDA build of torch, and no TRITON_INTERPRET: on a CPU build there are no fake CUDA tensors"
        raise UnavailableError(f"got torch {torch.__version__}, {want}; fix: pip install torch, on any Linux")
    asked = jobs()
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork")) as pool:
        return content(zip(asked, pool.map(predict, asked, chunksize=4), strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures of predictions/README.md, or write that page and predicted.json."""
    parser = argparse.ArgumentParser(prog="python -m fused_grpo.bench.predict", description="Predicted times of GPUs.")
    parser.add_argument("--write", action="store_true", help="write predicted.json and predictions/README.md")
    parser.add_argument("--site-packages", metavar="FOLDER", help="folder where TRL is installed, if not here")
    options = parser.parse_args(argv)
    if options.site_packages is not None:
        sys.path.append(options.site_packages)
    try:
        made = predictions()
    except FusedGRPOError as error:
        print(error, file=sys.stderr)
        return 2
    if options.write:
        PATH.write_text(text_of(made) + "\n")
        return pages.main([str(PAGE)])
    print(pages.predictions_text(made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
