"""One run at a time in an output directory; what a dead one has left keeps no other out."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys

import pytest

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer.checkpoint import output_dir
from fused_grpo.trainer.checkpoint.output_dir import LOCK_FILE, RunLock, refuse_alive

HOLD = """
import sys, time
from pathlib import Path
from fused_grpo.trainer.checkpoint.output_dir import RunLock
RunLock.acquire(lock := RunLock(), Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(60)
"""


@pytest.fixture
def lock():
    lock = RunLock()
    yield lock
    lock.release()


def test_a_second_run_is_kept_out_until_the_first_has_ended(lock, tmp_path):
    lock.acquire(tmp_path)
    for ask in (RunLock().acquire, refuse_alive):
        with pytest.raises(CheckpointError, match=rf"being trained now \(process {os.getpid()} on .*fix: "):
            ask(tmp_path)
    lock.release()
    refuse_alive(tmp_path)
    lock.acquire(tmp_path)
    lock.release()
    assert os.listdir(tmp_path) == []


def test_the_lock_of_a_killed_process_keeps_no_run_out(lock, tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(CheckpointError, match=f"process {process.pid}"):
            lock.acquire(tmp_path)
        process.send_signal(signal.SIGKILL)
    refuse_alive(tmp_path)
    lock.acquire(tmp_path)
    assert json.loads((tmp_path / LOCK_FILE).read_text())["process"] == os.getpid()


@pytest.mark.parametrize("content", ["", "{", "[" * 10_000, '{"host": "elsewhere", "process": 1, "since": "1999"}'])
def test_what_a_file_without_a_lock_says_counts_for_nothing(lock, tmp_path, content):
    """Of another machine, or from before a reboot."""
    (tmp_path / LOCK_FILE).write_text(content)
    refuse_alive(tmp_path)
    lock.acquire(tmp_path)


def test_a_directory_without_locks_is_refused_by_that_reason(lock, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(CheckpointError, match=r"a file system without locks \(No locks available\).*fix: "):
        lock.acquire(tmp_path)


def test_a_file_that_its_owner_removes_meanwhile_is_no_lock(lock, tmp_path, monkeypatch):
    working, opened = output_dir._lock, []

    def removed_first(descriptor, kind, directory):
        working(descriptor, kind, directory)
        if not opened:
            (tmp_path / LOCK_FILE).unlink()
        opened.append(descriptor)

    monkeypatch.setattr(output_dir, "_lock", removed_first)
    lock.acquire(tmp_path)
    assert len(opened) == 2
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="being trained now"):
        refuse_alive(tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_something_else_of_that_name_is_refused(lock, tmp_path, make):
    make(tmp_path / LOCK_FILE)
    with pytest.raises(CheckpointError, match="which cannot be written"):
        lock.acquire(tmp_path)


def test_a_check_beside_it_keeps_no_run_out(lock, tmp_path):
    """A check holds the lock as well, for a moment."""
    (tmp_path / LOCK_FILE).touch()
    checking = os.open(tmp_path / LOCK_FILE, os.O_RDONLY)
    fcntl.flock(checking, fcntl.LOCK_SH)
    import threading

    threading.Timer(0.15, os.close, [checking]).start()
    lock.acquire(tmp_path)
