"""SIGTERM ends a run after the step it is in, with a checkpoint from which it goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import torch

from fused_grpo.trainer.stopping import StopOnSigterm

SCRIPT = Path(__file__).with_name("loop_run.py")


def test_sigterm_on_one_rank_stops_all_after_the_step_with_a_checkpoint(farm, fault, tmp_path):
    policy = "finish the step, save, exit with 143; all ranks at the same step"
    with fault("SIGTERM", policy=policy, within=20) as clock:
        ranks = farm.start_ranks(SCRIPT, tmp_path, "term", 1, json.dumps({"steps_per_generation": 2}))
        assert [process.wait() for process in ranks] == [143, 143], ranks[0].output
        clock.started = float((tmp_path / "happened").read_text())
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-1"]
    (tmp_path / "whole").mkdir()
    farm.run(SCRIPT, tmp_path / "whole", "none", 0, json.dumps({"steps_per_generation": 2}), processes=2)
    again = {"steps_per_generation": 2, "resume_from_checkpoint": True}
    farm.run(SCRIPT, tmp_path, "none", 0, json.dumps(again), processes=2)
    ends = [torch.load(folder / "after-1.pt", weights_only=True) for folder in (tmp_path / "whole", tmp_path)]
    for name, tensor in ends[0]["parameters"].items():
        assert torch.equal(tensor, ends[1]["parameters"][name]), name


def test_ctrl_c_ends_at_once(farm, fault, tmp_path):
    with fault("Ctrl-C", policy="ends in the middle of the step; the last checkpoint stays", within=20) as clock:
        process = farm.start(SCRIPT, tmp_path, "interrupt", 0, json.dumps({"save_steps": 1}))
        assert process.wait() == -signal.SIGINT, process.output
        clock.started = float((tmp_path / "happened").read_text())
    assert process.output.splitlines()[-1] == "KeyboardInterrupt"
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-1"]


def test_a_second_sigterm_ends_the_process_and_one_right_behind_the_first_does_not(farm, tmp_path):
    script = tmp_path / "twice.py"
    script.write_text(
        "import os, signal, time\n"
        "from fused_grpo.trainer import stopping\n"
        "with stopping.StopOnSigterm() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print(stop.asked, flush=True)\n"
        "    stopping.ECHO_SECONDS = -1.0\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('goes on')\n"
    )
    process = farm.start(script)
    assert process.wait() == -signal.SIGTERM
    assert process.output == "True\n"


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
