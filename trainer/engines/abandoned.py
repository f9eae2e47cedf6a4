"""Folders of weights that a killed process has left. It imports the standard library alone: a server runs it as a file.

Process ids would not do to find them: containers share memory and number their processes on their own. So a folder is
locked until its process ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from functools import cache
from pathlib import Path

PREFIX = "fused-grpo-weights-"


@cache
def remove_abandoned(directory: str) -> None:
    """Remove the folders in `directory` whose process was killed, and none that is in use; once for each directory."""
    for folder in Path(directory).glob(f"{PREFIX}*"):
        with suppress(OSError):  # of another user, locked, gone, or on a file system without locks
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
