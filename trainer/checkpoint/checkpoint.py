"""Checkpoints that are whole or absent.

A checkpoint is what `from_pretrained` reads (safetensors, tokenizer, config), `trainer_state.json` and a manifest with
the sum of every file. It is written beside its final place, synced to the disk, and renamed: whoever finds the name
finds all of it. Where one of that name exists, it steps aside to `.<name>.previous` until the new one is in place. A
process killed between those two renames leaves both of them whole; resuming finds the old one where it is, and the next
save of that name puts it back first. What a killed save left half-written goes when the next run starts there.

The price is that every file is read once more for its sum, a second or two per GB. What a run needs to resume lies
beside the weights (`training_state.py`). No file of ours is a pickle.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer.checkpoint.manifest import (
    MANIFEST_FILE,
    damaged,
    fsync,
    is_sealed,
    read_manifest,
    refuse_payloads,
    seal,
    unfit,
    verify_file,
)
from fused_grpo.trainer.data.stored_json import read_json

_log = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
# The name that a save works under, and the one that an earlier checkpoint has meanwhile.
SIBLING = re.compile(r"\.(checkpoint-\d+|final)\.(partial|previous)")


class SavesModel(Protocol):
    """A transformers model, or a PEFT model around one."""

    def save_pretrained(self, save_directory: str, *, state_dict: dict[str, Tensor] | None = None) -> Any: ...


class SavesTokenizer(Protocol):
    """A transformers tokenizer or processor."""

    def save_pretrained(self, save_directory: str) -> Any: ...


def save_checkpoint(
    directory: Path,
    *,
    model: SavesModel,
    tokenizer: SavesTokenizer,
    trainer_state: Mapping[str, object],
    state_dict: dict[str, Tensor] | None = None,
    write_more: Callable[[Path], None] | None = None,
) -> Path:
    """Write a checkpoint that is complete once it bears its name. An earlier one of that name is replaced.

    Args:
        directory: where it will be; its parent is made where it is missing.
        model: saved by its own `save_pretrained`, as safetensors.
        tokenizer: saved by its own `save_pretrained`.
        trainer_state: what JSON can hold.
        state_dict: full weights by name, where `model` itself is sharded.
        write_more: puts further files into the directory that it is given; about `nbytes` of them, where it has that.

    Raises:
        CheckpointError: `directory` holds files that no checkpoint of ours wrote; the state is not JSON; or the disk is
            full or does not let itself be written. Nothing half-made is left then, and an earlier one is as it was.
    """
    directory = Path(directory)
    state = _encode_state(trainer_state)
    partial, previous = _sibling(directory, "partial"), _sibling(directory, "previous")
    wanted = _num_bytes(model) + getattr(write_more, "nbytes", 0)
    with _disk_errors(directory, wanted):
        if previous.exists() and not directory.exists():
            os.rename(previous, directory)
        _refuse_foreign(directory)
        for leftover in (partial, previous):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            model.save_pretrained(str(partial), state_dict=state_dict)
            tokenizer.save_pretrained(str(partial))
            (partial / STATE_FILE).write_text(state, encoding="utf-8")
            if write_more is not None:
                write_more(partial)
            seal(partial)
            _swap_in(partial, directory, previous)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return directory


def verify_checkpoint(directory: Path, *, custom_code: bool = False, sums: bool = True) -> None:
    """Read every file of a checkpoint and compare it with the manifest; without `sums`, compare its size alone.

    Raises:
        CheckpointError: there is no manifest, a file is missing, truncated or changed, or there is a pickle, or without
            `custom_code` code, beside them; the message names it.
    """
    directory = Path(directory)
    previous = _sibling(directory, "previous")
    if previous.exists() and not directory.exists():
        raise CheckpointError(
            f"got {directory}, which is missing because a save was interrupted; want a complete checkpoint; "
            f"fix: the one before it is whole, rename {previous.name} to {directory.name}"
        )
    files = read_manifest(directory)
    for name, expected in files.items():
        verify_file(directory, name, expected, sums=sums)
    refuse_payloads(directory, custom_code=custom_code)


def checkpoints(output_dir: Path) -> list[Path]:
    """The `checkpoint-<step>` directories of a run, oldest first; whether they are whole is not looked at."""
    found = Path(output_dir).glob("checkpoint-*")
    numbered = [path for path in found if path.is_dir() and re.fullmatch(r"checkpoint-\d{1,18}", path.name, re.ASCII)]
    return sorted(numbered, key=_step_of)


def newest_checkpoint(output_dir: Path, *, custom_code: bool = False) -> Path:
    """The newest checkpoint of a run that is whole; newer ones that are not are named in a warning.

    Raises:
        CheckpointError: there is none.
    """
    for path in reversed(_candidates(output_dir)):
        try:
            verify_checkpoint(path, custom_code=custom_code)
        except CheckpointError as error:
            _log.warning("leaving out %s: %s", path, error)
            continue
        return path
    raise CheckpointError(
        f"got resume_from_checkpoint=True for {output_dir}, which has no whole checkpoint-<step>; want one; "
        "fix: start without it, or pass the path of a checkpoint"
    )


def whole_checkpoint_in(
    output_dir: Path, *, but: Path | None = None, custom_code: bool = False, sums: bool = True
) -> str:
    """Where the newest whole checkpoint is, other than `but`: part of an error message."""
    for path in reversed(_candidates(output_dir)):
        try:
            if path != but:
                verify_checkpoint(path, custom_code=custom_code, sums=sums)
                return f"the newest whole checkpoint is {path}"
        except (CheckpointError, OSError):
            continue
    return f"there is no {'other ' if but else ''}whole checkpoint in {output_dir}"


def remove_old_checkpoints(output_dir: Path, keep: int | None, *, step: int | None = None) -> None:
    """Remove all but the `keep` newest checkpoints of a run; None keeps all. Files that are not ours stay.

    Those after `step` do not count, and stay: a run that went on from an earlier one may have been unable to use them.
    """
    if keep is None:
        return
    found = [path for path in checkpoints(output_dir) if step is None or _step_of(path) <= step]
    for path in found[:-keep]:
        try:
            remove([path] if is_ours(path) else [])
        except OSError as error:
            # The run has just saved what it needs: one too many is no reason to end it.
            _log.warning("could not remove %s, which save_total_limit=%d leaves out: %s", path, keep, error)


def load_trainer_state(directory: Path) -> dict[str, Any]:
    """The `trainer_state` that a checkpoint was saved with.

    Raises:
        CheckpointError: the checkpoint has no manifest, or its state is missing, truncated or changed.
    """
    directory = Path(directory)
    files = read_manifest(directory)
    if STATE_FILE not in files:
        raise damaged(directory, STATE_FILE, "is not in the manifest")
    verify_file(directory, STATE_FILE, files[STATE_FILE])
    try:
        state: dict[str, Any] = read_json(directory / STATE_FILE, dict)
    except (ValueError, OSError) as error:
        raise unfit(directory, STATE_FILE, f"cannot be used ({error})") from error
    return state


def _encode_state(state: Mapping[str, object]) -> str:
    try:
        return json.dumps(dict(state), indent=2) + "\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"got a trainer_state that is not JSON ({error}); want numbers, strings, lists and dicts; "
            "fix: turn tensors and objects into those"
        ) from error


@contextmanager
def _disk_errors(directory: Path, wanted: int) -> Iterator[None]:
    """Turn what a file system refuses into an error that says how much was wanted, and what is left."""
    try:
        yield
    except Exception as error:
        # safetensors and tokenizers write from Rust, which names the system's errors like this.
        if isinstance(error, CheckpointError) or not (isinstance(error, OSError) or "(os error" in str(error)):
            raise
        reason = getattr(error, "strerror", None) or error
        # Without sums, which take seconds per GB; and code may lie in those that this run has saved itself.
        whole = whole_checkpoint_in(directory.parent, custom_code=True, sums=False)
        raise CheckpointError(
            f"got {reason} while saving {directory}; want about {_readable(wanted)}, {_free(directory)} are free; "
            f"nothing half-written is left, and {whole}; "
            "fix: free some space (save_total_limit, save_only_model), or another output_dir"
        ) from error


def _num_bytes(model: Any) -> int:
    """Of the weights: about what saving them takes. What writes an adapter alone does not say."""
    return sum(value.nbytes for value in model.parameters()) if hasattr(model, "parameters") else 0


def _free(directory: Path) -> str:
    there = next((path for path in directory.parents if os.path.exists(path)), directory.parent)
    try:
        return _readable(shutil.disk_usage(there).free)
    except OSError:
        return "an unknown number of bytes"


def _readable(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.2f} MiB"


def _candidates(output_dir: Path) -> list[Path]:
    """Checkpoints, oldest first, with those that a save had stepped aside for when it was killed."""
    aside = [
        path
        for path in Path(output_dir).glob(".checkpoint-*.previous")
        if SIBLING.fullmatch(path.name) and not path.with_name(path.name.split(".")[1]).exists()
    ]
    return sorted([*checkpoints(output_dir), *aside], key=_step_of)


def _step_of(path: Path) -> int:
    """Of `checkpoint-<step>`, or of `.checkpoint-<step>.previous`."""
    return int(path.name.strip(".").split(".")[0].removeprefix("checkpoint-"))


def _sibling(directory: Path, role: str) -> Path:
    """A hidden name beside `directory`: of the same file system, and taken for a checkpoint by nobody."""
    return directory.with_name(f".{directory.name}.{role}")


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


def _refuse_foreign(directory: Path) -> None:
    """A directory is replaced only where every file in it is of a checkpoint of ours."""
    if not directory.exists():
        return
    known = {MANIFEST_FILE, *read_manifest(directory, any_version=True)} if is_sealed(directory) else set()
    foreign = [p.relative_to(directory).as_posix() for p in directory.rglob("*") if not p.is_dir()]
    foreign = sorted(name for name in foreign if name not in known)
    if foreign or not directory.is_dir():
        raise CheckpointError(
            f"got {directory}, which holds files that no checkpoint wrote ({', '.join(foreign[:3])}); "
            "want a new directory or an earlier checkpoint to replace; fix: move those files away"
        )


def is_ours(child: Path) -> bool:
    """Whether it is a checkpoint that may be removed."""
    # A link to a checkpoint elsewhere is not this directory's to remove.
    return child.is_dir() and not child.is_symlink() and is_sealed(child)


def remove(found: list[Path]) -> None:
    """Remove files, and of checkpoints what their manifest names: what else is in them stays."""
    for entry in found:
        if not entry.is_dir():
            entry.unlink()
            continue
        for path in (entry / name for name in (*read_manifest(entry, any_version=True), MANIFEST_FILE)):
            if not path.is_dir():
                path.unlink(missing_ok=True)
        remove_empty(entry)


def remove_empty(directory: Path) -> None:
    """Remove the empty directories of a tree; what holds a file of somebody's stays."""
    for path in sorted((p for p in directory.rglob("*") if p.is_dir()), reverse=True):
        _rmdir_if_empty(path)
    _rmdir_if_empty(directory)


def _rmdir_if_empty(path: Path) -> None:
    if not any(path.iterdir()):
        path.rmdir()
