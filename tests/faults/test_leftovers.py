"""What a killed trainer leaves in memory or in the temporary directory the next one removes; what is in use stays."""

import errno
import fcntl
import tempfile
import time
from types import SimpleNamespace

import pytest
import torch

from fused_grpo.trainer.collect.start_checks import check_saving
from fused_grpo.trainer.engines import weight_files
from fused_grpo.trainer.engines.abandoned import remove_abandoned
from fused_grpo.trainer.engines.weight_files import temporary_weight_files

SYNC = """
import sys, time, torch
from fused_grpo.trainer.engines import weight_files
weight_files._SHARED_MEMORY = sys.argv[1]
with weight_files.temporary_weight_files([("weight", torch.zeros(8))]) as folder:
    print("published", folder, flush=True)
    time.sleep(60)
"""
SAVING = """
import sys, tempfile, time
from types import SimpleNamespace
from fused_grpo.trainer.collect.start_checks import check_saving
tempfile.tempdir = sys.argv[1]

def save_pretrained(folder):
    (folder / "config.json").touch()
    print("published", folder, flush=True)
    time.sleep(60)

part = SimpleNamespace(save_pretrained=save_pretrained)
args = SimpleNamespace(model_init_kwargs=None)
check_saving(SimpleNamespace(args=args, tokenizer=part, config=part, model=None, model_path=None, peft_config=None))
"""


@pytest.fixture
def syncing(fork_server, tmp_path, monkeypatch):
    """Starts a process that is in the middle of a sync or of its first checks, in a directory of this test's own."""
    script = tmp_path / "script.py"
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setattr(weight_files, "_SHARED_MEMORY", str(shared))

    def start(text=SYNC):
        script.write_text(text)
        process, deadline = fork_server.start(script, shared), time.monotonic() + 60
        while "published" not in process.output:
            assert process.poll() is None, process.output
            assert time.monotonic() < deadline, process.output
            time.sleep(0.01)
        return process

    return shared, start


def test_folders_of_killed_processes_go_and_those_of_living_ones_stay(time_limit, syncing):
    (shared, start), weights = syncing, [("weight", torch.ones(8))]
    dead, living = start(), start()
    folders = [process.output.split()[1] for process in (dead, living)]
    dead.kill()
    assert dead.wait() == -9
    with time_limit(5), temporary_weight_files(weights) as own_folder:
        assert {str(path) for path in shared.iterdir()} == {folders[1], str(own_folder)}
    living.kill()
    assert living.wait() == -9


def test_leftovers_of_a_process_killed_in_its_checks_go_with_the_next(syncing, monkeypatch):
    directory, start = syncing
    dead = start(SAVING)
    dead.kill()
    assert dead.wait() == -9
    assert [path.name for path in directory.rglob("*.json")] == ["config.json"]
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    saved = []
    part = SimpleNamespace(save_pretrained=saved.append)
    args = SimpleNamespace(model_init_kwargs=None)
    check_saving(SimpleNamespace(args=args, tokenizer=part, config=part, model=None, model_path=None, peft_config=None))
    assert len(saved) == 2  # tokenizer and config
    assert list(directory.iterdir()) == []


def test_in_a_directory_that_other_machines_may_share_nothing_is_removed(tmp_path):
    other_folder = tmp_path / "fused-grpo-weights-x"
    other_folder.mkdir()
    with temporary_weight_files([("weight", torch.ones(8))], directory=str(tmp_path)):
        assert other_folder.exists()


def test_a_file_system_without_locks_ends_no_sync(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    other_folder = tmp_path / "fused-grpo-weights-x"
    other_folder.mkdir()
    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(weight_files, "_SHARED_MEMORY", str(tmp_path))
    with temporary_weight_files([("weight", torch.ones(8))]) as own_folder:
        assert set(tmp_path.iterdir()) == {other_folder, own_folder}


def test_a_link_of_that_name_is_not_followed(tmp_path):
    shared, target = tmp_path / "shared", tmp_path / "mine"
    shared.mkdir()
    target.mkdir()
    (target / "thesis.txt").write_text("mine")
    (shared / "fused-grpo-weights-x").symlink_to(target)
    remove_abandoned(str(shared))
    assert (target / "thesis.txt").read_text() == "mine"
