"""A rank that fails before it connects to the others: they end with its reason, instead of waiting for it."""

from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("start_run.py")
FAULTS = {
    "tracker": "UnavailableError: got report_to='wandb', which is not installed",
    "options": "InputError: got beta=-1.0",
    "environment": "UnsupportedError: got ACCELERATE_DYNAMO_BACKEND='inductor'",
    "train": "CheckpointError: got ",
    "backend": "InputError: got ddp_backend='nccl' on a CPU, want gloo",
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", FAULTS)
def test_the_others_end_with_the_reason_of_a_rank_that_cannot_start(fork_server, time_limit, tmp_path, name, rank):
    with time_limit(60):  # of the 300 of ddp_timeout
        ranks = fork_server.start_ranks(SCRIPT, tmp_path, name, rank)
        codes = [process.wait() for process in ranks]
    assert codes == [1, 1]
    own, other = ranks[rank].output.splitlines()[-1], ranks[1 - rank].output.splitlines()[-1]
    assert FAULTS[name] in own, own
    assert f"errors.PeerError: rank {rank} of 2 failed while starting" in other, other
    assert FAULTS[name] in other


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_never_come_are_waited_for_as_long_as_ddp_timeout(fork_server, time_limit, tmp_path, rank):
    with time_limit(60):
        ranks = fork_server.start_ranks(SCRIPT, tmp_path, "script", rank)
        assert [process.wait() for process in ranks] == [1, 1]
    error = ranks[1 - rank].output
    assert "UnavailableError: got " in error, error
    assert "WORLD_SIZE='2'" in error
    assert "want all 2 to come within ddp_timeout=4; fix: the log of one that did not" in error
