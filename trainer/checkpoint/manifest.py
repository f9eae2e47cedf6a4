"""The manifest of a checkpoint: size and sha256 sum of every file. It is written last, so it says what is complete.

What is read here and beside is opened by `open_regular`: a pipe, a device or a file without end cannot stop a run.

Names in a manifest are checked before they are used, so that it cannot point outside of its own directory. Sums show
damage, not who wrote a file: nothing in a checkpoint is unpickled, and pickles are refused by their name.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from fused_grpo.errors import CheckpointError, FusedGRPOError

MANIFEST_FILE = "manifest.json"
_ANY_FORMAT = "fused-grpo checkpoint "
FORMAT = f"{_ANY_FORMAT}3"

# Formats that are pickles, or may contain one. This trainer writes none of them.
_PICKLES = (".bin", ".ckpt", ".distcp", ".joblib", ".npy", ".npz", ".pickle", ".pkl", ".pt", ".pth", ".tar", ".zip")

# Bytes of JSON, which takes ten times as much memory: trainer_state.json has the log of a long run.
_MAX_JSON, _MAX_MANIFEST = 256 << 20, 4 << 20
_MAX_FILES = 10_000


def write_manifest(directory: Path) -> None:
    """Write the manifest of what is in `directory`, then sync all of it to the disk."""
    files = {
        path.relative_to(directory).as_posix(): {"size": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    manifest = json.dumps({"format": FORMAT, "files": files}, indent=2)
    (directory / MANIFEST_FILE).write_text(manifest + "\n", encoding="utf-8")
    for path in (*directory.rglob("*"), directory):
        fsync(path)


def fsync(path: Path) -> None:
    """Wait until a file's content, or a directory's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading, without waiting; OSError for a directory, a pipe, a socket or a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file")
    return os.fdopen(descriptor, "rb")


def read_json(path: Path, limit: int = _MAX_JSON) -> Any:
    """The content of a JSON file; an error where it is no regular file or no JSON, or has more than `limit` bytes."""
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it has more than {limit} bytes")
    return json.loads(content)


def has_manifest(directory: Path) -> bool:
    """Whether `directory` has a readable manifest, of any version. Its files are not looked at."""
    try:
        return bool(read_manifest(directory, any_version=True))
    except CheckpointError:
        return False


def read_manifest(directory: Path, *, any_version: bool = False) -> dict[str, tuple[int, str]]:
    """Size and sha256 by file name, as saved. With `any_version`, also of other versions of this package.

    Raises:
        CheckpointError: the manifest is missing or unreadable, names a file outside of `directory`, or was written by
            another version.
    """
    try:
        content = read_json(directory / MANIFEST_FILE, _MAX_MANIFEST)
        version = str(content["format"])
        if len(content["files"]) > _MAX_FILES:
            raise ValueError(f"it names {len(content['files'])} files, want {_MAX_FILES} at most")
        if not version.startswith(_ANY_FORMAT):
            raise ValueError(f"its format is {version!r}, want {FORMAT!r}")
        files = {name: (int(entry["size"]), str(entry["sha256"])) for name, entry in content["files"].items()}
        outside = [name for name in files if not (directory / name).resolve().is_relative_to(directory.resolve())]
    except (FileNotFoundError, NotADirectoryError):
        raise damaged(directory, MANIFEST_FILE, "is missing") from None
    except Exception as error:  # of any kind, where somebody else has written it
        raise damaged(directory, MANIFEST_FILE, f"cannot be read ({type(error).__name__}: {error})") from error
    if outside:
        raise damaged(directory, MANIFEST_FILE, f"names files outside of it ({outside[0]})")
    if version != FORMAT and not any_version:
        raise CheckpointError(
            f"got {directory}, written by another version of fused-grpo ({version!r}), want {FORMAT!r}; "
            "fix: resume with the version that wrote it, or pass it as the model of a new run"
        )
    return files


def verify_checkpoint(directory: Path, *, sums: bool = True) -> None:
    """Compare every file of a checkpoint with the manifest; without `sums`, its size only.

    Raises:
        CheckpointError: there is no manifest, a file is missing, truncated or changed, or there is a pickle among them;
            the message names it.
    """
    directory = Path(directory)
    previous = sibling(directory, "previous")
    if previous.exists() and not directory.exists():
        raise CheckpointError(
            f"got {directory}, which is missing because a save was interrupted; want a complete checkpoint; "
            f"fix: the one before it is complete, rename {previous.name} to {directory.name}"
        )
    files = read_manifest(directory)
    # Files with holes, whose sums would take forever.
    if (total := sum(size for size, _ in files.values())) > shutil.disk_usage(directory).total:
        raise damaged(directory, MANIFEST_FILE, f"has {total} bytes of files, more than the disk")
    for name, (size, sha256) in files.items():
        with _opened(directory, name) as file:
            got = os.fstat(file.fileno()).st_size
        if got != size:
            kind = "truncated" if got < size else "changed"
            raise damaged(directory, name, f"is {kind} ({got} bytes, {size} when saved)")
        if sums and sha256_of(directory / name) != sha256:
            raise damaged(directory, name, "is changed (its sha256 is not the one it was saved with)")
    for path in sorted(directory.rglob("*")):
        if path.suffix.lower() in _PICKLES:
            raise CheckpointError(
                f"got {directory}, whose {path.relative_to(directory)} is of a format that can run code when it is "
                "read; want weights as safetensors and state as JSON, as this trainer writes them; "
                "fix: remove that file if you know where it is from, or use another checkpoint"
            )


def sibling(directory: Path, role: str) -> Path:
    """A hidden name beside `directory`, on the same file system, which is not taken for a checkpoint."""
    return directory.with_name(f".{directory.name}.{role}")


@contextmanager
def _opened(directory: Path, name: str) -> Iterator[BufferedReader]:
    try:
        with open_regular(directory / name) as file:
            yield file
    except FileNotFoundError:
        raise damaged(directory, name, "is missing") from None
    except OSError as error:  # of the disk, or of another user's directory
        raise damaged(directory, name, f"cannot be read ({error.strerror})") from error


def damaged(directory: Path, name: str, what: str) -> CheckpointError:
    """The error for a checkpoint whose file `name` is not what was saved."""
    return CheckpointError(
        f"got {directory}, whose {name} {what}; want a complete checkpoint; fix: use an earlier one, or copy it again"
    )


@contextmanager
def refuse_unusable(directory: Path, name: str) -> Iterator[None]:
    """Around the use of a file's content: any error becomes a CheckpointError that names the file."""
    try:
        yield
    except FusedGRPOError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"got {directory}, whose {name} does not fit this run ({type(error).__name__}: {error}); want a checkpoint "
            "of this model with these options (it is not damaged: its sums are right); fix: resume with the model, the "
            "options and the versions of the run's run.json, or pass it as the model of a new run"
        ) from error


def sha256_of(path: Path) -> str:
    """The sha256 sum of a file; CheckpointError where it cannot be read."""
    with _opened(path.parent, path.name) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
