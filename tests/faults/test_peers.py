"""What goes wrong on one process of two ends both, within seconds, and each says what it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("loop_run.py")
PEER = "all processes end, with the reason of the first"

# What, its policy, on which rank, its reason, and how the other one came to know.
FAULTS = {
    "reward": (
        "a reward function raises on one rank of several",
        PEER,
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
        PEER,
        1,
        "the engine is gone",
        "failed while handing weights to the engine",
    ),
    "backward": (
        "a rank runs out of memory in the backward pass",
        PEER,
        1,
        "Tried to allocate 20.00 GiB",
        "has failed",
    ),
    "disk": (
        "the disk is full while rank 0 saves",
        PEER,
        0,
        "No space left on device",
        "failed while saving checkpoint-1",
    ),
    "kill": (
        "a rank is killed (kill -9)",
        "the others end and name it",
        1,
        "killed, or out of memory?",
        "is gone without a word",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_all_processes_end_and_say_why(farm, fault, tmp_path, name):
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
    with fault("a rank hangs", policy="the others wait for ddp_timeout seconds and end", within=20) as clock:
        ranks = farm.start_ranks(SCRIPT, tmp_path, "hang", 1, json.dumps({"ddp_timeout": 4}))
        assert ranks[0].wait() == 1
        clock.started = float((tmp_path / "happened").read_text())
    ranks[1].kill()
    assert "rank 1 of 2 did not come to a collective within ddp_timeout" in ranks[0].output
