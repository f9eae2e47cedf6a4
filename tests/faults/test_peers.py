"""A failure on one rank of two ends both within seconds, and both errors name it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from fused_grpo.trainer.distributed.failures import all_ranks_succeed, report_failure

SCRIPT = Path(__file__).with_name("loop_run.py")
POLICY = "all ranks end, with the reason of the first failure"

# What, its policy, on which rank, its reason, and how the error of the other rank puts it.
FAULTS = {
    "reward": (
        "a reward function raises on one rank of several",
        POLICY,
        1,
        "no fours any more",
        "failed while sampling and scoring",
    ),
    "exit": (
        "a reward function calls sys.exit",
        "as one that raises",
        1,
        "raised SystemExit",
        "failed while sampling and scoring",
    ),
    "sync": (
        "an engine refuses weights on one rank of several",
        POLICY,
        1,
        "the engine is gone",
        "failed while handing weights to the engine",
    ),
    "backward": (
        "a rank runs out of memory in the backward pass",
        POLICY,
        1,
        "Tried to allocate 20.00 GiB",
        "has failed",
    ),
    "disk": (
        "the disk is full while rank 0 saves",
        POLICY,
        0,
        "No space left on device",
        "failed while saving checkpoint-1",
    ),
    "metrics": (
        "the disk is full while rank 0 writes its log",
        POLICY,
        0,
        "No space left on device",
        "failed while writing the metrics",
    ),
    "start": (
        "an engine does not start on one rank of several",
        POLICY,
        1,
        "no memory for vLLM",
        "failed while starting the engine",
    ),
    "kill": (
        "a rank is killed (kill -9)",
        "the others end and name it",
        1,
        "killed, or out of memory?",
        "ended without reporting an error",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_all_ranks_end_and_name_the_first_failure(farm, fault, tmp_path, name):
    what, policy, rank, reason, known = FAULTS[name]
    with fault(what, policy=policy, within=20) as clock:
        ranks = farm.start_ranks(SCRIPT, tmp_path, name, rank, json.dumps({"save_steps": 1}))
        codes = [process.wait() for process in ranks]
        clock.started = float((tmp_path / "happened").read_text())
    assert codes == [-9 if (name, index) == ("kill", rank) else 1 for index in range(2)], ranks[1 - rank].output
    other = ranks[1 - rank].output.splitlines()[-1]
    assert "errors.PeerError" in other
    assert f"rank {rank} of 2 {known}" in other
    assert reason in other
    assert name == "kill" or reason in ranks[rank].output


def test_a_rank_that_hangs_is_waited_for_as_long_as_ddp_timeout(farm, fault, tmp_path):
    with fault("a rank hangs", policy="the others wait for ddp_timeout seconds and end", within=30) as clock:
        # In which they have to find each other, too.
        ranks = farm.start_ranks(SCRIPT, tmp_path, "hang", 1, json.dumps({"ddp_timeout": 10}))
        assert ranks[0].wait() == 1, ranks[0].output
        assert (tmp_path / "happened").exists(), ranks[0].output
        clock.started = float((tmp_path / "happened").read_text())
    ranks[1].kill()
    assert "rank 1 of 2 did not reach a collective within ddp_timeout" in ranks[0].output


def test_an_error_of_this_rank_is_raised_although_the_others_have_ended():
    def reduce(*_: object, **__: object) -> None:
        raise RuntimeError("gloo/transport/tcp/pair.cc: Connection closed by peer")

    alone = SimpleNamespace(num_processes=2, device="cpu", reduce=reduce)
    with pytest.raises(ValueError, match="no fours any more") as raised, all_ranks_succeed(alone, "scoring"):
        raise ValueError("no fours any more")
    assert "Connection closed" in str(raised.value.__cause__)


def test_a_failure_is_written_to_the_error_file_of_torchrun(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(ValueError, match="no fours"), report_failure(SimpleNamespace(num_processes=1)):
        raise ValueError("no fours any more")
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "ValueError: no fours any more"
