"""A checkpoint on the disk: complete or absent, compared with its manifest before it is used, and found by its step.

docs/checkpoints.md says what is in one, how it is saved, and what is checked when it is read: sums show damage, not who
wrote a file. So what is read here and beside is opened by `open_regular`: a pipe, a device or a file without end cannot
stop a run.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from glob import glob
from io import BufferedReader
from itertools import count
from pathlib import Path
from typing import Any

from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from fused_grpo.errors import CheckpointError, FusedGRPOError
from fused_grpo.trainer.common.contexts import contextmanager
from fused_grpo.trainer.common.formatting import bytes_text
from fused_grpo.trainer.common.warnings import warn_once

_log = logging.getLogger(__name__)

STATE_FILE, MANIFEST_FILE = "trainer_state.json", "manifest.json"
_ANY_FORMAT = "fused-grpo checkpoint "
FORMAT = f"{_ANY_FORMAT}5"
_NUMBERED = re.compile(r"checkpoint-\d{1,18}", re.ASCII)
# The names of a save that is not finished, and of the checkpoint that it replaces.
TEMPORARY = re.compile(r"\.(checkpoint-\d+|final)\.(partial|previous)")
# Formats that are pickles, or may contain one. This trainer writes none of them.
_PICKLES = (".bin", ".ckpt", ".distcp", ".joblib", ".npy", ".npz", ".pickle", ".pkl", ".pt", ".pth", ".tar", ".zip")
# Bytes of JSON, which takes ten times as much memory: trainer_state.json has the log of a long run.
_LONG_JSON, _MAX_JSON, _MAX_MANIFEST = 1 << 20, 256 << 20, 4 << 20
_MAX_FILES = 10_000


def save_checkpoint(
    directory: Path,
    *,
    model: Any,
    tokenizer: Any,
    trainer_state: Mapping[str, object],
    state_dict: dict[str, Tensor] | None = None,
    write_more: Callable[[Path], object] | None = None,
) -> Path:
    """Write a checkpoint that is complete once it has its name. An earlier one of that name is replaced.

    Args:
        model, tokenizer: of transformers or PEFT, saved by their own `save_pretrained`, as safetensors.
        trainer_state: the fields of transformers' `TrainerState`, as JSON.
        state_dict: full weights by name, where `model` itself is sharded.
        write_more: writes further files into the directory that it is given; its attribute `nbytes`, if it has one, is
            about how many bytes.

    CheckpointError where the disk is full or read-only; then nothing half-written is left. Or where the configuration,
    the tokenizer or the state cannot be saved, or `directory` holds files that no checkpoint wrote; then the weights
    are in the directory that the message names. An earlier checkpoint is unchanged in each case.
    """
    try:
        rescued = free_path(directory, "-rescued")
        with _replacing(directory) as partial, weights_stay(partial, model, state_dict, name=rescued):
            model.save_pretrained(str(partial), state_dict=state_dict)
            tokenizer.save_pretrained(str(partial))
            (partial / STATE_FILE).write_text(f"{_state_text(trainer_state)}\n", encoding="utf-8")
            if write_more is not None:
                write_more(partial)
            write_manifest(partial)
            refuse_foreign(directory)
    except Exception as error:
        if not _is_of_disk(error):
            raise
        # An adapter's files do not say how large they are.
        weights = sum(value.nbytes for value in model.parameters()) if hasattr(model, "parameters") else 0
        wanted = bytes_text(weights + getattr(write_more, "nbytes", 0))
        # Without sums, which take seconds per GB.
        raise CheckpointError(
            f"got {getattr(error, 'strerror', None) or error} while saving {directory}; want about {wanted}, "
            f"{_free(directory)} are free; nothing half-written is left, and "
            f"{_alternative(directory.parent, sums=False)}; "
            "fix: free some space (save_total_limit, save_only_model), or another output_dir"
        ) from error
    return directory


def _state_text(state: Mapping[str, object]) -> str:
    """The state as JSON that `read_json` takes; in one line where it is long: Python's fast encoder does not indent."""
    text, log = json.dumps(dict(state)), state.get("log_history")
    if len(text) < _LONG_JSON:
        return json.dumps(dict(state), indent=2)
    while len(text) >= _MAX_JSON and isinstance(log, list) and log:
        log = log[len(log) // 4 + 1 :]
        text = json.dumps({**state, "log_history": log})
        warn_once(
            f"got a log_history of more than {bytes_text(_MAX_JSON)}, the most that is resumed from: checkpoints have "
            "its newest entries alone, metrics.jsonl has every step; fix: a larger logging_steps"
        )
    return text


@contextmanager
def _replacing(directory: Path) -> Iterator[Path]:
    """A new directory to write into, which takes the place of `directory` at the end: whole or not at all."""
    partial, previous = sibling(directory, "partial"), sibling(directory, "previous")
    if previous.exists() and not directory.exists():
        os.rename(previous, directory)
    for leftover in (partial, previous):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if directory.exists():
            os.rename(directory, previous)
        os.rename(partial, directory)
        fsync(directory.parent)
        shutil.rmtree(previous, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if previous.exists() and not directory.exists():
            os.rename(previous, directory)


@contextmanager
def weights_stay(directory: Path, model: Any, state_dict: Any, *, name: Path | None = None) -> Iterator[None]:
    """Around a save to `directory`: where anything but the disk fails, the weights are written all the same.

    Then a CheckpointError says where they are: `directory` is renamed to `name`, unless that is None.
    """
    before = _weight_files(directory)
    try:
        yield
    except Exception as error:
        # A file that is to be copied may be gone, and transformers raises OSErrors without a number.
        if _is_of_disk(error) and getattr(error, "errno", 0) not in (None, errno.ENOENT):
            raise
        # transformers writes configurations first, and takes weights out of the state dict as it writes them.
        if state_dict and _weight_files(directory) == before:
            weights = revert_weight_conversion(model, state_dict) if hasattr(model, "config") else state_dict
            save_torch_state_dict(weights, directory)
        if _weight_files(directory) == before:
            raise
        if name is not None:
            directory = directory.rename(name)
        what = error if isinstance(error, CheckpointError) else f"got {type(error).__name__}: {error} while saving"
        raise CheckpointError(f"{what}; the weights are in {directory}, without what could not be written") from error


def _weight_files(directory: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*.safetensors")}


def write_manifest(directory: Path) -> None:
    """Write the manifest of what is in `directory`, then sync all of it to the disk. It says what is complete."""
    files = {
        path.relative_to(directory).as_posix(): {"size": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    manifest = json.dumps({"format": FORMAT, "files": files}, indent=2)
    (directory / MANIFEST_FILE).write_text(manifest + "\n", encoding="utf-8")
    mode = stat.S_IMODE((directory / MANIFEST_FILE).stat().st_mode)
    with suppress(OSError):  # of a shared folder that has modes of its own, or none
        for name in files:  # safetensors writes for its user alone, whatever the umask
            (directory / name).chmod(mode)
    for path in (*directory.rglob("*"), directory):
        fsync(path)


def fsync(path: Path) -> None:
    """Wait until a file's content, or a directory's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # which some shared folders (SMB, 9p) say of directories
            raise
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


def read_manifest(directory: Path, *, any_version: bool = False) -> dict[str, tuple[int, str]]:
    """Size and sha256 by file name, as saved. With `any_version`, also of other versions of this package.

    CheckpointError where it is missing, unreadable or of another version, or names a file outside of `directory`.
    """
    try:
        content = read_json(directory / MANIFEST_FILE, _MAX_MANIFEST)
        version = str(content["format"])
        if len(content["files"]) > _MAX_FILES:
            raise ValueError(f"it names {len(content['files'])} files, want {_MAX_FILES} at most")
        if not version.startswith(_ANY_FORMAT):
            raise ValueError(f"its format is {version!r}, want {FORMAT!r}")
        files = {name: (int(entry["size"]), str(entry["sha256"])) for name, entry in content["files"].items()}
        if outside := [name for name in files if not (directory / name).resolve().is_relative_to(directory.resolve())]:
            raise ValueError(f"it names files outside of it ({outside[0]})")
    except (FileNotFoundError, NotADirectoryError):
        if (directory / STATE_FILE).is_file():
            raise CheckpointError(
                f"got {directory}, which has no {MANIFEST_FILE}, as one that TRL or transformers wrote, or a copy that "
                "ended early; want a checkpoint of this trainer, with all its files; fix: copy it again, or pass it as "
                "the model of a new run"
            ) from None
        raise _damaged(directory, MANIFEST_FILE, "is missing") from None
    except Exception as error:  # of any kind, where somebody else has written it
        raise _damaged(directory, MANIFEST_FILE, f"cannot be read ({type(error).__name__}: {error})") from error
    if version != FORMAT and not any_version:
        raise CheckpointError(
            f"got {directory}, written by another version of fused-grpo ({version!r}), want {FORMAT!r}; "
            "fix: resume with the version that wrote it, or pass it as the model of a new run"
        )
    return files


def saved_names(directory: Path) -> set[str]:
    """The files that a save of any version wrote, its manifest included; none without a readable manifest."""
    try:
        names = set(read_manifest(directory, any_version=True))
    except CheckpointError:
        return set()
    return names and names | {MANIFEST_FILE}


def verify_checkpoint(directory: Path, *, sums: bool = True) -> None:
    """Compare every file of a checkpoint with the manifest; without `sums`, its size only.

    CheckpointError where there is no manifest, or names a file that is missing, truncated, changed or a pickle.
    """
    previous = sibling(directory, "previous")
    if previous.exists() and not directory.exists():
        raise CheckpointError(
            f"got {directory}, which is missing because a save was interrupted; want a complete checkpoint; "
            f"fix: the one before it is complete, rename {previous.name} to {directory.name}"
        )
    files = read_manifest(directory)
    # Files with holes, whose sums would take forever.
    if (total := sum(size for size, _ in files.values())) > shutil.disk_usage(directory).total:
        raise _damaged(directory, MANIFEST_FILE, f"has {total} bytes of files, more than the disk")
    for name, (size, sha256) in files.items():
        with _opened(directory, name) as file:
            got = os.fstat(file.fileno()).st_size
        if got != size:
            kind = "truncated" if got < size else "changed"
            raise _damaged(directory, name, f"is {kind} ({got} bytes, {size} when saved)")
        if sums and sha256_of(directory / name) != sha256:
            raise _damaged(directory, name, "is changed (its sha256 is not the one it was saved with)")
    for path in sorted(directory.rglob("*")):
        if path.suffix.lower() in _PICKLES:
            raise CheckpointError(
                f"got {directory}, whose {path.relative_to(directory)} is of a format that can run code when it is "
                "read; want weights as safetensors and state as JSON, as this trainer writes them; "
                "fix: remove that file if you know where it is from, or use another checkpoint"
            )


def sha256_of(path: Path) -> str:
    """The sha256 sum of a file; CheckpointError where it cannot be read."""
    with _opened(path.parent, path.name) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _opened(directory: Path, name: str) -> Iterator[BufferedReader]:
    try:
        with open_regular(directory / name) as file:
            yield file
    except FileNotFoundError:
        raise _damaged(directory, name, "is missing") from None
    except OSError as error:  # of the disk, or of another user's directory
        raise _damaged(directory, name, f"cannot be read ({error.strerror})") from error


def _damaged(directory: Path, name: str, what: str) -> CheckpointError:
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


def checkpoints(output_dir: Path) -> list[Path]:
    """The `checkpoint-<step>` directories of a run, oldest first, complete or not."""
    names = glob("checkpoint-*", root_dir=output_dir)  # none where this user may not look, in any Python
    numbered = (Path(output_dir, name) for name in names if _NUMBERED.fullmatch(name))
    return sorted(filter(Path.is_dir, numbered), key=step_of)


def newest_checkpoint(
    output_dir: Path, *, other_than: Path | None = None, sums: bool = True, rename: bool = False
) -> Path:
    """The newest complete checkpoint of a run, `other_than` this one; CheckpointError where there is none.

    A warning names newer ones that are damaged. With `rename` these get another name, so that the run can save in their
    place again. `sums`: as `verify_checkpoint`.
    """
    replaced = [
        path
        for path in Path(output_dir).glob(".checkpoint-*.previous")
        if TEMPORARY.fullmatch(path.name) and not path.with_name(path.name.split(".")[1]).exists()
    ]
    damaged: list[Path] = []
    for path in sorted([*checkpoints(output_dir), *replaced], key=step_of, reverse=True):
        if path == other_than:
            continue
        try:
            verify_checkpoint(path, sums=sums)
        except CheckpointError as error:
            _log.warning("ignoring %s: %s", path, error)
            damaged.append(path)
            continue
        for newer in damaged if rename else ():
            free = free_path(newer.with_name(f"checkpoint-{step_of(newer)}"), ".unusable")
            with changing(newer.parent):
                newer.rename(free)
            _log.warning("%s is called %s now, and the run goes on from %s", newer, free.name, path)
        return path
    raise CheckpointError(
        f"got resume_from_checkpoint=True for {output_dir}, which has no complete checkpoint-<step>; want one; "
        "fix: start without it, or pass the path of a checkpoint"
    )


def find_checkpoint(output_dir: Path, resume: bool | str | Path) -> Path:
    """The checkpoint that `resume_from_checkpoint` means, after every file was compared with its manifest.

    With True, newer ones that are damaged are renamed. CheckpointError, which names the newest complete one.
    """
    if resume is True:
        return newest_checkpoint(output_dir, rename=True)
    path = Path(str(resume))
    try:
        verify_checkpoint(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_alternative(path.parent, other_than=path)}") from error
    return path


def _alternative(output_dir: Path, *, other_than: Path | None = None, sums: bool = True) -> str:
    """Where the newest complete checkpoint is: part of an error message."""
    with suppress(CheckpointError, OSError):
        return f"the newest complete checkpoint is {newest_checkpoint(output_dir, other_than=other_than, sums=sums)}"
    return f"there is no {'other ' if other_than else ''}complete checkpoint in {output_dir}"


def step_of(path: Path) -> int:
    """Of `checkpoint-<step>`, or of `.checkpoint-<step>.previous`; 0 of another name, as a copy may have."""
    named = re.fullmatch(r"\.?checkpoint-(\d+)(\.previous)?", path.name, re.ASCII)
    return int(named[1]) if named else 0


def remove_old_checkpoints(
    output_dir: Path, keep: int | None, *, step: int | None = None, best: str | None = None
) -> None:
    """Remove the oldest checkpoints until `keep` are left, as transformers does: the newest and the `best` one are
    among these. None or 0 keeps all. The user's files stay.

    Those after `step` do not count, and stay: a run that resumed from an earlier one may have been unable to use them.
    """
    counted = [path for path in checkpoints(output_dir) if step is None or step_of(path) <= step]
    spare = [path for path in counted[:-1] if best is None or path.name != Path(best).name]
    for path in spare[: max(0, len(counted) - keep)] if keep else ():
        if is_removable(path):
            try:
                remove([path])
            except OSError as error:
                # The run has just saved what it needs: one too many is no reason to end it.
                _log.warning("could not remove %s, which save_total_limit=%d excludes: %s", path, keep, error)


def is_removable(path: Path) -> bool:
    """Whether it is a checkpoint, and no link to one elsewhere."""
    return path.is_dir() and not path.is_symlink() and bool(saved_names(path))


def remove(entries: list[Path]) -> None:
    """Remove files, and of checkpoints the files that their manifest names: the user's stay."""
    # Manifests and logs last: without them what a killed process has left is of no run, and would stay.
    for entry in reversed(entries):
        if not entry.is_dir():
            entry.unlink()
            continue
        for path in (entry / name for name in sorted(saved_names(entry), key=MANIFEST_FILE.__eq__)):
            if not path.is_dir():
                path.unlink(missing_ok=True)
        remove_empty(entry)


def remove_empty(directory: Path) -> None:
    """Remove the empty directories of a tree, itself included."""
    for path in (*sorted((p for p in directory.rglob("*") if p.is_dir()), reverse=True), directory):
        if not any(path.iterdir()):
            path.rmdir()


def refuse_foreign(directory: Path) -> None:
    """Raise CheckpointError where a directory to be replaced has a file that its manifest does not name."""
    if not directory.exists():
        return
    saved = saved_names(directory)
    files = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir()}
    if (foreign := sorted(files - saved)) or not directory.is_dir():
        raise CheckpointError(
            f"got {directory}, which holds files that no checkpoint wrote ({', '.join(foreign[:3])})"
            f"{'' if saved else f', and no {MANIFEST_FILE}, as an interrupted copy'}; want a new directory or an "
            "earlier checkpoint to replace; fix: move it or those files away"
        )


@contextmanager
def changing(directory: Path) -> Iterator[None]:
    """Around changes in an output directory: an OSError becomes a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"got {directory}, which cannot be written ({error.strerror}); want a directory for this run; "
            "fix: choose another --output-dir"
        ) from error


def _is_of_disk(error: Exception) -> bool:
    # safetensors and tokenizers write from Rust, which names the system's errors like this.
    return not isinstance(error, CheckpointError) and (isinstance(error, OSError) or "(os error" in str(error))


def _free(directory: Path) -> str:
    with suppress(OSError):
        return bytes_text(shutil.disk_usage(existing(directory.parent)).free)
    return "an unknown number of bytes"


def existing(path: Path) -> Path:
    """The path, or the nearest of its parents that exists, if only as a link to nothing."""
    places = (path.absolute(), *path.absolute().parents)
    return next(entry for entry in places if entry.exists() or entry.is_symlink())


def sibling(directory: Path, role: str) -> Path:
    """A hidden name beside `directory`, on the same file system, which is not taken for a checkpoint."""
    return directory.with_name(f".{directory.name}.{role}")


def free_path(path: Path, kind: str) -> Path:
    """The first of `<path><kind>-1`, `-2`, ... that does not exist."""
    names = (path.with_name(f"{path.name}{kind}-{number}") for number in count(1))
    return next(name for name in names if not os.path.lexists(name))
