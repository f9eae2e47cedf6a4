"""Weights as files that another process reads: in shared memory where they fit, and gone as soon as they are read.

A server takes new weights by reading a folder of safetensors. On /dev/shm that is a copy from memory to memory, and no
disk wears out at every step. Containers often have 64 MB there; then the folder is in the temporary directory.

A process that is killed meanwhile leaves its folder behind, in memory that nothing else frees. So each folder is locked
by whoever is writing it, which the kernel undoes when that process ends, and the first folder that a process makes is
preceded by removing those of the same user that nobody holds. A lock, and not a process id: containers share memory and
number their processes each for itself. In a directory that the user names nothing is removed: other machines may share
it, and see no locks of this one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

_SHARED_MEMORY = "/dev/shm"
_SHARD_BYTES = 2 << 30
_PREFIX = "fused-grpo-weights-"


@contextmanager
def published(weights: Iterable[tuple[str, Tensor]], *, directory: str | None = None) -> Iterator[Path]:
    """`weights` as safetensors in a fresh folder, which is removed afterwards.

    Args:
        weights: names and full tensors, on any device.
        directory: where the folder goes. None: shared memory, or the temporary directory where they do not fit.
    """
    named = [(name, weight.detach()) for name, weight in weights]
    if directory is None:
        fits = _fits_in_shared_memory(sum(weight.nbytes for _, weight in named))
        directory = _SHARED_MEMORY if fits else tempfile.gettempdir()
        remove_abandoned(directory)
    folder, lock = _locked_folder(directory)
    try:
        write_weights(named, folder)
        yield folder
    finally:
        shutil.rmtree(folder)
        os.close(lock)


@cache
def remove_abandoned(directory: str) -> None:
    """Remove the folders in `directory` whose process has been killed, and none that is in use. Looks once."""
    for folder in Path(directory).glob(f"{_PREFIX}*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # another user's, or gone by now
            continue
        try:
            if os.fstat(lock).st_uid == os.geteuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # somebody holds it, or the file system has no locks
            pass
        finally:
            os.close(lock)


def _locked_folder(directory: str) -> tuple[Path, int]:
    """A new folder, and the descriptor that holds it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=directory))
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # removed before it was locked
            continue
        with suppress(OSError):  # a file system without locks: a folder there is found by nobody
            fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return folder, lock
        os.close(lock)


def write_weights(weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Safetensors files of about 2 GiB, so that one of them at a time is on the CPU besides the model."""
    shard: dict[str, Tensor] = {}
    written = pending = 0
    for name, weight in weights:
        if pending + weight.nbytes > _SHARD_BYTES and shard:
            save_file(shard, folder / f"model-{written:05}.safetensors")
            shard, written, pending = {}, written + 1, 0
        shard[name] = _alone(weight, shard.values())
        pending += weight.nbytes
    save_file(shard, folder / f"model-{written:05}.safetensors")


def _alone(weight: Tensor, others: Iterable[Tensor]) -> Tensor:
    """On the CPU, contiguous, in memory that none of `others` uses: what safetensors can write."""
    weight = weight.detach().cpu().contiguous()
    storage = weight.untyped_storage().data_ptr()
    shared = any(storage == other.untyped_storage().data_ptr() for other in others)
    return weight.clone(memory_format=torch.contiguous_format) if shared else weight


def _fits_in_shared_memory(size: int) -> bool:
    if not os.access(_SHARED_MEMORY, os.W_OK):
        return False
    # Not to the brim: vLLM's own processes talk through shared memory too.
    return shutil.disk_usage(_SHARED_MEMORY).free > 1.5 * size
