"""Worker processes in interleaved rounds, and processes that raise, are killed, hang or run out of memory."""

import os
import signal
from dataclasses import replace

import pytest
import torch

from fused_grpo.bench.heads.implementations import Implementation, full_logits
from fused_grpo.bench.heads.peers import named
from fused_grpo.bench.heads.work import Work
from fused_grpo.bench.heads.worker import Worker
from fused_grpo.bench.heads.worker_pool import Measurement, WorkerPool

# Without a gradient, and memory counted for one alone: torch imports seconds' worth of modules for either.
WORK = Work(kind="logprobs", head="tiny", tokens=200, sequences=4, gradients="no_grad")
# A worker whose implementations log each run at full size; the work of the correctness check is smaller.
PROGRAM = """
import os, signal, sys, time
name, device, log, orders, answers = sys.argv[1:]
sys.stdin = open(orders)
os.dup2(os.open(answers, os.O_WRONLY), 1)
from fused_grpo.bench.heads import worker
from fused_grpo.bench.heads.implementations import Implementation, full_logits

def made(name):
    done = 0
    def logprobs(hidden, weight, targets, work):
        nonlocal done
        print("not an answer")
        if len(targets) == 200:
            done += 1
            with open(log, "a") as file:
                print(name, file=file)
        if name == "raises":
            raise RuntimeError("no such luck")
        if name == "dies" and done == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "hangs" and done == 2:
            time.sleep(600)
        return full_logits(hidden, weight, targets, work)
    return Implementation(name=name, version="1", setting="", logprobs=logprobs)

worker.named = made
worker.main(name, device)
"""


class Forked:
    """A worker that the fork server has started, with pipes as `subprocess.Popen` has them."""

    def __init__(self, fork_server, folder, *arguments):
        (folder / "program.py").write_text(PROGRAM)
        pipes = [folder / name for name in ("orders", "answers")]
        for pipe in pipes:
            pipe.unlink(missing_ok=True)
            os.mkfifo(pipe)
        process = fork_server.start(folder / "program.py", *arguments, *pipes, stage="torch")
        self.pid, self.poll, self.wait, self.kill = process.pid, process.poll, process.wait, process.kill
        self.stdin, self.stdout = pipes[0].open("w"), pipes[1].open()  # as soon as it has opened them, too


class Scripted(WorkerPool):
    """A pool whose implementations are those of `PROGRAM`, and the products alone."""

    def __init__(self, fork_server, folder):
        super().__init__("cpu")
        self.fork_server, self.folder, self.log = fork_server, folder, folder / "runs"

    def _start(self, name):
        if name == "products alone":
            return super()._start(name)
        return Forked(self.fork_server, self.folder, name, self.device, self.log)


@pytest.fixture(scope="module")
def pool(fork_server, tmp_path_factory):
    scripted = Scripted(fork_server, tmp_path_factory.mktemp("pool"))
    yield scripted
    scripted.close()


@pytest.fixture(scope="module")
def measured(pool):
    return pool.measure(WORK, ["products alone", "a", "b", "raises", "dies"], rounds=3, memory=False)


def test_rounds_are_interleaved_and_each_starts_with_the_next(pool, measured):
    with open(pool.log) as file:
        runs = [name for name in file.read().split() if name in ("a", "b")]
    assert (runs[:2], runs[2:4], runs[4:6], runs[6:]) == (["a", "b"], ["a", "b"], ["a", "b"], ["b", "a"])
    assert [len(measured[name].seconds) for name in ("products alone", "a", "b")] == [3, 3, 3]


def test_slow_ones_take_part_in_every_third_round(pool, measured):
    again = pool.measure(WORK, ["a", "b"], rounds=4, slow=["b"], memory=False)
    assert [len(again[name].seconds) for name in ("a", "b")] == [4, 2]


def test_what_is_measured_of_a_correct_one(measured):
    assert measured["a"].absent is None
    assert measured["a"].errors["value"] < 2e-5
    assert measured["a"].median > 0
    assert measured["a"].memory is None
    assert measured["products alone"].errors is None


def test_one_that_raises_is_absent_with_its_error(measured):
    assert measured["raises"].absent == "RuntimeError: no such luck"
    assert not measured["raises"].rejected
    assert measured["raises"].seconds == []


def test_a_killed_worker_is_absent_and_started_again_for_the_next_work(pool, measured):
    assert measured["dies"].absent == f"its process ended with status -{int(signal.SIGKILL)}"
    assert measured["dies"].memory is None
    work = replace(WORK, tokens=160)
    again = pool.measure(work, ["dies"], rounds=1)["dies"]
    assert again.absent is None
    assert len(again.seconds) == 1
    assert again.peak >= work.tokens * work.shape.vocab * 4


def test_one_that_was_killed_while_others_ran_is_reported(pool, measured):
    victim = pool._workers["b"]
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    assert pool._ask("b", do="measure") == {"failed": f"its process ended with status -{int(signal.SIGKILL)}"}
    pool._end("b")


def test_one_that_hangs_is_killed_and_reported(pool):
    pool.measure(WORK, ["b", "hangs"], rounds=0, memory=False)  # started, and its imports behind it
    pool.patience, patience = 5.0, pool.patience
    measured = pool.measure(WORK, ["b", "hangs"], rounds=2, memory=False)
    pool.patience = patience
    assert measured["hangs"].absent == "took longer than 5 s for 'prepare', and was killed"
    assert len(measured["b"].seconds) == 2


@pytest.mark.full
def test_full_logits_hold_the_logits_and_ours_do_not():
    work = Work(kind="loss", head="GPT-2", tokens=512, gradients="no_grad")
    peaks = {}
    for name in ("full logits", "fused-grpo"):
        worker = Worker(named(name), "cpu")
        memory = worker.prepare(vars(work), memory=True)["memory"]
        peaks[name] = max(memory["forward"], memory["backward"])
    assert peaks["full logits"] >= 512 * work.shape.vocab * 4
    assert peaks["fused-grpo"] < peaks["full logits"]


def test_one_that_is_wrong_is_rejected_before_it_has_the_work():
    implementation = Implementation(
        name="wrong", version=None, setting="", logprobs=lambda h, w, t, work: full_logits(h, w, (t + 1) % len(w), work)
    )
    worker, pool, noted = Worker(implementation, "cpu"), WorkerPool("cpu"), Measurement()
    pool._note(noted, worker.prepare(vars(WORK), memory=False))
    assert worker.batch is None
    assert noted.rejected
    assert noted.absent.startswith("wrong, and not timed: ")
    assert noted.errors["value"] > 1


def test_the_longest_is_what_still_had_memory():
    def logprobs(hidden, weight, targets, work):
        if len(targets) > 100:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return full_logits(hidden, weight, targets, work)

    worker = Worker(Implementation(name="small", version=None, setting="", logprobs=logprobs), "cpu")
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
            assert worker.prepare(vars(work), memory=True)["errors"]["value"] < 2e-5
