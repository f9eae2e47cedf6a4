"""`RunLock`: one run at a time in an output directory.

The lock is the kernel's (flock), on the file `.lock`, and it ends with the process that has it: after a kill or a
reboot nothing has to be cleaned up, and on network file systems it holds for all machines. What is in the file tells
others who has it, and decides nothing.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path

from fused_grpo.errors import CheckpointError

LOCK_FILE = ".lock"
# A check of another process holds the lock too, for less than a millisecond.
_TRIES, _PAUSE = 5, 0.1


class RunLock:
    """The lock of one run; `acquire` and `release` may be called again."""

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def acquire(self, directory: Path) -> None:
        """Lock `directory`, which is made where it is missing, until `release` or the end of the process.

        Raises:
            CheckpointError: another run has it; or the directory cannot be written, or its file system has no locks.
        """
        self._path, self._made = directory / LOCK_FILE, not directory.exists()
        while self._descriptor is None:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
            except OSError as error:
                raise unwritable(directory, error) from error
            _lock(descriptor, fcntl.LOCK_EX, directory)
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
    """Check that no run is alive in `directory`, without locking it.

    Raises:
        CheckpointError: there is one, or its lock cannot be read.
    """
    try:
        descriptor = os.open(directory / LOCK_FILE, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise unwritable(directory, error) from error
    _lock(descriptor, fcntl.LOCK_SH, directory)
    os.close(descriptor)


def _lock(descriptor: int, kind: int, directory: Path) -> None:
    """Lock an open file, or close it and raise."""
    failure = unwritable(directory, OSError(errno.EINVAL, f"{LOCK_FILE} is no regular file"))
    for _ in range(_TRIES if stat.S_ISREG(os.fstat(descriptor).st_mode) else 0):
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return
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
    try:
        owner = json.loads(os.pread(descriptor, 500, 0))
        return f"process {int(owner['process'])} on {str(owner['host'])[:100]!r}, since {str(owner['since'])[:40]!r}"
    except (OSError, ValueError, KeyError, TypeError):
        return "of an unknown process"


def unwritable(directory: Path, error: OSError) -> CheckpointError:
    """The error for an output directory in which nothing can be changed."""
    return CheckpointError(
        f"got {directory}, which cannot be written ({error.strerror}); want a directory for this run; "
        "fix: choose another --output-dir"
    )
