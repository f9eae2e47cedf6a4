"""Workers and their crew: real processes that take turns, and what becomes of one that raises, dies or runs out."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace

import pytest
import torch

from fused_grpo.bench.contenders import Contender, full_logits
from fused_grpo.bench.crew import Crew, Measurement
from fused_grpo.bench.peers import named
from fused_grpo.bench.work import Work
from fused_grpo.bench.worker import Worker

# Without a gradient, and memory counted for one alone: torch imports seconds' worth of modules for either.
WORK = Work(kind="logprobs", head="tiny", tokens=200, sequences=4, direction="no_grad")
# A worker whose contenders write down when they do the work, as it is at full size; the gate's is smaller.
PROGRAM = """
import os, signal, sys, time
from fused_grpo.bench import worker
from fused_grpo.bench.contenders import Contender, full_logits

def made(name):
    done = 0
    def logprobs(hidden, weight, targets, work):
        nonlocal done
        print("not an answer")
        if len(targets) == 200:
            done += 1
            with open(sys.argv[3], "a") as file:
                print(name, file=file)
        if name == "raises":
            raise RuntimeError("no such luck")
        if name == "dies" and done == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "hangs" and done == 2:
            time.sleep(600)
        return full_logits(hidden, weight, targets, work)
    return Contender(name=name, version="1", setting="", logprobs=logprobs)

worker.named = made
worker.main(*sys.argv[1:3])
"""


class Scripted(Crew):
    """Whoever is not in `peers` is one of `PROGRAM`."""

    log = ""

    def _command(self, name):
        real = super()._command(name)
        return real if name == "products alone" else [sys.executable, "-c", PROGRAM, name, self.device, self.log]


@pytest.fixture(scope="module")
def crew(tmp_path_factory):
    found = Scripted("cpu")
    found.log = str(tmp_path_factory.mktemp("crew") / "turns")
    yield found
    found.close()


@pytest.fixture(scope="module")
def measured(crew):
    return crew.measure(WORK, ["products alone", "a", "b", "raises", "dies"], rounds=3, memory=False)


def test_turns_interleave_and_each_round_starts_with_the_next(crew, measured):
    with open(crew.log) as file:
        done = [name for name in file.read().split() if name in ("a", "b")]
    assert (done[:2], done[2:4], done[4:6], done[6:]) == (["a", "b"], ["a", "b"], ["a", "b"], ["b", "a"])
    assert [len(measured[name].seconds) for name in ("products alone", "a", "b")] == [3, 3, 3]


def test_what_is_measured_of_one_that_is_right(measured):
    assert measured["a"].absent is None
    assert measured["a"].errors["value"] < 2e-5
    assert measured["a"].median > 0
    assert measured["a"].memory is None
    assert measured["products alone"].errors is None


def test_one_that_raises_is_absent_with_its_error(measured):
    assert measured["raises"].absent == "RuntimeError: no such luck"
    assert not measured["raises"].rejected
    assert measured["raises"].seconds == []


def test_one_that_is_killed_during_its_turn_is_absent_and_starts_afresh_with_the_next_work(crew, measured):
    assert measured["dies"].absent == f"its process ended with status -{int(signal.SIGKILL)}"
    assert measured["dies"].memory is None
    work = replace(WORK, tokens=160)
    again = crew.measure(work, ["dies"], rounds=1)["dies"]
    assert again.absent is None
    assert len(again.seconds) == 1
    assert again.peak >= work.tokens * work.shape.vocab * 4


def test_one_that_was_killed_while_others_had_their_turn_says_so(crew, measured):
    victim = crew._workers["b"]
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    assert crew._ask("b", do="turn") == {"failed": f"its process ended with status -{int(signal.SIGKILL)}"}
    crew._end("b")


def test_one_that_hangs_is_ended_and_said_to_be(crew):
    crew.measure(WORK, ["b", "hangs"], rounds=0, memory=False)  # started, and its imports behind it
    crew.patience, patience = 5.0, crew.patience
    measured = crew.measure(WORK, ["b", "hangs"], rounds=2, memory=False)
    crew.patience = patience
    assert measured["hangs"].absent == "took longer than 5 s over 'prepare', and was ended"
    assert len(measured["b"].seconds) == 2


@pytest.mark.full
def test_full_logits_hold_the_logits_and_ours_do_not():
    work = Work(kind="loss", head="GPT-2", tokens=512, direction="no_grad")
    peaks = {}
    for name in ("full logits", "fused-grpo"):
        worker = Worker(named(name), "cpu")
        assert set(worker.prepare(vars(work))) == {"errors"}
        found = worker.memory()
        peaks[name] = max(found["forward"], found["backward"])
    assert peaks["full logits"] >= 512 * work.shape.vocab * 4
    assert peaks["fused-grpo"] < peaks["full logits"]


def test_one_that_is_wrong_is_rejected_before_it_has_the_work():
    contender = Contender(
        name="wrong", version=None, setting="", logprobs=lambda h, w, t, work: full_logits(h, w, (t + 1) % len(w), work)
    )
    worker, crew, noted = Worker(contender, "cpu"), Crew("cpu"), Measurement()
    crew._note(noted, worker.prepare(vars(WORK)))
    assert worker.batch is None
    assert noted.rejected
    assert noted.absent.startswith("wrong, and not timed: ")
    assert noted.errors["value"] > 1


def test_the_longest_is_what_still_had_memory():
    def logprobs(hidden, weight, targets, work):
        if len(targets) > 100:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return full_logits(hidden, weight, targets, work)

    worker = Worker(Contender(name="small", version=None, setting="", logprobs=logprobs), "cpu")
    work = replace(WORK, tokens=16)
    assert worker.longest(vars(work), most=4096) == {"tokens": 64}
    assert worker.longest(vars(work), most=32) == {"tokens": 32}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_what_is_compiled_stays_compiled_however_many_shapes_there_are():
    worker = Worker(named("full logits, compiled"), "cpu")
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for tokens in (32, 48):
            work = replace(WORK, tokens=tokens, sequences=2)
            assert set(worker.prepare(vars(work))) == {"errors"}
