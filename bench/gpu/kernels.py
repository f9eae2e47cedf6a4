"""Figures of single kernels and products: GEMMs of a chunk, passes over its logits, the forward kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from fused_grpo._maths.statistics import Statistics, full_precision
from fused_grpo.bench.gpu.clock import Clock, Figure, figure_of, over, scaled
from fused_grpo.bench.gpu.scale import Scale
from fused_grpo.head import logprob_plans
from fused_grpo.head.head import Head, Wanted, multiply_into
from fused_grpo.passes import choice


class Action(NamedTuple):
    """A timed action, and the bytes that it has to move."""

    run: Callable[[], object]
    moved: int


def gemms(scale: Scale) -> Iterator[Figure]:
    """The three products of a chunk, over its rows; dW for the first chunk, and added to that of other chunks."""
    for name in scale.heads:
        D, V = scale.head(name)
        for R in scale.rows:
            flop = 2 * R * D * V
            for label, action in products(scale, R, D, V).items():
                seconds = Clock(scale.device, queued=True).seconds(action.run)
                expected = over(flop / 1e12, scale.roofline.seconds(flop=flop, moved=action.moved))
                yield figure_of(label, flop / seconds / 1e12, "TFLOP/s", expected, R=R, D=D, V=V)


def products(scale: Scale, R: int, D: int, V: int) -> dict[str, Action]:
    """Products with the operands of the ops: logits in fp32 in padded rows, softmax weights in their first half."""
    hidden, weight, d_hidden = scale.tensor(R, D), scale.tensor(V, D), scale.tensor(R, D, dtype=torch.float32)
    logits, weights = (triton().empty_tile(R, V, dtype=torch.float32, device=hidden.device) for _ in range(2))
    weights = weights.view(hidden.dtype)[:, :V].normal_()
    d_weight, size = torch.zeros(V, D, device=hidden.device), hidden.element_size()

    def product(out: Tensor, a: Tensor, b: Tensor, *, accumulate: bool = False) -> None:
        with full_precision(out):
            multiply_into(out, a, b, accumulate=accumulate)

    dw_bytes = size * (V + D) * R + 4 * V * D
    return {
        "logits": Action(lambda: product(logits, hidden, weight.t()), size * (R + V) * D + 4 * R * V),
        "dH": Action(lambda: product(d_hidden, weights, weight), size * (R + D) * V + 4 * R * D),
        "dW": Action(lambda: product(d_weight, weights.t(), hidden), dw_bytes),
        "dW, added": Action(lambda: product(d_weight, weights.t(), hidden, accumulate=True), dw_bytes + 4 * V * D),
    }


def passes(scale: Scale) -> Iterator[Figure]:
    """The kernels that read all logits, which are restored before each run."""
    (D, V), R = scale.head(scale.heads[0]), scale.chunk
    source = scale.tensor(R, V, dtype=torch.float32)
    logits = triton().empty_tile(R, V, dtype=torch.float32, device=source.device)
    logits.copy_(source)
    for name, action in over_logits(scale, logits, D).items():
        seconds = Clock(scale.device, queued=True).seconds(action.run, prepare=lambda: logits.copy_(source))
        expected = scaled(scale.roofline.bytes_per_s, 1e-9)
        yield figure_of(name, action.moved / seconds / 1e9, "GB/s", expected, R=R, V=V, D=D)


def over_logits(scale: Scale, logits: Tensor, D: int) -> dict[str, Action]:
    """Every pass over the logits, by name."""
    (R, V), kernels, dtype = logits.shape, triton(), getattr(torch, scale.dtype)
    rows, targets = scale.tensor(R, dtype=torch.float32), torch.randint(V, (R,), device=logits.device)
    options: dict[str, Any] = {"temperature": torch.ones_like(rows)}
    statistics = kernels.finish_rows([kernels.row_statistics(logits, targets, entropy=True, **options)], entropy=True)
    gradient = {**options, "dtype": dtype, "statistics": statistics, "grad_logprobs": rows}
    hidden, half = scale.tensor(R, D), torch.full((), 0.5, device=logits.device)
    read, written = 4 * R * V, (4 + dtype.itemsize) * R * V

    def weights(**more: Any) -> Action:
        return Action(lambda: kernels.softmax_weights_(logits, targets, dtype=dtype, **options, **more), written)

    return {
        "row_statistics": Action(lambda: kernels.row_statistics(logits, targets, **options), read),
        "row_statistics, entropy": Action(
            lambda: kernels.row_statistics(logits, targets, entropy=True, **options), read
        ),
        "softmax_weights_": weights(),
        "softmax_weights_, entropy": weights(entropy=True),
        "softmax_weights_, known": weights(statistics=statistics),
        "logits_gradient_, entropy": Action(
            lambda: kernels.logits_gradient_(logits, targets, grad_entropy=rows, **gradient), written
        ),
        "scale_hidden": Action(lambda: kernels.scale_hidden(hidden, rows, rows), 2 * hidden.nbytes),
        "scale_": Action(lambda: kernels.scale_(hidden, half), 2 * hidden.nbytes),
    }


def forward(scale: Scale) -> Iterator[Figure]:
    """The kernel without logits beside the vendor's GEMM and a reduction of its logits, over N."""
    line, clock = scale.roofline, Clock(scale.device, queued=True)
    for name in scale.heads:
        D, V = scale.head(name)
        weight = scale.tensor(V, D).mul_(2 / D**0.5)  # so that targets are no farther off than a model's
        for N in scale.kernel_tokens:
            hidden, targets = scale.tensor(N, D), torch.randint(V, (N,), device=weight.device)
            options = {"temperature": torch.ones(N, device=weight.device)}
            flop, moved = 2 * N * D * V, weight.nbytes + hidden.nbytes
            alone = line.seconds(flop=flop / line.triton_gemm, moved=moved)
            gemm, read = line.seconds(flop=flop, moved=moved + 4 * N * V), line.seconds(moved=4 * N * V)
            reduced = None if gemm is None or read is None else gemm + read
            passed = line.seconds(moved=6 * N * V)
            ops: list[tuple[str, Callable[..., object], float | None]] = [
                ("kernel without logits", triton().logprob_forward, alone),
                ("GEMM and a reduction", through_logits, reduced),
            ]
            if triton().prefers_softmax_weights(hidden, weight, 10**9):
                out = triton().empty_tile(N, V, dtype=hidden.dtype, device=hidden.device)
                straight = line.seconds(flop=flop / line.triton_gemm, moved=moved + 2 * N * V)
                ops += [
                    ("weights without logits", functools.partial(triton().softmax_weights_forward, out=out), straight),
                    ("GEMM and weights", weights_of_logits, None if gemm is None else gemm + (passed or 0)),
                ]
            for label, op, expected in ops:
                seconds = clock.seconds(functools.partial(op, hidden, weight, targets, **options))
                yield figure_of(label, seconds * 1e3, "ms", scaled(expected, 1e3), N=N, D=D, V=V)
        for rows, columns in scale.tiles:
            N = scale.kernel_tokens[-1]
            seconds = clock.seconds(functools.partial(through_tiles, scale.tensor(N, D), weight, (rows, columns)))
            # Without traffic of logits, as if the tile stayed in the L2 cache: what a small tile can gain at most.
            expected = line.seconds(flop=2 * N * D * V, moved=-(-N // rows) * weight.nbytes)
            yield figure_of(f"tiles of {rows} x {columns}", seconds * 1e3, "ms", scaled(expected, 1e3), N=N, D=D, V=V)


def through_tiles(hidden: Tensor, weight: Tensor, shape: tuple[int, int]) -> Statistics:
    """The op's plan for log-probs by tiles of logits, with tiles [R, C] of this shape: one exists at a time."""

    zeros = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
    whole = Head(hidden, weight, None, zeros, torch.ones_like(zeros, dtype=torch.float32), 1.0, None)
    memory = triton().empty_tile(*shape, dtype=torch.float32, device=hidden.device)
    # If something is wanted, the plan never takes the kernel without logits.
    options = logprob_plans.Options(entropy=False, wanted=Wanted(hidden=True))
    with mock.patch.object(logprob_plans, "tile_memory", return_value=memory):
        return logprob_plans.forward(whole, triton(), options)


def through_logits(hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: Tensor) -> list[Any]:
    """Log-probs by the vendor's GEMM and one read of each chunk of logits."""
    kernels, rows, statistics = triton(), min(4096, len(hidden)), []
    memory = kernels.empty_tile(rows, len(weight), dtype=torch.float32, device=hidden.device)
    with full_precision(hidden):
        for chunk in (slice(first, first + rows) for first in range(0, len(hidden), rows)):
            logits = memory[: len(hidden[chunk])]
            multiply_into(logits, hidden[chunk], weight.t())
            state = kernels.row_statistics(logits, targets[chunk], temperature=temperature[chunk])
            statistics.append(kernels.finish_rows([state], entropy=False))
    return statistics


def weights_of_logits(hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: Tensor) -> None:
    """Softmax weights by the vendor's GEMM and a pass over each chunk of logits."""
    rows = min(4096, len(hidden))
    memory = triton().empty_tile(rows, len(weight), dtype=torch.float32, device=hidden.device)
    with full_precision(hidden):
        for chunk in (slice(first, first + rows) for first in range(0, len(hidden), rows)):
            logits = memory[: len(hidden[chunk])]
            multiply_into(logits, hidden[chunk], weight.t())
            given = {"temperature": temperature[chunk], "dtype": hidden.dtype}
            triton().softmax_weights_(logits, targets[chunk], **given)


def triton() -> Any:
    """The kernels, imported on first use: then Triton decides whether it interprets them."""
    return choice.passes("triton")
