"""The head by itself: log-probs and losses of all implementations, and what was promised of the outcome.

`WorkerPool.measure` measures the implementations in interleaved rounds, after the correctness check of each. A test
gives the seconds of one implementation to pytest-benchmark, for its table and file.
"""

from __future__ import annotations

from typing import Any

import pytest

from fused_grpo.bench.heads.peers import everyone
from fused_grpo.bench.heads.suites import FLOOR, LONGEST, MOST_TOKENS, OURS, PROMISES, Case, Promise

IMPLEMENTATIONS = {implementation.name: implementation for implementation in everyone()}


def test_head(benchmark: Any, replay: Any, figures: Any, case: Case, implementation: str) -> None:
    measurements = figures.of(case)
    measurement, floor = measurements[implementation], measurements.get(FLOOR)
    if measurement.absent is not None:
        figures.note("absent", group=case.name, implementation=implementation, why=measurement.absent)
    assert not measurement.rejected, measurement.absent
    if measurement.absent is not None:
        pytest.skip(measurement.absent)
    benchmark.group = case.name
    replay.into(benchmark, measurement.seconds)
    benchmark.extra_info |= {
        "implementation": implementation,
        "version": IMPLEMENTATIONS[implementation].version,
        "setting": IMPLEMENTATIONS[implementation].setting,
        "work": case.work.described(),
        "flop_per_second": case.work.flop / measurement.median,
        "share_of_products": floor.median / measurement.median if floor is not None and floor.seconds else None,
        "errors": measurement.errors,
        "memory": measurement.memory,
        "peak_bytes": measurement.peak,
    }


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.name)
def test_promise(figures: Any, promise: Promise, pytestconfig: pytest.Config, request: pytest.FixtureRequest) -> None:
    """The promises about times and bytes, at the sizes for which they were made."""
    if pytestconfig.getoption("--tiny") or request.node.get_closest_marker("cpu") is None:
        pytest.skip("promised of a CPU, at full size")
    measurements = figures.of(promise.case)
    beside = promise.case.work.gradient_bytes
    pair = (measurements[name] for name in (promise.over, promise.under))
    value = promise.value(*(m.median if promise.what == "seconds" else m.peak - beside for m in pair))
    figures.promise(promise.name, promise.case.name, value, promise.bound)


@pytest.mark.parametrize("work", LONGEST, ids=lambda work: work.name)
def test_longest(pool: Any, figures: Any, work: Any, pytestconfig: Any, request: Any) -> None:
    """The tokens that fit before memory runs out, one implementation after the other."""
    tiny = pytestconfig.getoption("--tiny")
    if request.node.get_closest_marker("gpu") is None:
        pytest.skip("measured on a GPU")
    most = 256 if tiny else MOST_TOKENS
    asked = work.small() if tiny else work
    names = ("fused-grpo", "full logits", "TRL", "Liger GRPO")
    answers = pool.longest(asked, names, most=most)
    for name, answer in answers.items():
        figures.note("longest", work=asked.described(), implementation=name, **answer)
    assert answers[OURS[0]]["tokens"] >= max(answer.get("tokens", 0) for answer in answers.values())
