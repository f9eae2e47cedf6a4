"""What goes wrong on one process of two ends both, within seconds, and each says what it was."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from fused_grpo.trainer.distributed import failures as peers
from fused_grpo.trainer.distributed.failures import together

SCRIPT = Path(__file__).with_name("loop_run.py")
# The rank on which it happens, its reason, and what the other one says of it.
FAULTS = {
    "reward": (1, "no fours any more", "failed while sampling and scoring"),
    "exit": (1, "raised SystemExit", "failed while sampling and scoring"),
    "sync": (1, "the engine is gone", "failed while sending weights to the engine"),
    "backward": (1, "Tried to allocate 20.00 GiB", "has failed"),
    "disk": (0, "No space left on device", "failed while saving checkpoint-1"),
    "metrics": (0, "No space left on device", "failed while writing the metrics"),
    "start": (1, "no memory for vLLM", "failed while starting the engine"),
    "kill": (1, "killed, or out of memory?", "is gone without a word"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_all_processes_end_and_say_why(farm, time_limit, tmp_path, name):
    rank, reason, known = FAULTS[name]
    with time_limit(20) as clock:
        ranks = farm.start_ranks(SCRIPT, tmp_path, name, rank, json.dumps({"save_steps": 1}))
        codes = [process.wait() for process in ranks]
        clock.started = float((tmp_path / "happened").read_text())
    assert codes == [-9 if (name, index) == ("kill", rank) else 1 for index in range(2)], ranks[1 - rank].output
    other = ranks[1 - rank].output.splitlines()[-1]
    assert "errors.PeerError" in other
    assert f"rank {rank} of 2 {known}" in other
    assert reason in other
    assert name == "kill" or reason in ranks[rank].output


def test_a_rank_that_hangs_is_waited_for_as_long_as_ddp_timeout(farm, time_limit, tmp_path):
    with time_limit(30) as clock:
        # In which they have to find each other, too.
        ranks = farm.start_ranks(SCRIPT, tmp_path, "hang", 1, json.dumps({"ddp_timeout": 10}))
        assert ranks[0].wait() == 1, ranks[0].output
        assert (tmp_path / "happened").exists(), ranks[0].output
        clock.started = float((tmp_path / "happened").read_text())
    ranks[1].kill()
    assert "rank 1 of 2 did not come to a collective within ddp_timeout" in ranks[0].output


def test_a_failure_is_told_though_the_others_are_gone():
    def reduce(*_: object, **__: object) -> None:
        raise RuntimeError("gloo/transport/tcp/pair.cc: Connection closed by peer")

    alone = SimpleNamespace(num_processes=2, device="cpu", reduce=reduce)
    with pytest.raises(ValueError, match="no fours any more") as raised, together(alone, "scoring"):
        raise ValueError("no fours any more")
    assert "Connection closed" in str(raised.value.__cause__)


@pytest.mark.parametrize(
    ("left", "of", "said"),
    [
        ({0: "timed out"}, 2, "rank 0 of 2 waited longer than ddp_timeout for this one and left"),
        ({0: "timed out"}, 3, "rank 2 of 3 did not come to a collective within ddp_timeout"),
        ({0: "gone"}, 2, "the connection between the 2 ranks broke"),
        ({0: "gone"}, 3, "rank 2 of 3 is gone without a word"),
    ],
)
def test_what_others_said_when_they_left_explains_why_they_are_gone(monkeypatch, left, of, said):
    store = HashStore()
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", lambda: store)
    monkeypatch.setattr(peers, "PATIENCE", 0.0)
    monkeypatch.setattr(peers, "_numbers", itertools.repeat(0))  # as on every process
    for rank, word in left.items():
        here = peers._Words(SimpleNamespace(process_index=rank, num_processes=of))
        here.leave(None, timed_out=word == "timed out")
    words = peers._Words(SimpleNamespace(process_index=1, num_processes=of))
    words.leave(None)
    assert said in words.explanation(timed_out=False)
