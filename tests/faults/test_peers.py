"""A failure on one rank of two ends both within seconds, and both errors name it."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from fused_grpo.trainer.distributed import failures
from fused_grpo.trainer.distributed.failures import all_ranks_succeed, report_failure

SCRIPT = Path(__file__).with_name("loop_run.py")
# The rank on which it happens, its reason, and what the error of the other rank says.
FAULTS = {
    "reward": (1, "no fours any more", "failed while sampling and scoring"),
    "exit": (1, "raised SystemExit", "failed while sampling and scoring"),
    "sync": (1, "the engine is gone", "failed while sending weights to the engine"),
    "backward": (1, "Tried to allocate 20.00 GiB", "has failed"),
    "freeze": (1, "without a gradient, such as model.lm_head.weight", "has failed"),
    "disk": (0, "No space left on device", "failed while saving checkpoint-1"),
    "metrics": (0, "No space left on device", "failed while writing the metrics"),
    "on_init_end": (1, "no fours any more", "has failed"),
    "close": (1, "the engine is gone", "has failed"),
    "start": (1, "no memory for vLLM", "failed while starting the engine"),
    "kill": (1, "killed, or out of memory?", "ended without reporting an error"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_all_ranks_end_and_name_the_first_failure(fork_server, time_limit, tmp_path, name):
    rank, reason, report = FAULTS[name]
    with time_limit(20) as clock:
        ranks = fork_server.start_ranks(SCRIPT, tmp_path, name, rank, json.dumps({"save_steps": 1}))
        codes = [process.wait() for process in ranks]
        clock.started = float((tmp_path / "happened").read_text())
    assert codes == [-9 if (name, index) == ("kill", rank) else 1 for index in range(2)], ranks[1 - rank].output
    other = ranks[1 - rank].output.splitlines()[-1]
    assert "errors.PeerError" in other
    assert f"rank {rank} of 2 {report}" in other
    assert reason in other
    assert name == "kill" or reason in ranks[rank].output


def test_a_rank_that_hangs_is_waited_for_as_long_as_ddp_timeout(fork_server, time_limit, tmp_path):
    with time_limit(30) as clock:
        # In which they have to find each other, too.
        ranks = fork_server.start_ranks(SCRIPT, tmp_path, "hang", 1, json.dumps({"ddp_timeout": 10}))
        assert ranks[0].wait() == 1, ranks[0].output
        assert (tmp_path / "happened").exists(), ranks[0].output
        clock.started = float((tmp_path / "happened").read_text())
    ranks[1].kill()
    assert "rank 1 of 2 did not reach a collective within ddp_timeout" in ranks[0].output


def test_an_error_of_this_rank_is_raised_although_the_others_have_ended(monkeypatch):
    def gather(reasons: list[str | None]) -> None:
        raise RuntimeError("gloo/transport/tcp/pair.cc: Connection closed by peer")

    monkeypatch.setattr(failures, "gather_object", gather)
    alone = SimpleNamespace(num_processes=2)
    with pytest.raises(ValueError, match="no fours any more") as raised, all_ranks_succeed(alone, "scoring"):
        raise ValueError("no fours any more")
    assert "Connection closed" in str(raised.value.__cause__)


def test_a_rank_that_held_the_store_is_not_said_to_have_reported_nothing(monkeypatch):
    def gone(*_: object) -> None:
        raise RuntimeError("Broken pipe")

    store = SimpleNamespace(set=gone, check=gone)
    monkeypatch.setattr(failures.distributed.distributed_c10d, "_get_default_store", lambda: store)
    here = failures._FailureStore(SimpleNamespace(process_index=1, num_processes=2))
    assert here.explanation(timed_out=False).startswith("rank 0 of 2 ended, and with it the store of what it may have")


def test_a_failure_is_written_to_the_error_file_of_torchrun(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(ValueError, match="no fours"), report_failure(SimpleNamespace(num_processes=1)):
        raise ValueError("no fours any more")
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "ValueError: no fours any more"
