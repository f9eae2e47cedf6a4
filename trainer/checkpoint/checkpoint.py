"""Saving a checkpoint so that it is complete or absent, and finding the newest complete one.

A checkpoint is what `from_pretrained` reads (safetensors, tokenizer, config), the training state (`training_state.py`),
`trainer_state.json`, and a manifest with the sum of every file. It is written to `.<name>.partial`, synced to the disk
and renamed. An earlier checkpoint of that name is renamed to `.<name>.previous` first and removed afterwards. A process
that is killed between those two renames leaves both complete: resuming finds the old one, and the next save of that
name renames it back first. What a killed save has left half-written is removed when the next run starts there.

The price is that every file is read once more for its sum, a second or two per GB.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer.checkpoint.manifest import (
    MANIFEST_FILE,
    fsync,
    has_manifest,
    read_manifest,
    sibling,
    verify_checkpoint,
    write_manifest,
)
from fused_grpo.trainer.common.formatting import bytes_text

_log = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
# The names of a save that is not finished, and of the checkpoint that it replaces.
TEMPORARY = re.compile(r"\.(checkpoint-\d+|final)\.(partial|previous)")


def save_checkpoint(
    directory: Path,
    *,
    model: Any,
    tokenizer: Any,
    trainer_state: Mapping[str, object],
    state_dict: dict[str, Tensor] | None = None,
    write_more: Callable[[Path], None] | None = None,
) -> Path:
    """Write a checkpoint that is complete once it has its name. An earlier one of that name is replaced.

    Args:
        directory: where it will be; its parent is made where it is missing.
        model: a transformers or PEFT model, saved by its own `save_pretrained` as safetensors.
        tokenizer: saved by its own `save_pretrained`.
        trainer_state: the fields of transformers' `TrainerState`, as JSON.
        state_dict: full weights by name, where `model` itself is sharded.
        write_more: writes further files into the directory that it is given; its attribute `nbytes`, if it has one, is
            about how many bytes.

    Raises:
        CheckpointError: the disk is full or read-only. Then nothing half-written is left. Or the configuration, the
            tokenizer or the state cannot be saved, or `directory` holds files that no checkpoint wrote. Then the
            weights are in the directory that the message names. An earlier checkpoint is unchanged in each case.
    """
    directory = Path(directory)
    partial, previous = sibling(directory, "partial"), sibling(directory, "previous")
    # An adapter's files do not say how large they are.
    weights = sum(value.nbytes for value in model.parameters()) if hasattr(model, "parameters") else 0
    with _disk_errors(directory, weights + getattr(write_more, "nbytes", 0)):
        if previous.exists() and not directory.exists():
            os.rename(previous, directory)
        for leftover in (partial, previous):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            with weights_stay(partial, model, state_dict, name=free_path(directory, "-rescued")):
                model.save_pretrained(str(partial), state_dict=state_dict)
                tokenizer.save_pretrained(str(partial))
                (partial / STATE_FILE).write_text(json.dumps(dict(trainer_state), indent=2) + "\n", encoding="utf-8")
                if write_more is not None:
                    write_more(partial)
                write_manifest(partial)
                refuse_foreign(directory)
            _swap_in(partial, directory, previous)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return directory


@contextmanager
def weights_stay(directory: Path, model: Any, state_dict: Any, *, name: Path | None = None) -> Iterator[None]:
    """Around a save to `directory`: where anything but the disk fails, the weights are written all the same.

    Args:
        name: what `directory` is renamed to then. None: it keeps its name.

    Raises:
        CheckpointError: the save failed; says where the weights are.
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


def free_path(path: Path, kind: str) -> Path:
    """The first of `<path><kind>-1`, `-2`, ... that does not exist."""
    names = (path.with_name(f"{path.name}{kind}-{number}") for number in count(1))
    return next(name for name in names if not os.path.lexists(name))


def checkpoints(output_dir: Path) -> list[Path]:
    """The `checkpoint-<step>` directories of a run, oldest first, complete or not."""
    found = Path(output_dir).glob("checkpoint-*")
    numbered = [path for path in found if path.is_dir() and re.fullmatch(r"checkpoint-\d{1,18}", path.name, re.ASCII)]
    return sorted(numbered, key=step_of)


def newest_checkpoint(
    output_dir: Path, *, other_than: Path | None = None, sums: bool = True, unusable: list[Path] | None = None
) -> Path:
    """The newest complete checkpoint of a run; newer ones that are damaged are named in a warning, and in `unusable`.

    Raises:
        CheckpointError: there is none.
    """
    replaced = [
        path
        for path in Path(output_dir).glob(".checkpoint-*.previous")
        if TEMPORARY.fullmatch(path.name) and not path.with_name(path.name.split(".")[1]).exists()
    ]
    for path in sorted([*checkpoints(output_dir), *replaced], key=step_of, reverse=True):
        try:
            if path != other_than:
                verify_checkpoint(path, sums=sums)
                return path
        except CheckpointError as error:
            _log.warning("ignoring %s: %s", path, error)
            if unusable is not None:
                unusable.append(path)
    raise CheckpointError(
        f"got resume_from_checkpoint=True for {output_dir}, which has no complete checkpoint-<step>; want one; "
        "fix: start without it, or pass the path of a checkpoint"
    )


def find_checkpoint(output_dir: Path, resume: bool | str | Path) -> Path:
    """The checkpoint that `resume_from_checkpoint` means, after every file was compared with its manifest.

    With True, newer ones that are damaged are renamed, so that the run can save in their place again.

    Raises:
        CheckpointError: there is none, or it is damaged; then the message names the newest complete one.
    """
    if resume is True:
        unusable: list[Path] = []
        found = newest_checkpoint(output_dir, unusable=unusable)
        for path in unusable:
            free = free_path(path.with_name(f"checkpoint-{step_of(path)}"), ".unusable")
            try:
                path.rename(free)
            except OSError as error:
                raise unwritable(path.parent, error) from error
            _log.warning("%s is called %s now, and the run goes on from %s", path, free.name, found)
        return found
    path = Path(str(resume))
    try:
        verify_checkpoint(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_alternative(path.parent, other_than=path)}") from error
    return path


def remove_old_checkpoints(
    output_dir: Path, keep: int | None, *, step: int | None = None, best: str | None = None
) -> None:
    """Remove all but the `keep` newest checkpoints and the `best` one; None or 0 keeps all. The user's files stay.

    Those after `step` do not count, and stay: a run that resumed from an earlier one may have been unable to use them.
    """
    if not keep:
        return
    found = [path for path in checkpoints(output_dir) if step is None or step_of(path) <= step]
    for path in found[:-keep]:
        if best is not None and path.name == Path(best).name:
            continue
        try:
            remove([path] if is_removable(path) else [])
        except OSError as error:
            # The run has just saved what it needs: one too many is no reason to end it.
            _log.warning("could not remove %s, which save_total_limit=%d excludes: %s", path, keep, error)


def is_removable(path: Path) -> bool:
    """Whether it is a checkpoint, and no link to one elsewhere."""
    return path.is_dir() and not path.is_symlink() and has_manifest(path)


def remove(found: list[Path]) -> None:
    """Remove files, and of checkpoints the files that their manifest names: the user's stay."""
    for entry in found:
        if not entry.is_dir():
            entry.unlink()
            continue
        for path in (entry / name for name in (*read_manifest(entry, any_version=True), MANIFEST_FILE)):
            if not path.is_dir():
                path.unlink(missing_ok=True)
        remove_empty(entry)


def remove_empty(directory: Path) -> None:
    """Remove the empty directories of a tree, itself included."""
    for path in (*sorted((p for p in directory.rglob("*") if p.is_dir()), reverse=True), directory):
        if not any(path.iterdir()):
            path.rmdir()


@contextmanager
def _disk_errors(directory: Path, wanted: int) -> Iterator[None]:
    """Turn an error of the file system into one that says how much space was wanted, and how much is left."""
    try:
        yield
    except Exception as error:
        if not _is_of_disk(error):
            raise
        reason = getattr(error, "strerror", None) or error
        # Without sums, which take seconds per GB.
        raise CheckpointError(
            f"got {reason} while saving {directory}; want about {bytes_text(wanted)}, {_free(directory)} are free; "
            f"nothing half-written is left, and {_alternative(directory.parent, sums=False)}; "
            "fix: free some space (save_total_limit, save_only_model), or another output_dir"
        ) from error


def check_space(directory: Path, wanted: int) -> None:
    """Raise CheckpointError where there is no room for `wanted` bytes."""
    free = shutil.disk_usage(there := existing(directory)).free
    if free < wanted:
        raise CheckpointError(
            f"got {bytes_text(free)} free at {there}, want about {bytes_text(wanted)} for the final model and "
            "checkpoints; fix: free some space (save_only_model, save_strategy='no'), or another output_dir"
        )


def _is_of_disk(error: Exception) -> bool:
    # safetensors and tokenizers write from Rust, which names the system's errors like this.
    return not isinstance(error, CheckpointError) and (isinstance(error, OSError) or "(os error" in str(error))


def _alternative(output_dir: Path, *, other_than: Path | None = None, sums: bool = True) -> str:
    """Where the newest complete checkpoint is: part of an error message."""
    try:
        found = newest_checkpoint(output_dir, other_than=other_than, sums=sums)
    except (CheckpointError, OSError):
        return f"there is no {'other ' if other_than else ''}complete checkpoint in {output_dir}"
    return f"the newest complete checkpoint is {found}"


def _free(directory: Path) -> str:
    try:
        return bytes_text(shutil.disk_usage(existing(directory.parent)).free)
    except OSError:
        return "an unknown number of bytes"


def existing(path: Path) -> Path:
    """The path, or the nearest of its parents that exists."""
    return next(entry for entry in (path.absolute(), *path.absolute().parents) if entry.exists())


def step_of(path: Path) -> int:
    """Of `checkpoint-<step>`, or of `.checkpoint-<step>.previous`."""
    return int(path.name.strip(".").split(".")[0].removeprefix("checkpoint-"))


def _swap_in(partial: Path, directory: Path, previous: Path) -> None:
    replaces = directory.exists()
    if replaces:
        os.rename(directory, previous)
    try:
        os.rename(partial, directory)
    except BaseException:
        if replaces:
            os.rename(previous, directory)
        raise
    fsync(directory.parent)
    shutil.rmtree(previous, ignore_errors=True)


def refuse_foreign(directory: Path) -> None:
    """Raise CheckpointError where a directory to be replaced has a file that its manifest does not name."""
    if not directory.exists():
        return
    is_known = has_manifest(directory)
    known = {MANIFEST_FILE, *read_manifest(directory, any_version=True)} if is_known else set()
    files = [path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir()]
    foreign = sorted(set(files) - known)
    if foreign or not directory.is_dir():
        raise CheckpointError(
            f"got {directory}, which holds files that no checkpoint wrote ({', '.join(foreign[:3])})"
            f"{'' if is_known else f', and no {MANIFEST_FILE}, as an interrupted copy'}; want a new directory or an "
            "earlier checkpoint to replace; fix: move it or those files away"
        )


def unwritable(directory: Path, error: OSError) -> CheckpointError:
    """The error for an output directory in which nothing can be changed."""
    return CheckpointError(
        f"got {directory}, which cannot be written ({error.strerror}); want a directory for this run; "
        "fix: choose another --output-dir"
    )
