"""Saves on a disk that does not take everything. Run by test_disk_full.py, in a process of its own.

    python save_run.py OUTPUT_DIR (limited|full|read-only)

"checkpoint-1" is complete there when it begins. "limited": files may not grow beyond a limit, another one for each
save, so that the kernel refuses one file or another in the middle. "full": on file systems of a few hundred KiB.
"read-only": the directory is. Prints the message of each error.
"""

import ctypes
import os
import resource
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer.checkpoint.checkpoint import save_checkpoint, verify_checkpoint
from fused_grpo.trainer.recipes.arithmetic import build_tokenizer

PARTS = runpy.run_path(str(Path(__file__).parents[1] / "trainer" / "resume_run.py"))
MODEL, TOKENIZER = PARTS["model"](), build_tokenizer()
# No file of this checkpoint fits; some configurations do, all of them, the tokenizer too, most of the weights.
LIMITS = (0, 100, 600, 1000, 2000, 120_000, 242_000)
SIZES = (280, 400, 480)  # KiB; a checkpoint takes 256
UNPRIVILEGED = 65534
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 1 << 18  # of <sched.h> and <sys/mount.h>


def save(step: int) -> str:
    options = {"model": MODEL, "tokenizer": TOKENIZER, "trainer_state": {"step": step}}
    try:
        save_checkpoint(Path(f"checkpoint-{step}"), **options)
    except CheckpointError as error:
        return str(error)
    return "saved"


def limited() -> Iterator[str]:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    for limit in LIMITS:
        for step in (1, 2):  # in the place of the one that is there, and beside it
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            message = save(step)
            # What this script prints goes to a file as well.
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            yield message


def full() -> Iterator[str]:
    """A file system of its own, too small for a second checkpoint; seen by this process alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None):
        yield "not allowed"
        return
    for size in SIZES:
        disk = Path.cwd().parent / f"disk-{size}"
        disk.mkdir()
        assert libc.mount(b"tmpfs", bytes(disk), b"tmpfs", 0, f"size={size}k".encode()) == 0
        os.chdir(disk)
        assert save(1) == "saved"
        for step in (1, 2):
            yield save(step)
            verify_checkpoint(Path("checkpoint-1"))
            assert os.listdir() == ["checkpoint-1"]


def read_only() -> Iterator[str]:
    for path in Path("checkpoint-1").iterdir():
        path.chmod(0o444)
    Path.cwd().chmod(0o555)
    if os.geteuid() == 0:  # root ignores modes
        os.seteuid(UNPRIVILEGED)
    yield save(1)
    yield save(2)


disable_progress_bar()
os.chdir(sys.argv[1])
for message in {"limited": limited, "full": full, "read-only": read_only}[sys.argv[2]]():
    print(message, flush=True)
