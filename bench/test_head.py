"""The head by itself: log-probs and losses of everyone, in turns, and what was promised of the outcome.

Every contender's figures come from `Crew.measure`, which has all of them take turns in processes of their own after
each has passed the gate; a test here hands them to pytest-benchmark, whose table and file they then are in.
"""

from __future__ import annotations

from typing import Any

import pytest

from fused_grpo.bench.peers import everyone
from fused_grpo.bench.suites import FLOOR, LONGEST, MOST_TOKENS, OURS, PROMISES, Case, Promise

WHO = {contender.name: contender for contender in everyone()}


def test_head(benchmark: Any, replay: Any, figures: Any, case: Case, contender: str) -> None:
    measured = figures.of(case)
    mine, floor = measured[contender], measured.get(FLOOR)
    if mine.absent is not None:
        figures.note("absent", group=case.name, contender=contender, why=mine.absent)
    assert not mine.rejected, mine.absent
    if mine.absent is not None:
        pytest.skip(mine.absent)
    benchmark.group = case.name
    replay.into(benchmark, mine.seconds)
    benchmark.extra_info |= {
        "contender": contender,
        "version": WHO[contender].version,
        "setting": WHO[contender].setting,
        "work": case.work.described(),
        "flop_per_second": case.work.flop / mine.median,
        "share_of_products": floor.median / mine.median if floor is not None and floor.seconds else None,
        "errors": mine.errors,
        "memory": mine.memory,
        "peak_bytes": mine.peak,
    }


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.name)
def test_promise(figures: Any, promise: Promise, pytestconfig: pytest.Config, request: pytest.FixtureRequest) -> None:
    """What the README and the issues say of times and bytes, at the sizes that it was said of."""
    if pytestconfig.getoption("--tiny") or request.node.get_closest_marker("cpu") is None:
        pytest.skip("promised of a CPU, at full size")
    measured = figures.of(promise.case)
    beside = promise.case.work.gradient_bytes
    of = (lambda m: m.median) if promise.what == "seconds" else (lambda m: m.peak - beside)
    value = promise.value(*(of(measured[name]) for name in (promise.over, promise.under)))
    met = promise.met(value)
    figures.note("promises", what=promise.name, group=promise.case.name, value=value, bound=promise.bound, met=met)
    assert met, f"got {value:.3f} for {promise.name}, want {promise.bound}"


@pytest.mark.parametrize("work", LONGEST, ids=lambda work: work.name)
def test_longest(crew: Any, figures: Any, work: Any, pytestconfig: Any, request: Any) -> None:
    """How many tokens fit before memory runs out, one contender after the other."""
    tiny = pytestconfig.getoption("--tiny")
    if request.node.get_closest_marker("gpu") is None:
        pytest.skip("asked of a GPU")
    most = 256 if tiny else MOST_TOKENS
    asked = work.small() if tiny else work
    names = ("fused-grpo", "full logits", "TRL", "Liger GRPO")
    found = crew.longest(asked, names, most=most)
    for name, answer in found.items():
        figures.note("longest", work=asked.described(), contender=name, **answer)
    assert found[OURS[0]]["tokens"] >= max(answer.get("tokens", 0) for answer in found.values())
