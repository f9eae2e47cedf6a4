"""What a killed trainer leaves in shared memory is removed by the next one; what is in use stays."""

from __future__ import annotations

import errno
import fcntl
import time

import pytest
import torch

from fused_grpo.trainer.engines import weight_files
from fused_grpo.trainer.engines.weight_files import remove_abandoned, temporary_weight_files

SCRIPT = """
import sys, time, torch
from fused_grpo.trainer.engines import weight_files
weight_files._SHARED_MEMORY = sys.argv[1]
with weight_files.temporary_weight_files([("weight", torch.zeros(8))]) as folder:
    print("published", folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def syncing(farm, tmp_path, monkeypatch):
    """Starts a process that is in the middle of a sync, in a shared memory of this test's own."""
    script = tmp_path / "sync.py"
    script.write_text(SCRIPT)
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setattr(weight_files, "_SHARED_MEMORY", str(shared))

    def start():
        process, deadline = farm.start(script, shared), time.monotonic() + 60
        while "published" not in process.output:
            assert process.poll() is None, process.output
            assert time.monotonic() < deadline, process.output
            time.sleep(0.01)
        return process

    return shared, start


def test_folders_of_killed_processes_are_removed_and_those_of_living_ones_stay(time_limit, syncing):
    (shared, start), weights = syncing, [("weight", torch.ones(8))]
    dead, living = start(), start()
    theirs = [process.output.split()[1] for process in (dead, living)]
    dead.kill()
    assert dead.wait() == -9
    with time_limit(5), temporary_weight_files(weights) as mine:
        assert {str(path) for path in shared.iterdir()} == {theirs[1], str(mine)}
    living.kill()
    assert living.wait() == -9


def test_in_a_directory_that_other_machines_may_share_nothing_is_removed(tmp_path):
    theirs = tmp_path / "fused-grpo-weights-x"
    theirs.mkdir()
    with temporary_weight_files([("weight", torch.ones(8))], directory=str(tmp_path)):
        assert theirs.exists()


def test_a_file_system_without_locks_ends_no_sync(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    theirs = tmp_path / "fused-grpo-weights-x"
    theirs.mkdir()
    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(weight_files, "_SHARED_MEMORY", str(tmp_path))
    with temporary_weight_files([("weight", torch.ones(8))]) as mine:
        assert set(tmp_path.iterdir()) == {theirs, mine}


def test_a_link_of_that_name_is_not_followed(tmp_path):
    shared, mine = tmp_path / "shared", tmp_path / "mine"
    shared.mkdir()
    mine.mkdir()
    (mine / "thesis.txt").write_text("mine")
    (shared / "fused-grpo-weights-x").symlink_to(mine)
    remove_abandoned(str(shared))
    assert (mine / "thesis.txt").read_text() == "mine"
