"""Checkpoints that are whole or absent, and an output directory that no other run is lost in.

A checkpoint is what `from_pretrained` reads (safetensors, tokenizer, config), `trainer_state.json` and a manifest with
the sum of every file. It is written beside its final place, synced to the disk, and renamed: whoever finds the name
finds all of it. Where one of that name exists, it steps aside to `.<name>.previous` until the new one is in place. A
process killed between those two renames leaves both of them whole; the next save puts the old one back first.

The price is that every file is read once more for its sum, a second or two per GB. What a run needs to resume lies
beside the weights (`training_state.py`). No file of ours is a pickle.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer.manifest import MANIFEST_FILE, damaged, fsync, is_sealed, read_manifest, seal, verify_file
from fused_grpo.trainer.metrics import METRICS_FILE, ROLLOUTS_FILE, RUN_FILE

_log = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
REPORT_FILES = ("report.html", "reward.png")
RUN_FILES = (METRICS_FILE, ROLLOUTS_FILE, RUN_FILE, *REPORT_FILES)


class SavesModel(Protocol):
    """A transformers model, or a PEFT model around one."""

    def save_pretrained(self, save_directory: str, *, state_dict: dict[str, Tensor] | None = None) -> Any: ...


class SavesTokenizer(Protocol):
    """A transformers tokenizer or processor."""

    def save_pretrained(self, save_directory: str) -> Any: ...


def check_output_dir(
    path: Path, *, resume: bool = False, overwrite: bool = False, keep: str | Path | None = None
) -> list[Path]:
    """What `prepare_output_dir` would remove; raises what it would raise. Nothing is written or removed."""
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"got {path}, which is a file; want a directory; fix: choose another --output-dir")
    found = _run_files(path)
    if found and not (resume or overwrite):
        raise CheckpointError(
            f"got {path}, which holds another run ({', '.join(sorted(file.name for file in found))}); "
            "want an output directory of its own; fix: choose another --output-dir, or pass --overwrite-output-dir"
        )
    if resume:
        return []
    _refuse_to_lose(keep, found)
    return found


def prepare_output_dir(
    path: Path, *, resume: bool = False, overwrite: bool = False, keep: str | Path | None = None
) -> Path:
    """Make `path` ready for a run. Nothing is written or removed where this raises.

    Args:
        path: the directory; made where it is missing. Files that are not of a run stay, always.
        resume: keep the run that is there and go on in its files.
        overwrite: remove the run that is there (unless `resume`): its logs, report and checkpoints, file by file.
        keep: what this run is going to read, its model; `overwrite` refuses to remove that.

    Raises:
        CheckpointError: another run is there and neither `resume` nor `overwrite` is set; or it holds `keep`; or
            `path` is a file.
    """
    path = Path(path)
    _remove(check_output_dir(path, resume=resume, overwrite=overwrite, keep=keep))
    path.mkdir(parents=True, exist_ok=True)
    return path


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
        write_more: puts further files into the directory that it is given.

    Raises:
        CheckpointError: `directory` holds files that no checkpoint of ours wrote, or the state is not JSON.
    """
    directory = Path(directory)
    state = _encode_state(trainer_state)
    partial, previous = _sibling(directory, "partial"), _sibling(directory, "previous")
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


def verify_checkpoint(directory: Path) -> None:
    """Read every file of a checkpoint and compare it with the manifest.

    Raises:
        CheckpointError: there is no manifest, or a file is missing, truncated or changed; the message names it.
    """
    directory = Path(directory)
    previous = _sibling(directory, "previous")
    if previous.exists() and not directory.exists():
        raise CheckpointError(
            f"got {directory}, which is missing because a save was interrupted; want a complete checkpoint; "
            f"fix: the one before it is whole, rename {previous.name} to {directory.name}"
        )
    for name, expected in read_manifest(directory).items():
        verify_file(directory, name, expected)


def checkpoints(output_dir: Path) -> list[Path]:
    """The `checkpoint-<step>` directories of a run, oldest first; whether they are whole is not looked at."""
    found = Path(output_dir).glob("checkpoint-*")
    numbered = [path for path in found if path.is_dir() and path.name.removeprefix("checkpoint-").isdigit()]
    return sorted(numbered, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def newest_checkpoint(output_dir: Path) -> Path:
    """The newest checkpoint of a run that is whole; newer ones that are not are named in a warning.

    Raises:
        CheckpointError: there is none.
    """
    for path in reversed(checkpoints(output_dir)):
        try:
            verify_checkpoint(path)
        except CheckpointError as error:
            _log.warning("leaving out %s: %s", path, error)
            continue
        return path
    raise CheckpointError(
        f"got resume_from_checkpoint=True for {output_dir}, which has no whole checkpoint-<step>; want one; "
        "fix: start without it, or pass the path of a checkpoint"
    )


def remove_old_checkpoints(output_dir: Path, keep: int | None) -> None:
    """Remove all but the `keep` newest checkpoints of a run; None keeps all. Files that are not ours stay."""
    old = [] if keep is None else checkpoints(output_dir)[:-keep]
    _remove([path for path in old if _is_ours(path)])


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
    state: dict[str, Any] = json.loads((directory / STATE_FILE).read_bytes())
    return state


def _encode_state(state: Mapping[str, object]) -> str:
    try:
        return json.dumps(dict(state), indent=2) + "\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"got a trainer_state that is not JSON ({error}); want numbers, strings, lists and dicts; "
            "fix: turn tensors and objects into those"
        ) from error


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
    known = {MANIFEST_FILE, *read_manifest(directory)} if is_sealed(directory) else set()
    foreign = [p.relative_to(directory).as_posix() for p in directory.rglob("*") if not p.is_dir()]
    foreign = sorted(name for name in foreign if name not in known)
    if foreign or not directory.is_dir():
        raise CheckpointError(
            f"got {directory}, which holds files that no checkpoint wrote ({', '.join(foreign[:3])}); "
            "want a new directory or an earlier checkpoint to replace; fix: move those files away"
        )


def _run_files(path: Path) -> list[Path]:
    """Logs, reports and checkpoints of a run in `path`; a report alone, without logs, is somebody's copy."""
    if not path.is_dir():
        return []
    logs = [path / name for name in (METRICS_FILE, RUN_FILE) if (path / name).is_file()]
    checkpoints = [child for child in sorted(path.iterdir()) if _is_ours(child)]
    files = [path / name for name in RUN_FILES if (path / name).is_file()] if logs else []
    return [*files, *checkpoints]


def _is_ours(child: Path) -> bool:
    # A link to a checkpoint elsewhere is not this directory's to remove.
    return child.is_dir() and not child.is_symlink() and is_sealed(child)


def _refuse_to_lose(keep: str | Path | None, found: list[Path]) -> None:
    kept = [entry for entry in found if keep is not None and Path(keep).resolve().is_relative_to(entry.resolve())]
    if kept:
        raise CheckpointError(
            f"got {keep} as the model and --overwrite-output-dir for the directory that holds it; "
            "want the model to survive; fix: choose another --output-dir"
        )


def _remove(found: list[Path]) -> None:
    for entry in found:
        if not entry.is_dir():
            entry.unlink()
            continue
        for name in (*read_manifest(entry), MANIFEST_FILE):
            (entry / name).unlink(missing_ok=True)
        _remove_empty(entry)


def _remove_empty(directory: Path) -> None:
    """Remove the empty directories of a tree; what holds a file of somebody's stays."""
    for path in sorted((p for p in directory.rglob("*") if p.is_dir()), reverse=True):
        _rmdir_if_empty(path)
    _rmdir_if_empty(directory)


def _rmdir_if_empty(path: Path) -> None:
    if not any(path.iterdir()):
        path.rmdir()
