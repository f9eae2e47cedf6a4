"""The output directory of a run: another run in it is never lost, and leftovers of a killed run are removed."""

from __future__ import annotations

import shutil
from pathlib import Path

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer.checkpoint.checkpoint import TEMPORARY, checkpoints, is_removable, remove, remove_empty
from fused_grpo.trainer.config.file_names import (
    METRICS_FILE,
    OLD_ROLLOUTS_FILE,
    REPORT_FILE,
    REWARD_FILE,
    ROLLOUTS_FILE,
    RUN_FILE,
)

# Runs of an earlier version have reward.png.
RUN_FILES = (METRICS_FILE, ROLLOUTS_FILE, OLD_ROLLOUTS_FILE, RUN_FILE, REPORT_FILE, REWARD_FILE, "reward.png")


def check_output_dir(
    path: Path, *, resume: bool = False, overwrite: bool = False, keep: str | Path | None = None
) -> list[Path]:
    """What `prepare_output_dir` would remove. Nothing is written or removed.

    Raises:
        CheckpointError: where `prepare_output_dir` would raise it.
    """
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
    if keep is not None and any(Path(keep).resolve().is_relative_to(entry.resolve()) for entry in found):
        raise CheckpointError(
            f"got {keep} as the model and --overwrite-output-dir for the directory that holds it; "
            "want the model to survive; fix: choose another --output-dir"
        )
    return found


def prepare_output_dir(
    path: Path, *, resume: bool = False, overwrite: bool = False, keep: str | Path | None = None
) -> Path:
    """Make `path` ready for a run. Nothing is written or removed where this raises.

    Args:
        path: the directory; made where it is missing. Files that are not of a run stay, always.
        resume: keep the run that is there and continue its files.
        overwrite: remove the run that is there (unless `resume`): its logs, report and checkpoints, file by file.
        keep: the model that this run is going to read; `overwrite` refuses to remove it.

    Raises:
        CheckpointError: another run is there and neither `resume` nor `overwrite` is set; or it holds `keep`; or
            `path` is a file or cannot be written.
    """
    path = Path(path)
    removed = check_output_dir(path, resume=resume, overwrite=overwrite, keep=keep)
    try:
        remove(removed)
        path.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path)
    except OSError as error:
        raise CheckpointError(
            f"got {path}, which cannot be written ({error.strerror}); want a directory for this run; "
            "fix: choose another --output-dir"
        ) from error
    return path


def _run_files(path: Path) -> list[Path]:
    """Logs, reports and checkpoints of a run in `path`; a report without logs is a copy that the user made."""
    if not path.is_dir():
        return []
    has_logs = any((path / name).is_file() for name in (METRICS_FILE, RUN_FILE))
    files = [path / name for name in RUN_FILES if (path / name).is_file()] if has_logs else []
    return [*files, *(child for child in sorted(path.iterdir()) if is_removable(child))]


def _remove_leftovers(output_dir: Path) -> None:
    """Remove what a killed save or removal has left: a half-written copy, one that was replaced, an empty directory."""
    for path in output_dir.glob(".*"):
        if not (found := TEMPORARY.fullmatch(path.name)) or path.is_symlink():
            continue
        name, role = found.groups()
        if role == "partial" or (output_dir / name).exists():
            shutil.rmtree(path, ignore_errors=True)
    for path in checkpoints(output_dir):
        if not path.is_symlink():
            remove_empty(path)
