"""Ours beside the peers on a GPU: the promised ratios, and an implementation that needs too long."""

from collections import Counter
from dataclasses import replace

import pytest

from fused_grpo.bench.gpu import peers
from fused_grpo.bench.gpu.scale import FULL, OURS
from fused_grpo.bench.heads.suites import FLOOR
from fused_grpo.bench.heads.worker_pool import Measurement

USUAL = next(peers.compared(FULL))


def measured(seconds: float, peak: int = 0) -> Measurement:
    return Measurement(seconds=[seconds], memory={"forward": peak, "backward": 0, "reserved": None})


def ratios(work, rounds, times=None) -> dict:
    figures = peers.ratios(FULL, work, rounds, {} if times is None else times)
    return {figure.figure.partition(":")[0]: figure for figure in figures}


def test_every_bound_of_the_largest_loss_has_its_ratio():
    gradients = USUAL.gradient_bytes
    rounds = {FLOOR: measured(4.0), OURS: measured(5.0, gradients + 10), "TRL": measured(10.0), "CCE": measured(6.0)}
    rounds |= {"Liger GRPO": measured(40.0), "full logits": measured(8.0, gradients + 90)}
    said = ratios(USUAL, rounds)
    assert {name: (figure.value, figure.promised) for name, figure in said.items()} == {
        f"{OURS} / {FLOOR}": (1.25, "<= 1.15"),
        f"TRL / {OURS}": (2.0, ">= 1.25"),
        f"Liger GRPO / {OURS}": (8.0, ">= 5"),
        f"fastest other / {OURS}": (1.2, ">= 1"),
        "peak beside gradients": (9.0, ">= 8"),
    }
    assert said[f"fastest other / {OURS}"].shape["fastest"] == "CCE"


def test_idle_sequences_are_compared_with_none():
    times: dict = {}
    ratios(USUAL, {OURS: measured(4.0)}, times)
    idle = ratios(replace(USUAL, idle=0.5), {OURS: measured(3.0), "TRL": measured(1.0)}, times)
    assert [(figure.value, figure.promised) for figure in idle.values()] == [(0.75, "<= 0.7")]


def test_without_ours_there_is_no_ratio():
    assert ratios(USUAL, {FLOOR: measured(1.0), "TRL": measured(1.0)}) == {}


class Slow:
    """A pool in which the preparation of "slow" takes 30 seconds."""

    def release_all_but(self, names):
        self.asked = list(names)

    def prepare(self, work, names, *, at_once):
        for name in names:
            yield name, Measurement(preparation=30.0 if name == "slow" else 1.0)


def test_what_needs_long_to_prepare_is_left_out_of_later_works():
    pool, spent, names = Slow(), Counter(), ["a", "slow", "full logits, compiled"]
    rounds = [dict(peers.prepared(pool, USUAL, names, spent, 40.0)) for _ in range(3)]
    assert [rounds[number]["slow"].absent for number in range(3)] == [
        None,
        None,
        "left out, because its preparations took 60 s",
    ]
    assert all(each[name].absent is None for each in rounds for name in ("a", "full logits, compiled"))
    assert pool.asked == ["a", "full logits, compiled"]


@pytest.mark.parametrize("place", ["first", "second"])
def test_the_works_with_the_most_important_bounds_come_first(place):
    works = list(peers.compared(FULL))
    wanted = {"first": ("loss", "trainable"), "second": ("logprobs", "no_grad")}[place]
    work = works[0 if place == "first" else 1]
    assert (work.kind, work.gradients, work.shape.hidden, work.tokens) == (*wanted, 4096, 8192)
    assert len(set(works)) == len(works) == 9
