"""The list of a checkpoint's files with their sizes and sha256 sums: written last, believed first.

A directory without a readable manifest is not a checkpoint. The names in it are checked before they are used, so a
manifest from elsewhere cannot point outside its own directory. Sums say that nothing has changed since, not who wrote
it: what a file holds is checked where it is read, and what could run when it is read is refused by its name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer.data.stored_json import read_json

MANIFEST_FILE = "manifest.json"
FORMAT = "fused-grpo checkpoint 2"
_ANY_FORMAT = re.compile(r"fused-grpo checkpoint \d{1,9}", re.ASCII)

# Formats that are pickles, or may be one; nothing here writes them. And code, which `trust_remote_code` speaks for.
_PICKLES = frozenset(
    (".bin", ".ckpt", ".distcp", ".joblib", ".npy", ".npz", ".pickle", ".pkl", ".pt", ".pth", ".tar", ".zip")
)
_CODE = frozenset((".dll", ".dylib", ".py", ".pyc", ".pyd", ".sh", ".so"))

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
        return bool(read_manifest(directory, any_version=True))
    except CheckpointError:
        return False


def read_manifest(directory: Path, *, any_version: bool = False) -> FileSums:
    """Size and sha256 by file name, as saved. `any_version` is for who wants to know which files are ours.

    Raises:
        CheckpointError: there is no manifest, or it is not one of ours, or it names a file outside `directory`, or
            another version has written it.
    """
    path = directory / MANIFEST_FILE
    try:
        if not path.is_file():
            raise damaged(directory, MANIFEST_FILE, "is missing")
        content = read_json(path, {"format": str, "files": {str: {"size": int, "sha256": str}}})
        if not _ANY_FORMAT.fullmatch(content["format"]):
            raise ValueError(f"its format is {content['format'][:80]!r}, not {FORMAT!r}")
        files: FileSums = content["files"]
        outside = [name for name in files if not _is_inside(directory, name)]
    except (ValueError, OSError) as error:
        raise damaged(directory, MANIFEST_FILE, f"cannot be read ({error})") from error
    if outside:
        raise damaged(directory, MANIFEST_FILE, f"names files outside of it ({outside[0][:200]})")
    if content["format"] != FORMAT and not any_version:
        raise CheckpointError(
            f"got {directory}, written by another version of fused-grpo ({content['format']!r}), want {FORMAT!r}; "
            "fix: resume with the version that wrote it, or pass it as the model of a new run"
        )
    return files


def manifest_sum(directory: Path) -> str:
    """The sum of the sums: two checkpoints that have the same one were saved as one.

    Raises:
        CheckpointError: there is no manifest that can be read.
    """
    read_manifest(directory)
    return _sha256(directory / MANIFEST_FILE)


def verify_file(directory: Path, name: str, expected: Mapping[str, Any], *, sums: bool = True) -> None:
    """Compare one file with its entry in the manifest; without `sums`, its size alone.

    Raises:
        CheckpointError: it is missing, truncated or changed.
    """
    path = directory / name
    try:
        if not path.is_file():
            raise damaged(directory, name, "is missing")
        size, sha256 = path.stat().st_size, None
        if sums and size == expected["size"]:
            sha256 = _sha256(path)
    except OSError as error:
        raise damaged(directory, name, f"cannot be read ({error.strerror})") from error
    if size != expected["size"]:
        kind = "truncated" if size < expected["size"] else "changed"
        raise damaged(directory, name, f"is {kind} ({size} bytes, {expected['size']} when saved)")
    if sums and sha256 != expected["sha256"]:
        raise damaged(directory, name, "is changed (its sha256 is not the one it was saved with)")


def refuse_payloads(directory: Path, *, custom_code: bool = False) -> None:
    """Refuse what could run when it is loaded, listed in the manifest or not: pickles, and unless asked for, code.

    Raises:
        CheckpointError: there is such a file, a configuration that names code in this directory, or what is no file.
    """
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if not (path.is_file() or path.is_dir()):  # who opens a pipe waits for its other end
            raise _payload(directory, name, "is neither a file nor a folder")
        if path.suffix.lower() in _PICKLES:
            raise _payload(directory, name, "is of a format that can run code when it is read")
        if custom_code:
            continue
        if path.suffix.lower() in _CODE:
            raise _payload(directory, name, "is code")
        if path.name.endswith("config.json") and _names_code(directory, name):
            raise _payload(directory, name, "names code that lies beside it (auto_map)")


def damaged(directory: Path, name: str, what: str) -> CheckpointError:
    """The error for a checkpoint that is not what was saved: its file `name` differs from the manifest."""
    return CheckpointError(
        f"got {directory}, whose {name[:200]} {what}; want a complete checkpoint; "
        "fix: use an earlier one, or copy it anew"
    )


def unfit(directory: Path, name: str, what: str) -> CheckpointError:
    """The error for a checkpoint that is what was saved, but whose file `name` is not one that this run could save."""
    return CheckpointError(
        f"got {directory}, whose {name[:200]} {what}; want a checkpoint of this model with these options (it is not "
        "damaged: its sums are right); fix: resume with the model, the options and the versions of the run's run.json, "
        "or pass it as the model of a new run"
    )


def _payload(directory: Path, name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"got {directory}, whose {name[:200]} {what}; want weights as safetensors and state as JSON, as this trainer "
        "writes them; fix: remove that file if you know where it is from, or use another checkpoint"
    )


def _names_code(directory: Path, name: str) -> bool:
    """Whether a configuration has classes in this directory: "module.Class", or of another "a/b--module.Class"."""
    try:
        names = read_json(directory / name, dict).get("auto_map", {})
    except (ValueError, OSError) as error:
        raise damaged(directory, name, f"cannot be read ({error})") from error
    entries = names.values() if isinstance(names, dict) else [names]
    flat = [name for entry in entries for name in (entry if isinstance(entry, list) else [entry])]
    return any(name is not None and "--" not in str(name) for name in flat)


def _is_inside(directory: Path, name: str) -> bool:
    return (directory / name).resolve().is_relative_to(directory.resolve())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
