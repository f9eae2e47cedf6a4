"""A second run in an output directory: one that has ended is moved aside whole, and one that is alive keeps it out."""

import errno
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fused_grpo.errors import CheckpointError, RewardError
from fused_grpo.trainer.checkpoint import output_dir
from fused_grpo.trainer.checkpoint.checkpoint import checkpoints, newest_checkpoint, write_manifest
from fused_grpo.trainer.checkpoint.output_dir import (
    LOCK_FILE,
    RunLock,
    check_output_dir,
    prepare_output_dir,
    refuse_alive,
)
from fused_grpo.trainer.common.file_names import RUN_FILES
from fused_grpo.trainer.logging.run_log import RunLog

RUN = Path(__file__).parents[1] / "resume_run.py"
THEIRS = {"notes.md": b"mine", "data/rows.jsonl": b"{}", ".checkpoint-9.notes": b"mine"}


def everything(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def write(directory: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)


def write_run(directory: Path, text: bytes) -> dict[str, bytes]:
    """A run with everything that one leaves; returns its files."""
    log = RunLog(directory)
    log.log_config({})
    log.log_metrics({"text": text.decode()})
    names = ("report.html", "reward.svg", "rollouts-old.jsonl", "nonfinite-step-2/rank-0.json", "trackers/x/events")
    write(directory, dict.fromkeys(names, text))
    saved = (".checkpoint-5.previous", "checkpoint-2", "checkpoint-4", "final")
    write(directory, {f"{name}/model.safetensors": text for name in saved})
    for name in saved:
        write_manifest(directory / name)
    return {name: content for name, content in everything(directory).items() if not name.startswith("former-run-")}


def test_a_run_is_moved_aside_byte_for_byte_and_the_users_files_stay(tmp_path, caplog):
    first = write_run(tmp_path, b"first")
    write(tmp_path, THEIRS)
    with caplog.at_level(logging.WARNING):
        prepare_output_dir(tmp_path)
    assert everything(tmp_path) == THEIRS | {f"former-run-1/{name}": content for name, content in first.items()}
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path} held another run, whose files are now in {tmp_path / 'former-run-1'} "
        "(instead of this, resume_from_checkpoint continues it, and overwrite_output_dir removes it)"
    ]
    second = write_run(tmp_path, b"second")
    prepare_output_dir(tmp_path)
    assert everything(tmp_path / "former-run-1") == first
    assert everything(tmp_path / "former-run-2") == {name: second[name] for name in first}
    prepare_output_dir(tmp_path, overwrite=True)
    assert everything(tmp_path / "former-run-1") == first


def test_a_directory_without_a_run_or_of_a_resumed_one_stays_as_it_is(tmp_path, caplog):
    write(tmp_path, THEIRS | {"report.html": b"a copy", "trackers/a": b"b", "checkpoint-x/a": b"b"})
    before = everything(tmp_path)
    prepare_output_dir(tmp_path)
    assert everything(tmp_path) == before
    before |= write_run(tmp_path, b"run")
    prepare_output_dir(tmp_path, resume=True)
    assert everything(tmp_path) == before
    assert not caplog.records


def test_resuming_and_rotation_see_the_present_run_alone(tmp_path):
    write_run(tmp_path, b"first")
    prepare_output_dir(tmp_path)
    assert checkpoints(tmp_path) == []
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        newest_checkpoint(tmp_path)
    assert newest_checkpoint(tmp_path / "former-run-1").name == ".checkpoint-5.previous"


def test_checkpoints_of_another_trainer_are_moved_before_a_save_meets_them(tmp_path):
    write(tmp_path, {"checkpoint-500/model.safetensors": b"trl", "checkpoint-7/notes.md": b"mine"})
    (tmp_path / "checkpoint-9").mkdir()
    model = tmp_path / "checkpoint-7"
    prepare_output_dir(tmp_path, keep={str(model)})
    moved = {"former-run-1/checkpoint-500/model.safetensors": b"trl", "checkpoint-7/notes.md": b"mine"}
    assert everything(tmp_path) == moved
    assert not (tmp_path / "checkpoint-9").exists()


def test_a_run_that_holds_the_model_of_the_next_is_refused_untouched(tmp_path):
    write_run(tmp_path, b"first")
    before = everything(tmp_path)
    with pytest.raises(CheckpointError, match="would be moved; want the model to stay where it is; fix: choose"):
        prepare_output_dir(tmp_path, keep={str(tmp_path / "final")})
    assert everything(tmp_path) == before


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("what", ["teacher", "reward"])
def test_a_teacher_and_a_reward_model_of_the_earlier_run_stay(make_trainer, tmp_path, what, overwrite):
    make_trainer(max_steps=1, save_strategy="no").train()
    before, path = everything(tmp_path / "run"), str(tmp_path / "run" / "final")
    given = {"teacher_model": path, "distillation_coef": 1.0} if what == "teacher" else {"reward": [path]}
    with pytest.raises(CheckpointError, match=f"got {path} as a model, of a run in .*; want the model to stay"):
        make_trainer(**given, overwrite_output_dir=overwrite)
    assert everything(tmp_path / "run") == before


@pytest.mark.parametrize("renames", range(12))
def test_after_a_crash_between_two_renames_the_next_start_moves_the_rest(tmp_path, monkeypatch, renames):
    first, rename, moved = write_run(tmp_path, b"first"), Path.rename, []

    def crash(self, target):
        if len(moved) == renames:
            raise KeyboardInterrupt
        moved.append(self)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", crash)
    with pytest.raises(KeyboardInterrupt):
        prepare_output_dir(tmp_path)
    monkeypatch.undo()
    prepare_output_dir(tmp_path)
    assert check_output_dir(tmp_path) == []
    parts = [everything(folder) for folder in sorted(tmp_path.iterdir())]
    assert len(parts) == 2
    assert parts[0] | parts[1] == first
    assert sum(map(len, parts)) == len(first)


def test_a_rename_that_fails_undoes_those_before_it(tmp_path, monkeypatch):
    write_run(tmp_path, b"first")
    before, rename = everything(tmp_path), Path.rename

    def refused(self, target):
        if self.name == "run.json":
            raise PermissionError(1, "Operation not permitted")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(CheckpointError, match="cannot be written"):
        prepare_output_dir(tmp_path)
    assert everything(tmp_path) == before
    assert not (tmp_path / "former-run-1").exists()


@pytest.mark.parametrize("action", ["moved", "removed", "resumed"])
def test_a_run_that_is_alive_is_neither_moved_nor_removed_nor_resumed(fork_server, make_trainer, tmp_path, action):
    run, deadline = fork_server.start(RUN, tmp_path / "run", "transformers", "fresh", "wait", 0), time.monotonic() + 60
    while "a save is done" not in run.output:
        assert run.poll() is None, run.output
        assert time.monotonic() < deadline, run.output
        time.sleep(0.01)
    before = everything(tmp_path / "run")
    options = {"overwrite_output_dir": action == "removed"}
    elsewhere = make_trainer(**options, output_dir=str(tmp_path / "elsewhere"))
    elsewhere.output_dir = elsewhere._made["output_dir"] = (
        tmp_path / "run"
    )  # as if that run had begun since this trainer was made
    for train in (lambda: make_trainer(**options), lambda: elsewhere.train(resume_from_checkpoint=action == "resumed")):
        with pytest.raises(CheckpointError, match="another run is being trained now"):
            train()
    assert everything(tmp_path / "run") == before
    run.kill()
    assert run.wait() == -9
    if action == "resumed":
        return
    make_trainer(**options).train()
    assert (tmp_path / "run" / "former-run-1").exists() == (action == "moved")


def test_a_second_run_of_a_script_keeps_the_first_and_is_resumed_alone(make_trainer, tmp_path):
    """As TRL's users run one: nothing is moved before the run begins to write."""
    run, options = tmp_path / "run", {"overwrite_output_dir": False, "max_steps": 4, "save_steps": 2}
    make_trainer(**options).train()
    first = everything(run)
    again = make_trainer(**options, learning_rate=1e-2)
    assert everything(run) == first
    again.train()
    assert everything(run / "former-run-1") == first
    assert [path.name for path in checkpoints(run)] == ["checkpoint-2", "checkpoint-4"]
    resumed = make_trainer(**options | {"max_steps": 5})
    resumed.train(resume_from_checkpoint=True)
    assert [path.name for path in sorted(run.glob("former-run-*"))] == ["former-run-1"]
    assert everything(run / "former-run-1") == first
    assert (run / "metrics.jsonl").read_text().count('"rollout_engine"') == 5


def test_a_start_that_fails_at_once_leaves_the_directory_as_it_was(make_trainer, tmp_path):
    run, options = tmp_path / "run", {"overwrite_output_dir": False}
    make_trainer(**options).train()
    first = everything(run)

    def reward(completions, **columns):
        if not (tmp_path / "fixed").exists():
            raise ValueError("not yet")
        return [float(len(text)) for text in completions]

    for directory, before in ((run, first), (tmp_path / "new", None)):
        trainer = make_trainer(reward, output_dir=str(directory), **options)
        for _ in range(2):
            with pytest.raises(RewardError):
                trainer.train()
            assert (everything(directory) if directory.exists() else None) == before
    (tmp_path / "fixed").touch()
    make_trainer(reward, **options).train()
    assert everything(run / "former-run-1") == first
    assert not (run / "former-run-2").exists()


@pytest.mark.parametrize("holds_a_run", [False, True])
def test_an_evaluation_behind_a_start_that_failed_writes_into_no_run(make_trainer, tmp_path, holds_a_run):
    run, options = tmp_path / "run", {"overwrite_output_dir": False}
    if holds_a_run:
        make_trainer(**options).train()
    before, failures = holds_a_run and everything(run), [KeyboardInterrupt]

    def reward(completions, **columns):
        if failures:
            raise failures.pop()
        return [1.0] * len(completions)

    trainer = make_trainer(reward, **options)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.evaluate([{"prompt": "1+1=", "answer": "2"}])["eval_reward"] == 1.0
    assert (run.exists() and everything(run)) == before


def test_a_second_train_moves_the_files_of_the_first_aside(make_trainer, tmp_path):
    trainer = make_trainer(overwrite_output_dir=False)
    trainer.train()
    first = everything(tmp_path / "run")
    trainer.train()
    assert everything(tmp_path / "run" / "former-run-1") == first
    assert {"former-run-1/metrics.jsonl", "metrics.jsonl"} <= everything(tmp_path / "run").keys()


def test_of_two_processes_one_moves_the_run_and_both_train(fork_server, tmp_path):
    fork_server.run(RUN, tmp_path / "run", "transformers", "fresh", "nowhere", 0, processes=2)
    first = everything(tmp_path / "run")
    fork_server.run(RUN, tmp_path / "run", "transformers", "again", "nowhere", 0, processes=2)
    assert everything(tmp_path / "run" / "former-run-1") == first
    assert not (tmp_path / "run" / "former-run-2").exists()
    weights = "checkpoint-10/model.safetensors"
    assert (tmp_path / "run" / weights).read_bytes() == first[weights]


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
    working, opened = output_dir._locked, []

    def removed_first(*given):
        opened.append(working(*given))
        if len(opened) == 1:
            (tmp_path / LOCK_FILE).unlink()
        return opened[-1]

    monkeypatch.setattr(output_dir, "_locked", removed_first)
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
    threading.Timer(0.15, os.close, [checking]).start()
    lock.acquire(tmp_path)


@pytest.mark.parametrize("name", RUN_FILES)
@pytest.mark.parametrize("resume", [None, True])
def test_what_is_in_the_place_of_a_file_of_the_run_is_named_before_it(tmp_path, name, resume):
    place = tmp_path / name
    place.mkdir()
    with pytest.raises(CheckpointError, match=rf"got .*{name}, where a run writes a file; want .*; fix: move it away"):
        check_output_dir(tmp_path, resume=resume)
    place.rmdir()
    place.symlink_to(tmp_path / "gone" / name)
    with pytest.raises(CheckpointError, match=f"{name}, where a run writes a file"):
        check_output_dir(tmp_path, resume=resume)
    place.unlink()
    for harmless in (os.devnull, "elsewhere"):
        place.symlink_to(harmless)
        check_output_dir(tmp_path, resume=resume)
        place.unlink()


@pytest.mark.parametrize("below", ["", "/run"])
def test_a_link_to_nothing_is_no_output_directory(tmp_path, below):
    (tmp_path / "link").symlink_to("gone")
    with pytest.raises(CheckpointError, match="link is a link to nothing; want a directory"):
        check_output_dir(Path(f"{tmp_path}/link{below}"))
