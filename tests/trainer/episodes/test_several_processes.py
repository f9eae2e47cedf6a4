"""Episodes on two processes: the tasks, the tokens, the metrics and the update of one."""

import json
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "ranks_run.py"


@pytest.fixture(scope="module")
def ranks(fork_server, tmp_path_factory):
    ranks = {}
    for processes, sequences in ((1, 8), (2, 4)):
        out = tmp_path_factory.mktemp(f"of-{processes}")
        fork_server.run(SCRIPT, out, sequences, processes=processes)
        ranks[processes] = [torch.load(out / f"rank-{rank}.pt", weights_only=True) for rank in range(processes)]
    return ranks


def test_two_processes_play_the_episodes_of_one(ranks):
    (one,), two = ranks[1], ranks[2]
    assert sorted(map(str, json.loads(one["told"]))) == sorted(
        str(told) for rank in two for told in json.loads(rank["told"])
    )
    assert len({str(prompt) for prompt, _, _ in json.loads(one["told"])}) == 2  # one task for each group


def test_two_processes_make_the_update_of_one(ranks):
    (one,), two = ranks[1], ranks[2]
    for name, weight in one["weights"].items():
        for rank in two:
            torch.testing.assert_close(rank["weights"][name], weight, rtol=0, atol=1e-5)  # it moved by 2e-3
    names = [name for name in one["logged"] if name.startswith(("tools/", "sampling/", "reward", "completions/"))]
    assert {"tools/turns", "sampling/sampling_logp_difference/turn_4/max"} <= set(names)
    names.remove("sampling/bit_equal_fraction")  # rounding depends on the batch
    for name in names:
        assert two[0]["logged"][name] == pytest.approx(one["logged"][name], abs=1e-6), name
