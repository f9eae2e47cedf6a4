"""Ours beside the ops of other projects, the most important works first, and the promised ratios.

The run may be ended at any moment: each figure is printed as soon as it is known. An implementation that needs long
takes time from itself alone: after `Scale.patience` seconds of preparations it is left out of the works that follow.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace

from fused_grpo.bench.gpu.clock import Figure, figure_of, scaled
from fused_grpo.bench.gpu.scale import GIB, OURS, TINY, Scale
from fused_grpo.bench.heads.suites import COMPILED, FLOOR
from fused_grpo.bench.heads.work import Gradients, Kind, Work
from fused_grpo.bench.heads.worker_pool import Measurement, WorkerPool
from fused_grpo.bench.predictions import predicted

ROUNDS = 3
# Preparations side by side: nothing is timed in them, except where torch.compile tunes its kernels.
AT_ONCE = 4
ALL_LOGITS = "full logits"
HEADLINE, FEW = (FLOOR, OURS, "TRL", ALL_LOGITS), 256
FOR_IDLE = (FLOOR, OURS, f"{OURS}, needed", "TRL")  # to the others an advantage of zero is one like any other
# (over, under, bound) of times with a large head.
PROMISED: dict[tuple[Kind, Gradients], tuple[tuple[str, str, str], ...]] = {
    ("loss", "trainable"): ((OURS, FLOOR, "<= 1.15"), ("TRL", OURS, ">= 1.25"), ("Liger GRPO", OURS, ">= 5")),
    ("loss", "frozen"): ((OURS, FLOOR, "<= 1.15"),),
    ("logprobs", "no_grad"): ((OURS, FLOOR, "<= 1.2"),),
}
OF_IDLE, OF_OTHERS, OF_MEMORY, OF_ERROR = "<= 0.7", ">= 1", ">= 8", "<= 1e-05"


def compared(scale: Scale) -> Iterator[Work]:
    """The works: every kind with the largest head, a loss over tokens with the smallest."""
    large, small = scale.heads[0], scale.heads[-1]
    usual = scale.work("loss", "trainable", large, scale.usual)
    yield usual
    yield replace(usual, kind="logprobs", gradients="no_grad")
    if scale is not TINY:
        yield from (scale.work("loss", "trainable", small, tokens) for tokens in scale.few)
        yield replace(usual, gradients="frozen")
    yield replace(usual, idle=0.5)
    if scale is not TINY:
        yield replace(usual, kind="logprobs")
        yield scale.work("loss", "trainable", small, scale.usual)


def headline(scale: Scale) -> Iterator[Figure]:
    """What the others are measured by, with the largest head and the usual number of tokens, then with few."""
    tokens = dict.fromkeys((scale.usual, min(scale.usual, FEW)))
    works = [scale.work("loss", "trainable", scale.heads[0], count) for count in tokens]
    yield from beside(scale, works, HEADLINE)


def peers(scale: Scale) -> Iterator[Figure]:
    yield from beside(scale, compared(scale), scale.peers)


def beside(scale: Scale, works: Iterable[Work], implementations: Sequence[str]) -> Iterator[Figure]:
    """Of each implementation the most bytes beside the inputs, the error of the small work, and the time."""
    pool, spent, times = (
        WorkerPool(scale.device, patience=scale.patience),
        defaultdict[str, float](float),
        dict[Work, float](),
    )
    try:
        for work in works:
            names = FOR_IDLE if work.idle else implementations
            ready: dict[str, Measurement] = {}
            for name, measurement in prepared(pool, work, names, spent, scale.patience):
                yield from facts(scale, work, name, measurement)
                if measurement.absent is None:
                    ready[name] = measurement
            pool.time(ready, rounds=ROUNDS)
            for name, measurement in ready.items():
                yield time_of(scale, work, name, measurement)
            yield from ratios(scale, work, {name: m for name, m in ready.items() if m.absent is None}, times)
    finally:
        pool.close()


def prepared(
    pool: WorkerPool, work: Work, names: Sequence[str], spent: MutableMapping[str, float], patience: float
) -> Iterator[tuple[str, Measurement]]:
    """Each implementation as soon as it is ready; `spent` are the seconds of all preparations of each."""
    late = [name for name in names if spent[name] >= patience]
    for name in late:
        yield name, Measurement(absent=f"left out, because its preparations took {spent[name]:.0f} s")
    chosen = [name for name in names if name not in late]
    pool.release_all_but(chosen)
    for group, at_once in (
        ([x for x in chosen if x not in COMPILED], AT_ONCE),
        ([x for x in chosen if x in COMPILED], 1),
    ):
        for name, measurement in pool.prepare(work, group, at_once=at_once) if group else ():
            spent[name] += measurement.preparation
            yield name, measurement


def facts(scale: Scale, work: Work, name: str, measurement: Measurement) -> Iterator[Figure]:
    """What is known before the time: bytes and errors, or why there are none."""
    if measurement.absent is not None:
        yield time_of(scale, work, name, measurement)
        return
    plan, shape = predicted.plan_of(name, work.kind, work.gradients), shape_of(work)
    if measurement.peak is not None:
        yield figure_of(f"{plan}: peak", measurement.peak / GIB, "GiB", None, **shape)
    for quantity, error in (measurement.errors or {}).items():
        if error is not None:
            figure = figure_of(f"{plan}: error of {quantity}", error, "", None, **shape)
            promised = name == OURS and work.kind == "logprobs" and quantity == "value"
            yield replace(figure, promised=OF_ERROR if promised else None)


def time_of(scale: Scale, work: Work, name: str, measurement: Measurement) -> Figure:
    expected = predicted.seconds_of_work(name, work.described(), scale.device_name)
    rounds = tuple(seconds * 1e3 for seconds in measurement.seconds) if measurement.absent is None else ()
    plan = predicted.plan_of(name, work.kind, work.gradients)
    value = statistics.median(rounds) if rounds else None
    figure = figure_of(plan, value, "ms", scaled(expected, 1e3), **shape_of(work))
    return replace(figure, note=measurement.absent and f"absent: {measurement.absent}", rounds=rounds)


def ratios(scale: Scale, work: Work, measured: Mapping[str, Measurement], times: dict[Work, float]) -> Iterator[Figure]:
    """The promised ratios of a work; `times` has ours of all works until now."""
    if OURS not in measured:
        return
    ours = times[work] = measured[OURS].median
    if work.idle:
        if (whole := times.get(replace(work, idle=0.0))) is not None:
            yield ratio(work, f"{OURS}, {work.idle:.0%} idle / none", ours / whole, OF_IDLE)
        return
    for over, under, bound in PROMISED.get((work.kind, work.gradients), ()):
        if (work.head, work.tokens) == (scale.heads[0], scale.usual) and {over, under} <= measured.keys():
            yield ratio(work, f"{over} / {under}", measured[over].median / measured[under].median, bound)
    others = {name: x.median for name, x in measured.items() if not name.startswith(OURS) and name != FLOOR}
    if others:
        fastest = min(others, key=others.__getitem__)
        yield ratio(work, f"fastest other / {OURS}", others[fastest] / ours, OF_OTHERS, fastest=fastest)
    beside = {name: x.peak - work.gradient_bytes for name, x in measured.items() if x.peak is not None}
    if work.kind == "loss" and {ALL_LOGITS, OURS} <= beside.keys() and work.tokens == scale.usual:
        label = f"peak beside gradients: {ALL_LOGITS} / {OURS}"
        yield ratio(work, label, beside[ALL_LOGITS] / beside[OURS], OF_MEMORY)


def ratio(work: Work, label: str, value: float, bound: str, **more: str) -> Figure:
    figure = figure_of(f"{label}: {work.kind}, {work.gradients}", value, "x", None, **shape_of(work), **more)
    return replace(figure, promised=bound)


def shape_of(work: Work) -> dict[str, float | None]:
    return {"N": work.tokens, "D": work.shape.hidden, "idle": work.idle or None}
