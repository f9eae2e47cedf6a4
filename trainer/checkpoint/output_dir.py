"""An output directory that no other run is lost in, and that a killed run has not littered."""

from __future__ import annotations

import shutil
from pathlib import Path

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer.checkpoint.checkpoint import SIBLING, checkpoints, is_ours, remove, remove_empty
from fused_grpo.trainer.config.run_files import METRICS_FILE, REPORT_FILE, REWARD_FILE, ROLLOUTS_FILE, RUN_FILE

# Runs of an earlier version have reward.png.
RUN_FILES = (METRICS_FILE, ROLLOUTS_FILE, RUN_FILE, REPORT_FILE, REWARD_FILE, "reward.png")


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
            `path` is a file or cannot be written.
    """
    path = Path(path)
    removed = check_output_dir(path, resume=resume, overwrite=overwrite, keep=keep)
    try:
        remove(removed)
        path.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(path)
    except OSError as error:
        raise CheckpointError(
            f"got {path}, which cannot be written ({error.strerror}); want a directory for this run; "
            "fix: choose another --output-dir"
        ) from error
    return path


def _run_files(path: Path) -> list[Path]:
    """Logs, reports and checkpoints of a run in `path`; a report alone, without logs, is somebody's copy."""
    if not path.is_dir():
        return []
    logs = [path / name for name in (METRICS_FILE, RUN_FILE) if (path / name).is_file()]
    saved = [child for child in sorted(path.iterdir()) if is_ours(child)]
    files = [path / name for name in RUN_FILES if (path / name).is_file()] if logs else []
    return [*files, *saved]


def _refuse_to_lose(keep: str | Path | None, found: list[Path]) -> None:
    kept = [entry for entry in found if keep is not None and Path(keep).resolve().is_relative_to(entry.resolve())]
    if kept:
        raise CheckpointError(
            f"got {keep} as the model and --overwrite-output-dir for the directory that holds it; "
            "want the model to survive; fix: choose another --output-dir"
        )


def _clear_leftovers(output_dir: Path) -> None:
    """Remove what a killed save or removal has left: a half-written copy, one that was replaced, an empty directory."""
    for path in output_dir.glob(".*"):
        if not (found := SIBLING.fullmatch(path.name)) or path.is_symlink():
            continue
        name, role = found.groups()
        if role == "partial" or (output_dir / name).exists():
            shutil.rmtree(path, ignore_errors=True)
    for path in checkpoints(output_dir):
        if not path.is_symlink():
            remove_empty(path)
