"""Figures of other tiles than those in the tables of `kernels/tuning.py`: what a table for a device is made from."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from fused_grpo.bench.gpu.clock import Clock, Figure, figure_of
from fused_grpo.bench.gpu.kernels import triton
from fused_grpo.bench.gpu.scale import Scale


def tiles(scale: Scale) -> Iterator[Figure]:
    """The kernel without logits by candidates for its tile, then the pass over a chunk's logits by those for a row's.

    A candidate that the device has no memory or registers for has no value, but the reason.
    """
    yield from gemm_tiles(scale)
    yield from row_tiles(scale)


def gemm_tiles(scale: Scale) -> Iterator[Figure]:
    tuning, clock, device = tables(), Clock(scale.device, queued=True), torch.device(scale.device)
    usual, arch = tuning.gemm_tile(device, getattr(torch, scale.dtype), aligned=True), tuning.architecture(device)
    table = tuning.SINGLE if scale.dtype == "float32" else tuning.ALIGNED
    for name, N in itertools.product(scale.heads, scale.tile_tokens):
        D, V = scale.head(name)
        hidden, weight, targets = scale.tensor(N, D), scale.tensor(V, D), torch.randint(V, (N,), device=device)
        run = functools.partial(triton().logprob_forward, hidden, weight, targets)
        run = functools.partial(run, temperature=torch.ones(N, device=device))
        for changes in scale.gemm_tiles:
            tile = replace(usual, **changes)
            with mock.patch.dict(table, {arch: tile}):
                yield from measured(clock, run, "tile " + written(tile), 2 * N * D * V / 1e12, "TFLOP/s", N=N, D=D, V=V)


def row_tiles(scale: Scale) -> Iterator[Figure]:
    tuning, clock, device = tables(), Clock(scale.device, queued=True), torch.device(scale.device)
    dtype, arch = getattr(torch, scale.dtype), tuning.architecture(device)
    _, V = scale.head(scale.heads[0])
    for R in (*scale.tile_tokens, scale.chunk):
        logits = triton().empty_tile(R, V, dtype=torch.float32, device=device)
        source, targets = scale.tensor(V, dtype=torch.float32), torch.randint(V, (R,), device=device)
        run = functools.partial(triton().softmax_weights_, logits, targets, dtype=dtype)
        run = functools.partial(run, temperature=torch.ones(R, device=device))
        prepare, moved = functools.partial(logits.copy_, source), (4 + dtype.itemsize) * R * V / 1e9
        for block_v, num_warps in scale.row_tiles:
            tile = tuning.RowTile(block_v, num_warps)
            with mock.patch.dict(tuning.ROW, {arch: tile}):
                label = f"row tile {written(tile)}"
                yield from measured(clock, run, label, moved, "GB/s", prepare=prepare, R=R, V=V)


def measured(
    clock: Clock,
    run: Callable[[], object],
    label: str,
    amount: float,
    unit: str,
    *,
    prepare: Callable[[], object] = lambda: None,
    **shape: int,
) -> Iterator[Figure]:
    """The rate of `run`, which does so much of the unit per second."""
    try:
        seconds = clock.seconds(run, prepare=prepare)
    except Exception as error:  # of Triton's compiler or launcher: there is no list of what they raise
        yield replace(figure_of(label, None, unit, None, **shape), note=f"{type(error).__name__}: {error}"[:200])
    else:
        yield figure_of(label, amount / seconds, unit, None, **shape)


def written(tile: Any) -> str:
    """The fields of a tile, as `128 x 256 x 64, num_warps 8, ...`."""
    sizes = " x ".join(str(x) for name, x in vars(tile).items() if name.startswith("block_"))
    return ", ".join([sizes, *(f"{name} {x}" for name, x in vars(tile).items() if not name.startswith("block_"))])


def tables() -> Any:
    """The module of the tables, imported on first use, like the kernels."""
    from fused_grpo.kernels import tuning

    return tuning
