"""The output directory of a run: another run in it is never lost, and leftovers of a killed run are removed.

Another run is moved aside, file by file, into `former-run-<n>` in the same directory: renaming there needs no space,
and works where the directory is a mount point. The logs are renamed last, so what a crash leaves is still known as a
run, and the next start moves it too. docs/checkpoints.md has the lock of a run that is alive.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Callable, Set
from contextlib import suppress
from functools import partial
from pathlib import Path

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer.checkpoint.checkpoint import (
    TEMPORARY,
    changing,
    checkpoints,
    existing,
    free_path,
    is_removable,
    refuse_foreign,
    remove,
    remove_empty,
    step_of,
)
from fused_grpo.trainer.common.file_names import METRICS_FILE, NONFINITE_FOLDER, RUN_FILE, RUN_FILES, TRACKERS_FOLDER
from fused_grpo.trainer.common.formatting import bytes_text
from fused_grpo.trainer.common.warnings import warn_once

_log = logging.getLogger(__name__)

LOCK_FILE = ".lock"
# A check of another process holds the lock too, for less than a millisecond.
_TRIES, _PAUSE = 5, 0.1
# What the user may have put a file into, or another trainer may have written: it is moved, and never removed.
_MOVED_FOLDERS = re.compile(rf"checkpoint-\d+(\.unusable-\d+)?|{NONFINITE_FOLDER}\d+|{TRACKERS_FOLDER}", re.ASCII)


def check_output_dir(
    path: Path,
    *,
    resume: bool | Path | None = None,
    overwrite: bool = False,
    keep: Set[str] = frozenset(),
    is_saved: Callable[[int], bool] | None = None,
    is_locked: bool = False,
) -> list[Path]:
    """What `prepare_output_dir` would move aside or remove; CheckpointError where it would raise, or a run is alive.

    Without `is_saved`, the places where the run is going to save are not looked at. `is_locked`: by this run.
    """
    with changing(path):  # it may be in another user's folder
        there = existing(path)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        what = "cannot be written" if there.is_dir() else "is a file" if there.exists() else "is a link to nothing"
        raise CheckpointError(f"got {path}, where {there} {what}; want a directory; fix: choose another --output-dir")
    for place in (path / name for name in RUN_FILES if os.path.lexists(path / name)):  # some are written at the end
        if place.is_dir() or not os.path.isdir(os.path.dirname(os.path.realpath(place))):
            raise CheckpointError(f"got {place}, where a run writes a file; want nothing else there; fix: move it away")
    entries = [] if resume or not path.is_dir() else _entries_to_clear(path, overwrite=overwrite, keep=keep)
    if not is_locked:
        refuse_alive(path)
    if is_saved is not None:
        after = step_of(resume) if isinstance(resume, Path) else 0
        later = [one for one in checkpoints(path) if step_of(one) > after and is_saved(step_of(one))]
        for place in (path / "final", *later):
            if overwrite or place not in entries:  # overwriting removes entries but for the user's files in them
                refuse_foreign(place)
    return entries


def check_space(directory: Path, model: int, *, copies: int, checkpoints_kept: int) -> None:
    """Room for the final model of `model` bytes and checkpoints that are `copies` times as large.

    Raises CheckpointError where there is none for it and one of them; a warning says that not all of them fit.
    """
    free, size = shutil.disk_usage(folder := existing(directory)).free, model * copies
    fix = "fix: free some space (save_total_limit, save_only_model, save_strategy='no'), or another output_dir"
    if free < (wanted := model + size * (checkpoints_kept > 0)):
        raise CheckpointError(
            f"got {bytes_text(free)} free at {folder}, want about {bytes_text(wanted)} for the final model and "
            f"checkpoints; {fix}"
        )
    more = checkpoints_kept - len(checkpoints(directory))  # a run that is resumed has those that are there
    if more > 1 and free < (wanted := model + size * more):
        warn_once(
            f"got {bytes_text(free)} free at {folder}, room for {(free - model) // size} more checkpoints, want about "
            f"{bytes_text(wanted)} for the final model and the {more} that this run is going to keep; {fix}"
        )


def _entries_to_clear(path: Path, *, overwrite: bool, keep: Set[str]) -> list[Path]:
    """Logs, reports and checkpoints of a run in `path`; to be moved, also further folders that this run may write."""
    children, leftovers = sorted(path.iterdir()), _leftovers(path)
    # A report without logs is a copy that the user made.
    has_logs = any((path / name).is_file() for name in (METRICS_FILE, RUN_FILE))
    files = [path / name for name in RUN_FILES if has_logs and (path / name).is_file()]
    entries = [*files, *(child for child in children if is_removable(child) and child not in leftovers)]
    if held := [model for model in keep if any(_holds(entry, model) for entry in entries)]:
        raise CheckpointError(
            f"got {min(held)} as a model, of a run in {path} that would be {'removed' if overwrite else 'moved'}; "
            "want the model to stay where it is; fix: choose another --output-dir"
        )
    folders = [
        child
        for child in children
        if _MOVED_FOLDERS.fullmatch(child.name) and child.is_dir() and not child.is_symlink() and child not in entries
        if any(child.iterdir()) and not any(_holds(child, model) for model in keep)
    ]
    # Without a run, only the checkpoints of another trainer say that there was one.
    are_of_a_run = entries or any(child.name.startswith("checkpoint-") for child in folders)
    return [*entries, *folders] if are_of_a_run and not overwrite else entries


def _holds(entry: Path, model: str) -> bool:
    return Path(model).resolve().is_relative_to(entry.resolve())


def prepare_output_dir(
    path: Path,
    *,
    resume: bool | Path | None = None,
    overwrite: bool = False,
    keep: Set[str] = frozenset(),
    is_saved: Callable[[int], bool] = lambda step: False,
) -> Callable[[], None]:
    """Make `path` ready for a run that has locked it. Nothing is moved or removed where this raises.

    Args:
        path: made where it is missing. Files that are not of a run stay, always.
        resume: keep the run that is there and continue its files, after this checkpoint. Otherwise it is moved to
            `former_run(path)`, or with `overwrite` removed: its logs, report and checkpoints, file by file.
        keep: the models that this run is going to read; CheckpointError where one would be moved or removed.
        is_saved: whether there will be a checkpoint of a step, where no files of others may be.

    Returns a function for a run that ends before it has made anything: it removes its logs, what was moved comes back.
    """
    entries = check_output_dir(path, resume=resume, overwrite=overwrite, keep=keep, is_saved=is_saved, is_locked=True)
    former = former_run(path)
    with changing(path):
        path.mkdir(parents=True, exist_ok=True)
        # Before their checkpoints are gone, which say what they are.
        for leftover in _leftovers(path):
            shutil.rmtree(leftover, ignore_errors=True)
        if overwrite:
            remove(entries)
        elif entries:
            _move_aside(path, entries)
        for checkpoint in checkpoints(path):
            if not checkpoint.is_symlink():
                remove_empty(checkpoint)
    return (lambda: None) if resume else partial(_take_back, path, former, set(path.iterdir()))


def _take_back(path: Path, former: Path, before: set[Path]) -> None:
    made = set(path.iterdir()) - before
    if any(entry.is_dir() and entry.name != TRACKERS_FOLDER for entry in made):  # a checkpoint, or a batch to look at
        return
    for entry in made & {path / name for name in (*RUN_FILES, TRACKERS_FOLDER)}:
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    for entry in former.iterdir() if former in before else ():
        entry.rename(path / entry.name)
    with suppress(OSError):  # of files that somebody else has put there
        former.rmdir()


def former_run(path: Path) -> Path:
    """The folder that a run in `path` would be moved to."""
    return free_path(path / "former-run", "")


def _move_aside(path: Path, entries: list[Path]) -> None:
    """Rename these entries, the logs last; all of them or none."""
    target, moved = former_run(path), list[Path]()
    target.mkdir()
    try:
        for entry in reversed(entries):
            entry.rename(target / entry.name)
            moved.append(entry)
    except OSError:
        for entry in moved:
            (target / entry.name).rename(entry)
        target.rmdir()
        raise
    _log.warning(
        f"{path} held another run, whose files are now in {target} (instead of this, resume_from_checkpoint continues "
        "it, and overwrite_output_dir removes it)"
    )


def _leftovers(output_dir: Path) -> list[Path]:
    """What a killed save or removal has left: half-written copies, and replaced ones."""
    return [
        path
        for path in output_dir.glob(".*")
        if (match := TEMPORARY.fullmatch(path.name)) and not path.is_symlink()
        if match[2] == "partial" or (output_dir / match[1]).exists()
    ]


class RunLock:
    """The lock of one run; `acquire` and `release` may be called again."""

    _descriptor: int | None = None

    def acquire(self, directory: Path) -> None:
        """Lock `directory`, which is made where it is missing, until `release` or the end of the process.

        CheckpointError where another run has it, or it cannot be written, or its file system has no locks.
        """
        self._path, self._made = directory / LOCK_FILE, not directory.exists()
        while self._descriptor is None:
            with changing(directory):
                directory.mkdir(parents=True, exist_ok=True)
                descriptor = _locked(directory, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX)
            # The run before may have removed the file between the two calls: then this lock is of nothing.
            if self._path.exists() and os.path.samestat(os.fstat(descriptor), self._path.stat()):
                self._descriptor = descriptor
                owner = {"host": socket.gethostname(), "process": os.getpid(), "since": time.ctime()}
                with suppress(OSError):  # a full disk
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, json.dumps(owner).encode())
            else:
                os.close(descriptor)

    def release(self) -> None:
        """Unlock the directory and remove the file. Harmless without a lock."""
        if self._descriptor is None:
            return
        with suppress(OSError):
            self._path.unlink()
            if self._made:
                self._path.parent.rmdir()  # only where nothing was written
        os.close(self._descriptor)
        self._descriptor = None


def refuse_alive(directory: Path) -> None:
    """Raise CheckpointError where a run is alive in `directory`, or its lock cannot be read; without locking it."""
    with changing(directory), suppress(FileNotFoundError, NotADirectoryError):
        os.close(_locked(directory, os.O_RDONLY, fcntl.LOCK_SH))


def _locked(directory: Path, flags: int, kind: int) -> int:
    """Open and lock the file of `directory`; OSError where it cannot be opened."""
    descriptor = os.open(directory / LOCK_FILE, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    failure: Exception = OSError(errno.EINVAL, f"{LOCK_FILE} is no regular file")
    for _ in range(_TRIES if stat.S_ISREG(os.fstat(descriptor).st_mode) else 0):
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            failure = CheckpointError(
                f"got {directory}, where another run is being trained now ({_owner(descriptor)}); want an output "
                "directory of its own; fix: choose another --output-dir, or wait until that run has ended"
            )
        except OSError as error:
            failure = CheckpointError(
                f"got {directory} on a file system without locks ({error.strerror}), where nothing would keep a second "
                "run out; want one with them; fix: an output directory on another disk, or the file system mounted "
                "with locks (Lustre: -o flock; NFS: its lock manager)"
            )
            break
        time.sleep(_PAUSE)
    os.close(descriptor)
    raise failure


def _owner(descriptor: int) -> str:
    with suppress(OSError, ValueError, KeyError, TypeError):
        owner = json.loads(os.pread(descriptor, 500, 0))
        return f"process {int(owner['process'])} on {str(owner['host'])[:100]!r}, since {str(owner['since'])[:40]!r}"
    return "of an unknown process"
