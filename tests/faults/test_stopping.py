"""SIGTERM ends a run after the step it is in, with a checkpoint from which it goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from fused_grpo.trainer.distributed import stopping
from fused_grpo.trainer.distributed.stopping import StopOnSigterm

SCRIPT = Path(__file__).with_name("loop_run.py")


def test_sigterm_on_one_rank_stops_all_after_the_step_with_a_checkpoint(farm, time_limit, tmp_path):
    with time_limit(20) as clock:
        # What a resumed run needs is saved, whatever save_only_model says.
        options = {"steps_per_generation": 2, "save_only_model": True}
        ranks = farm.start_ranks(SCRIPT, tmp_path, "term", 1, json.dumps(options))
        assert [process.wait() for process in ranks] == [143, 143], ranks[0].output
        clock.started = float((tmp_path / "happened").read_text())
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-1"]
    (tmp_path / "whole").mkdir()
    farm.run(SCRIPT, tmp_path / "whole", "none", 0, json.dumps(options), processes=2)
    farm.run(SCRIPT, tmp_path, "none", 0, json.dumps(options | {"resume_from_checkpoint": True}), processes=2)
    ends = [torch.load(folder / "after-1.pt", weights_only=True) for folder in (tmp_path / "whole", tmp_path)]
    for name, tensor in ends[0]["parameters"].items():
        assert torch.equal(tensor, ends[1]["parameters"][name]), name


def test_ctrl_c_ends_at_once(farm, time_limit, tmp_path):
    with time_limit(20) as clock:
        process = farm.start(SCRIPT, tmp_path, "interrupt", 0, json.dumps({"save_steps": 1}))
        assert process.wait() == -signal.SIGINT, process.output
        clock.started = float((tmp_path / "happened").read_text())
    assert process.output.splitlines()[-1] == "KeyboardInterrupt"
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-1"]


def test_a_second_sigterm_ends_a_process_that_waits_in_c_and_one_right_behind_the_first_does_not(farm, tmp_path):
    script = tmp_path / "twice.py"
    script.write_text(
        "import ctypes, os, signal, threading, time\n"
        "from fused_grpo.trainer.distributed import stopping\n"
        "with stopping.StopOnSigterm() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(0.5)\n"
        "    print(stop.asked, flush=True)\n"
        "    stopping.ECHO_SECONDS = -1.0\n"
        "    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()\n"
        "    mutex = ctypes.create_string_buffer(64)\n"
        "    for _ in range(2):\n"
        "        ctypes.CDLL(None).pthread_mutex_lock(mutex)  # waits for itself, in C\n"
    )
    process = farm.start(script)
    assert process.wait(30) == 143
    assert process.output == "True\n"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # Python 3.12's, for any process with threads
def test_the_sigterms_of_forked_processes_are_not_ours(monkeypatch):
    ended = list[int]()
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(stopping, "ECHO_SECONDS", -1.0)
    with StopOnSigterm() as stop:
        for _ in range(2):
            if (child := os.fork()) == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert not stop.asked
    assert ended == []  # `with` has waited for the thread


def test_a_stop_that_was_asked_for_is_asked_once():
    with StopOnSigterm() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.asked
    with stop:
        assert not stop.asked


def test_a_handler_that_python_has_not_installed_gives_way_to_the_default():
    before = signal.getsignal(signal.SIGTERM)
    with StopOnSigterm() as stop:
        stop._before = None  # what Python says of it
    assert signal.signal(signal.SIGTERM, before) is signal.SIG_DFL


def test_who_was_told_of_signals_before_is_told_again():
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write)
    try:
        with StopOnSigterm():
            pass
        assert signal.set_wakeup_fd(before) == write
    finally:
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)


def test_the_handler_that_was_there_is_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with StopOnSigterm() as stop:
        assert signal.getsignal(signal.SIGTERM) is not before
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.asked
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_thread_leaves_signals_alone():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def enter() -> None:
        with StopOnSigterm():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]
