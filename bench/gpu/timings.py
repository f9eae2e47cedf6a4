"""First measurements on a GPU: `python -m fused_grpo.bench.gpu.timings PART [--tiny] [--output DIR]`.

Prints a line of JSON for each figure, with its predicted value, as soon as it is measured. scripts/gpu_first.py runs
the parts, a process each. Needs torch and triton alone. `--tiny` is for a machine without a GPU: every part runs in
seconds, with interpreted kernels.

    machine    versions, and the device
    warm       compiles what tiles, passes and forward launch, all side by side, so that the caches on disk have it
    warm_peers the same for peers and for whole trainers
    ceilings   a large product and a large copy: upper bounds of everything below
    gemms      the three products of a chunk, over its rows
    passes     the kernels that read all logits, by the bytes that they move
    forward    the kernel without logits beside the vendor's GEMM and a reduction, over N
    tiles      candidates for the tables of kernels/tuning.py
    losses     loss and log-probs over plans, tokens and sizes of a chunk
    trace      the launches of one call of the loss; trace.json.gz goes to DIR
    headline   the most important of it: ours, its GEMMs alone, full logits and TRL, with many tokens and with few
    peers      ours and others in interleaved rounds, after a check against fp64, and the promised ratios
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fused_grpo.bench.gpu.clock import Clock, Figure, figure_of, scaled
from fused_grpo.bench.gpu.kernels import forward, gemms, passes
from fused_grpo.bench.gpu.peers import headline, peers
from fused_grpo.bench.gpu.scale import FULL, GIB, OURS, TINY, Scale
from fused_grpo.bench.gpu.tiles import tiles
from fused_grpo.bench.gpu.warm import warm, warm_peers
from fused_grpo.bench.heads.implementations import Implementation, ours_loss
from fused_grpo.bench.heads.peers import named
from fused_grpo.bench.heads.suites import FLOOR
from fused_grpo.bench.heads.work import Gradients, Kind, Work, batch_of
from fused_grpo.bench.memory import allocations_of
from fused_grpo.bench.predictions import predicted
from fused_grpo.env import environment, versions
from fused_grpo.errors import UnavailableError

PACKAGES = ("numpy", "pytest", "hypothesis", "trl", "liger-kernel", "cut-cross-entropy", "verl")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--tiny", action="store_true", help="small sizes, on a CPU")
    parser.add_argument("--output", type=Path, default=Path(), help="the folder that trace.json.gz goes to")
    given = parser.parse_args(arguments)
    if not given.tiny and not torch.cuda.is_available():
        raise UnavailableError(f"got torch {torch.__version__}, which finds no GPU; fix: --tiny, which needs none")
    if given.tiny:
        os.environ["TRITON_INTERPRET"] = "1"
    torch.manual_seed(0)
    scale = TINY if given.tiny else FULL
    if given.part == "machine":
        print(json.dumps({"machine": machine(scale)}), flush=True)
        return
    part: Callable[..., Iterator[Figure]] = PARTS[given.part]
    for figure in part(scale, given.output) if given.part == "trace" else part(scale):
        print(figure.line(), flush=True)


def machine(scale: Scale) -> dict[str, Any]:
    facts: dict[str, Any] = {**environment(), **versions(PACKAGES), "gpu": scale.device_name}
    facts["date"] = datetime.date.today().isoformat()
    if scale.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {"memory": properties.total_memory, "multiprocessors": properties.multi_processor_count}
        facts |= {"l2": getattr(properties, "L2_cache_size", None), "cuda": torch.version.cuda}
    return facts


def ceilings(scale: Scale) -> Iterator[Figure]:
    clock, n = Clock(scale.device), scale.square
    a, b = scale.tensor(n, n), scale.tensor(n, n)
    out = torch.empty_like(a)
    seconds = clock.seconds(lambda: torch.mm(a, b, out=out))
    flops, rate = scale.roofline.flops, scale.roofline.bytes_per_s
    yield figure_of("product", 2 * n**3 / seconds / 1e12, "TFLOP/s", scaled(flops, 1e-12), n=n)
    source = scale.tensor(scale.copied // 4, dtype=torch.float32)
    target = torch.empty_like(source)
    seconds = clock.seconds(lambda: target.copy_(source))
    yield figure_of("copy", 2 * source.nbytes / seconds / 1e9, "GB/s", scaled(rate, 1e-9), bytes=source.nbytes)


def losses(scale: Scale) -> Iterator[Figure]:
    plans: list[tuple[Kind, Gradients]] = [("loss", "frozen"), ("logprobs", "trainable")]
    plans += [("logprobs", "frozen"), ("logprobs", "no_grad")]
    for name in scale.heads:
        usual = scale.work("loss", "trainable", name, scale.usual)
        yield from timed(scale, OURS, usual)
        yield from timed(scale, FLOOR, usual)
        for kind, gradients in plans:
            yield from timed(scale, OURS, replace(usual, kind=kind, gradients=gradients))
        for gib in scale.budgets:
            yield from timed(scale, OURS, usual, budget=gib)
    for name, tokens in ((name, tokens) for name in scale.heads for tokens in scale.tokens if tokens != scale.usual):
        yield from timed(scale, OURS, scale.work("loss", "trainable", name, tokens))


def timed(scale: Scale, name: str, work: Work, *, budget: float | None = None) -> Iterator[Figure]:
    """Milliseconds of a work, and with the default size of a chunk the most bytes beside its inputs."""
    implementation = named(name) if budget is None else with_chunks_of(int(budget * GIB))
    batch, expected = batch_of(work, scale.device), None
    if budget is None:
        expected = predicted.seconds_of_work(name, work.described(), scale.device_name)
    seconds = Clock(scale.device).seconds(lambda: implementation.run(batch, work))
    shape = {"N": work.tokens, "D": work.shape.hidden, "V": work.shape.vocab, "chunk GiB": budget}
    plan = predicted.plan_of(name, work.kind, work.gradients, work.several, work.kept)
    yield figure_of(plan, seconds * 1e3, "ms", scaled(expected, 1e3), **shape)
    if name == OURS and budget is None:
        batch.hidden.grad = batch.weight.grad = None
        peak = allocations_of(functools.partial(implementation.run, batch, work), scale.device).peak
        machine = predicted.machine_of(scale.device_name) or ""
        allowed = predicted.entry(plan, work.shape.hidden, work.tokens, machine).get("peak")
        yield figure_of(f"{plan}: peak", peak / GIB, "GiB", scaled(allowed, 1 / GIB), **shape)


def with_chunks_of(size: int) -> Implementation:
    """Our loss with chunks of so many bytes."""
    loss = ours_loss(chunk_bytes=size)
    return Implementation(name=f"chunks of {size}", version=None, setting="", loss=loss)


def trace(scale: Scale, output: Path) -> Iterator[Figure]:
    """The launches of a call of the loss with few tokens and with the usual number, and how long the GPU has none."""
    for name, tokens in ((scale.heads[-1], scale.tokens[0]), (scale.heads[0], scale.usual)):
        work = scale.work("loss", "trainable", name, tokens)
        implementation, batch, shape = named(OURS), batch_of(work, scale.device), {"N": tokens, "D": work.shape.hidden}
        for _ in range(2):
            implementation.run(batch, work)
        with torch.profiler.profile() as recorded:
            implementation.run(batch, work)
            if scale.device == "cuda":
                torch.cuda.synchronize()
        recorded.export_chrome_trace(str(output / "trace.json.gz"))  # of the last one
        events = list(recorded.events())
        if scale.device == "cuda":  # kernels and copies, not the calls that launch them
            events = [event for event in events if str(event.device_type) == "DeviceType.CUDA"]
        spent: dict[str, list[float]] = {}
        for event in events:
            on_device = scale.device == "cuda"
            ms = (event.self_device_time_total if on_device else event.self_cpu_time_total) / 1e3
            spent.setdefault(event.name, []).append(ms)
        total = sum(map(sum, spent.values()))
        plan, machine = predicted.plan_of(OURS, work.kind, work.gradients), predicted.machine_of(scale.device_name)
        expected = predicted.entry(plan, work.shape.hidden, tokens, machine or "").get("device_ms")
        yield figure_of("total", total, "ms", expected, **shape)
        yield figure_of("launches", len(events), "", None, **shape)
        span = max(event.time_range.end for event in events) - min(event.time_range.start for event in events)
        yield figure_of("idle", 1 - total * 1e3 / span, "share", None, **shape)
        for key, durations in sorted(spent.items(), key=lambda row: -sum(row[1]))[:12]:
            yield figure_of(key[:100], sum(durations), "ms", None, count=len(durations), **shape)


MEASURED = (ceilings, gemms, passes, forward, tiles, losses, trace, headline, peers)
PARTS: dict[str, Callable[..., Any]] = {part.__name__: part for part in (machine, warm, warm_peers, *MEASURED)}

if __name__ == "__main__":
    main()
