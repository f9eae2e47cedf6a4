"""The list of a checkpoint's files with their sizes and sha256 sums: written last, believed first.

A directory without a readable manifest is not a checkpoint. The names in it are checked before they are used, so a
manifest from elsewhere cannot point outside its own directory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fused_grpo.errors import CheckpointError

MANIFEST_FILE = "manifest.json"
FORMAT = "fused-grpo checkpoint 1"

FileSums = dict[str, dict[str, Any]]


def seal(directory: Path) -> None:
    """Write the manifest of what is in `directory`, then make all of it survive a power cut."""
    files = {
        path.relative_to(directory).as_posix(): {"size": path.stat().st_size, "sha256": _sha256(path)}
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


def is_sealed(directory: Path) -> bool:
    """True where `directory` has a manifest of ours that can be read. Its files are not looked at."""
    try:
        return bool(read_manifest(directory))
    except CheckpointError:
        return False


def read_manifest(directory: Path) -> FileSums:
    """Size and sha256 by file name, as saved.

    Raises:
        CheckpointError: there is no manifest, or it is not one of ours, or it names a file outside `directory`.
    """
    path = directory / MANIFEST_FILE
    if not path.is_file():
        raise damaged(directory, MANIFEST_FILE, "is missing")
    try:
        content = json.loads(path.read_bytes())
        files: FileSums = content["files"]
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, not {FORMAT!r}")
        outside = [name for name in files if not _is_inside(directory, name)]
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(directory, MANIFEST_FILE, f"cannot be read ({error})") from error
    if outside:
        raise damaged(directory, MANIFEST_FILE, f"names files outside of it ({outside[0]})")
    return files


def verify_file(directory: Path, name: str, expected: Mapping[str, Any]) -> None:
    """Compare one file with its entry in the manifest.

    Raises:
        CheckpointError: it is missing, truncated or changed.
    """
    path = directory / name
    if not path.is_file():
        raise damaged(directory, name, "is missing")
    size = path.stat().st_size
    if size != expected["size"]:
        kind = "truncated" if size < expected["size"] else "changed"
        raise damaged(directory, name, f"is {kind} ({size} bytes, {expected['size']} when saved)")
    if _sha256(path) != expected["sha256"]:
        raise damaged(directory, name, "is changed (its sha256 is not the one it was saved with)")


def damaged(directory: Path, name: str, what: str) -> CheckpointError:
    """The error for a checkpoint whose file `name` cannot be used."""
    return CheckpointError(
        f"got {directory}, whose {name} {what}; want a complete checkpoint; fix: use an earlier one, or copy it anew"
    )


def _is_inside(directory: Path, name: str) -> bool:
    return (directory / name).resolve().is_relative_to(directory.resolve())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
