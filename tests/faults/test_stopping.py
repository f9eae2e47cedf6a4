"""SIGTERM, SIGHUP and SIGUSR1 end a run after the current step, with a checkpoint from which it resumes bit for bit."""

import json
import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from fused_grpo.trainer.distributed import failures
from fused_grpo.trainer.distributed.failures import StopOnSignal

SCRIPT = Path(__file__).with_name("loop_run.py")


@pytest.fixture(autouse=True)
def _signals_as_in_a_terminal():
    """Under nohup a whole suite ignores SIGHUP, and the trainer leaves what is ignored alone."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_sigterm_on_one_rank_stops_all_after_the_step_with_a_checkpoint(fork_server, time_limit, tmp_path):
    with time_limit(20) as clock:
        # What a resumed run needs is saved, whatever save_only_model says.
        options = {"steps_per_generation": 2, "save_only_model": True}
        ranks = fork_server.start_ranks(SCRIPT, tmp_path, "term", 1, json.dumps(options))
        assert [process.wait() for process in ranks] == [143, 143], ranks[0].output
        clock.started = float((tmp_path / "happened").read_text())
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-1"]
    (tmp_path / "whole").mkdir()
    fork_server.run(SCRIPT, tmp_path / "whole", "none", 0, json.dumps(options), processes=2)
    fork_server.run(SCRIPT, tmp_path, "none", 0, json.dumps(options | {"resume_from_checkpoint": True}), processes=2)
    ends = [torch.load(folder / "after-1.pt", weights_only=True) for folder in (tmp_path / "whole", tmp_path)]
    for name, tensor in ends[0]["parameters"].items():
        assert torch.equal(tensor, ends[1]["parameters"][name]), name


@pytest.mark.parametrize("fault", ["hup", "usr1"])
def test_signals_of_schedulers_and_terminals_are_sigterms(fork_server, tmp_path, fault):
    process = fork_server.start(SCRIPT, tmp_path, fault, 0, "{}")
    assert process.wait() == 143, process.output
    assert f"stopped by SIG{fault.upper()} after step 1" in process.output
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-1"]


def test_ctrl_c_ends_at_once(fork_server, time_limit, tmp_path):
    with time_limit(20) as clock:
        process = fork_server.start(SCRIPT, tmp_path, "interrupt", 0, json.dumps({"save_steps": 1}))
        assert process.wait() == -signal.SIGINT, process.output
        clock.started = float((tmp_path / "happened").read_text())
    assert process.output.splitlines()[-1] == "KeyboardInterrupt"
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-1"]


def test_a_second_sigterm_ends_the_process_but_not_right_behind_the_first(fork_server, tmp_path):
    script = tmp_path / "twice.py"
    script.write_text(
        "import os, signal, time\n"
        "from fused_grpo.trainer.distributed import failures\n"
        "with failures.StopOnSignal() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print(stop.requested, flush=True)\n"
        "    failures.SAME_REQUEST_SECONDS = -1.0\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(60)\n"
    )
    process = fork_server.start(script)
    assert process.wait(30) == -signal.SIGTERM
    assert process.output == "True\n"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # Python 3.12's, for any process with threads
def test_sigterm_ends_a_forked_process():
    with StopOnSignal() as stop:
        if (child := os.fork()) == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert not stop.requested


def test_a_request_to_stop_does_not_outlive_its_run():
    with StopOnSignal() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
    with stop:
        assert not stop.requested


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_the_handler_that_was_there_is_put_back(number):
    before = signal.getsignal(number)
    with StopOnSignal() as stop:
        assert signal.getsignal(number) is not before
        os.kill(os.getpid(), number)
    assert (stop.requested, stop.reason) == (True, number.name)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_that_is_ignored_or_handled_already_is_left_alone(number, handler):
    """By nohup, or by a plugin of the scheduler."""
    before = signal.signal(number, handler)
    try:
        with StopOnSignal() as stop:
            os.kill(os.getpid(), number)
        assert not stop.requested
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


def test_another_signal_is_no_second_request(monkeypatch):
    """Slurm sends SIGUSR1 some time before SIGTERM; the step may not be done by then."""
    monkeypatch.setattr(failures, "SAME_REQUEST_SECONDS", 0.0)
    with StopOnSignal() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.reason == "SIGUSR1"


@pytest.mark.parametrize("answers", [True, False])
def test_the_first_signal_is_answered_at_once_by_the_main_process(answers, monkeypatch, capfd):
    monkeypatch.setattr(failures, "SAME_REQUEST_SECONDS", 60.0)
    with StopOnSignal(answers=answers):
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)
        text = "fused-grpo: SIGUSR1: the run ends with a checkpoint after this step; a second SIGUSR1 ends it at once"
        assert capfd.readouterr().err.split("\n") == (["", text, ""] if answers else [""])


def test_a_thread_leaves_signals_alone():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def enter() -> None:
        with StopOnSignal():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # Python 3.12's, for any process with threads
def test_sigterm_stops_a_run_of_a_fork_whose_trainer_was_made_before():
    stop = StopOnSignal()
    if (child := os.fork()) == 0:
        with stop:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(42 if stop.requested else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
