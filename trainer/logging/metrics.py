"""What a run leaves behind to be read: one JSON line per optimizer step and one per completion.

Plain text, append-only, opened anew for each write: a killed run loses at most the line it was writing, a shell can
follow it, and there is nothing to close. Trackers (wandb, trackio, tensorboard) show the same numbers; these files are
the record that the report is made from.

Names of metrics are TRL's where TRL has one. `time/<phase>` holds the seconds of a phase of the step and `step_time`
those of the whole; `num_tokens` counts the completion tokens of the step; `eval/...` is measured on held-out prompts.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fused_grpo.env import machine, versions
from fused_grpo.errors import CheckpointError
from fused_grpo.trainer.logging.publishable import publishable, to_json

METRICS_FILE = "metrics.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"
RUN_FILE = "run.json"

SUMMED = frozenset({"num_tokens", "loss", "policy_loss"})

# The loss op names its metrics with underscores, TRL with slashes; readers take either.
SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "clip_ratio": ("clip_ratio/region_mean", "clip_ratio_region"),
    "completion_length": ("completions/mean_length",),
}


class RunLog:
    """The log of one run, in `output_dir`: metrics.jsonl, rollouts.jsonl and run.json."""

    def __init__(self, output_dir: Path) -> None:
        self.output_dir = Path(output_dir)
        self.output_dir.mkdir(parents=True, exist_ok=True)
        for name in (METRICS_FILE, ROLLOUTS_FILE):
            (self.output_dir / name).touch()
            _mend_tail(self.output_dir / name)

    def log_metrics(self, record: Mapping[str, float | int | str]) -> None:
        """Append one line to metrics.jsonl, keys in the order given; NaN and infinities become null."""
        _append(self.output_dir / METRICS_FILE, [record])

    def log_rollouts(self, step: int, rows: Iterable[Mapping[str, object]]) -> None:
        """Append one line per completion to rollouts.jsonl.

        Args:
            step: the optimizer step that the completions were sampled for.
            rows: prompt, completion, reward, rewards (function name to value), advantage, finish_reason and
                weight_version of each completion.
        """
        _append(self.output_dir / ROLLOUTS_FILE, ({"step": step, **row} for row in rows))

    def log_config(self, config: Mapping[str, object], **facts: str) -> None:
        """Write run.json once: `config`, `facts` (task, model, engine, ...), versions, machine; no secrets.

        The configuration is inside run.json, not in a config.json: that name belongs to a model saved here. A run.json
        that is there already stays, so a resumed run keeps its first record.
        """
        path = self.output_dir / RUN_FILE
        if path.exists():
            return
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        run = {"started": started, **facts, "config": config, "versions": versions(), "machine": machine()}
        text = json.dumps(publishable(run), indent=2, ensure_ascii=False, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")


def read_metrics(path: Path) -> list[dict[str, float | int | str | None]]:
    """The records of a .jsonl file. A last line cut short by a killed run is left out.

    Raises:
        CheckpointError: a line before the last one is not JSON.
    """
    return list(iterate_records(path))


def iterate_records(path: Path) -> Iterator[dict[str, float | int | str | None]]:
    """`read_metrics`, a record at a time."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield json.loads(line)
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return
                raise CheckpointError(
                    f"got line {number} of {path.name}, which is not JSON; want one record a line; fix: remove it"
                ) from error


def rewind_logs(output_dir: Path, step: int) -> None:
    """Cut metrics.jsonl and rollouts.jsonl back to what they held when optimizer step `step` had been made.

    They are cut in place, at the first record of a later step: that takes no space, and a kill leaves one or the other.

    Raises:
        CheckpointError: a line before that is no record, or the file cannot be written; that log is as it was.
    """
    for path in (Path(output_dir) / METRICS_FILE, Path(output_dir) / ROLLOUTS_FILE):
        if not path.is_file():
            continue
        try:
            with path.open("r+b") as file:
                os.truncate(file.fileno(), _end_of(step, file, path))
                os.fsync(file.fileno())
        except OSError as error:
            raise CheckpointError(
                f"got {error.strerror} while cutting {path} back to step {step}; want a log that can be written; "
                "fix: make it so, and resume again"
            ) from error


def _end_of(step: int, lines: Iterable[bytes], path: Path) -> int:
    """The length of a log without its records of later steps."""
    end = 0
    for number, line in enumerate(lines, start=1):
        if not _is_record_until(step, line, where=f"line {number} of {path}"):
            break
        end += len(line)
    return end


def _is_record_until(step: int, line: bytes, *, where: str) -> bool:
    # A last line without an end is of a record that a killed run did not finish.
    if not line.endswith(b"\n"):
        return False
    try:
        return bool(json.loads(line).get("step", 0) <= step)
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"got {where}, which is no record of a run; fix: remove it, and resume again") from error


def metric(record: Mapping[str, object], name: str) -> float | None:
    """The number called `name` in `record`, in any of its spellings; None where it is absent or was not finite."""
    for spelling in SPELLINGS.get(name, (name,)):
        value = record.get(spelling)
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    return None


def merge_metrics(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """The metrics of an optimizer step from those of its micro-batches, with one wait for the device.

    Those in SUMMED are summed, `*_max` and `*_min` are extremes, all else is a mean weighted by
    `num_tokens`. A micro-batch without tokens has no say in the means, whatever it holds.

    Args:
        parts: per micro-batch, 0-d tensors of one device, with `num_tokens` among them. A metric that a micro-batch
            lacks is merged over the others.

    Returns:
        Python floats, in the order in which the names first appear.
    """
    names = list(dict.fromkeys(name for part in parts for name in part))
    if not names:
        return {}
    merged = [_merge(name, [part for part in parts if name in part]) for name in names]
    return dict(zip(names, torch.stack(merged).tolist(), strict=True))


def merge_floats(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """`merge_metrics` of what processes have made of theirs."""
    return merge_metrics([{name: torch.tensor(value) for name, value in part.items()} for part in parts])


def _merge(name: str, parts: list[Mapping[str, Tensor]]) -> Tensor:
    values = torch.stack([part[name].detach().float() for part in parts])
    if name in SUMMED:
        return values.sum()
    if name.endswith("_max"):
        return values.amax()
    if name.endswith("_min"):
        return values.amin()
    weights = torch.stack([part["num_tokens"].detach().float() for part in parts])
    return torch.where(weights > 0, values * weights, 0.0).sum() / weights.sum().clamp(min=1.0)


def _append(path: Path, records: Iterable[Mapping[str, object]]) -> None:
    lines = [json.dumps(to_json(record), ensure_ascii=False, allow_nan=False) + "\n" for record in records]
    # A lone surrogate cannot be UTF-8; its backslash form is how JSON spells it.
    text = "".join(lines).encode("utf-8", errors="backslashreplace")
    try:
        with path.open("ab") as file:
            file.write(text)
    except OSError as error:
        # What came of it is cut off when a run goes on here.
        raise CheckpointError(
            f"got {error.strerror} while writing {path}; want {len(text)} bytes for its next records; "
            "fix: free some space and resume"
        ) from error


def _mend_tail(path: Path) -> None:
    """Cut off a last line without an end, so that the next record does not continue it."""
    if path.stat().st_size == 0:
        return
    with path.open("r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end = content.rfind(b"\n") + 1
        file.truncate(end)
