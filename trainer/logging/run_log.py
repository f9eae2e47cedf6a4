"""The logs of a run: one JSON line per optimizer step and one per completion.

They are plain text, append-only and opened anew for each write: a killed run loses at most the line it was writing, a
shell can follow them, and there is nothing to close. Blocks of `rollouts_kept_steps` steps bound the log of
completions; where one ends depends on the number of the step alone, so a resumed run has those of a run that was never
stopped. What a reward function logs never has the name of a metric.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from fused_grpo.env import machine, versions
from fused_grpo.errors import CheckpointError, shown, visible
from fused_grpo.trainer.common.file_names import METRICS_FILE, OLD_ROLLOUTS_FILE, ROLLOUTS_FILE, RUN_FILE
from fused_grpo.trainer.common.formatting import to_json
from fused_grpo.trainer.common.redaction import redacted
from fused_grpo.trainer.common.warnings import warn_once

Record = dict[str, Any]  # of metrics.jsonl: numbers, text and None; of rollouts.jsonl: lists and mappings too

# Names of our metrics, of TRL's, and of fields of rollouts.jsonl, whether or not the run at hand has them.
TAKEN = re.compile(
    r"""(_|eval_).* | remax/greedy_reward
    | (completions|curriculum|dynamic_sampling|eval|gradient|logged|prompts|rewards|rollouts|sampling|time|tools)/.*
    | (vespo|weight_sync)/.*|centering_(sampler_mass|trainer_mass|l1)|pass@\d+
    | (train_|)(runtime|samples_per_second|steps_per_second|loss) | step|epoch|global_step|step_time|total_flos
    | reward|reward_std|reward_std_within_groups|frac_reward_zero_std|groups_with_equal_rewards|learning_rate|grad_norm
    | prompts?|completions?|completion_(ids|length|tokens)|images?|rewards|advantages?|finish_reason|kept_tokens
    | dropped|failure|weight_version|rollout_engine|generate_calls|num_tokens|off_policy_steps|ratio_(mean|min|max)
    | messages|turns|tool_calls|ended|greedy_(completion|reward)
    | clip_ratio([_/].*|)|cispo_clip_ratio|sampling_difference_(mean|max)|policy_loss|policy_term|loss_without_bonus
    | kl|aux_loss|distillation|entropy|entropy_coef|entropy_coef_applied|effective_weight|zero_gradient_fraction
    | recomputed_fraction|skipped_steps""",
    re.VERBOSE,
)


class RunLog:
    """The log of one run, in `output_dir`: metrics.jsonl, rollouts.jsonl and run.json; CheckpointError: a full disk.

    `kept_steps` are the steps of a block of rollouts. 0: they are all in one file.
    """

    def __init__(self, output_dir: Path, kept_steps: int = 0) -> None:
        self.output_dir, self.kept_steps = Path(output_dir), kept_steps
        self.output_dir.mkdir(parents=True, exist_ok=True)
        for path in (self.output_dir / METRICS_FILE, self.output_dir / ROLLOUTS_FILE):
            write(path, "", mode="ab")
        # The step of the rollouts that were written last; None of a new run.
        self._last_step = _first_step(self.output_dir / ROLLOUTS_FILE)

    def log_metrics(self, record: Mapping[str, float | int | str]) -> None:
        """Append one line to metrics.jsonl, keys in the order given; NaN and infinities become null."""
        _append(self.output_dir / METRICS_FILE, [record])

    def log_rollouts(self, step: int, rows: Iterable[Mapping[str, object]]) -> None:
        """Append a line to rollouts.jsonl for each completion that was sampled for optimizer step `step`."""
        path, last = self.output_dir / ROLLOUTS_FILE, self._last_step
        if self.kept_steps and last is not None and (step - 1) // self.kept_steps > (last - 1) // self.kept_steps:
            path.replace(self.output_dir / OLD_ROLLOUTS_FILE)
        self._last_step = step
        _append(path, ({"step": step, **row} for row in rows))

    def log_config(self, config: Mapping[str, object], **facts: str) -> None:
        """Write run.json once: `config`, `facts` (task, model, engine, ...), versions, machine; no secrets.

        The configuration is inside run.json, not in a config.json: that name belongs to a model saved here. An existing
        run.json is not replaced, so a resumed run keeps its first record.
        """
        path = self.output_dir / RUN_FILE
        if path.exists():
            return
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        run = {"started": started, **facts, "config": config, "versions": versions(), "machine": machine()}
        text = json.dumps(redacted(run), indent=2, ensure_ascii=False, allow_nan=False)
        write(path, text + "\n")


def free_name(given: object) -> str:
    """The name under which a reward function's value is logged: its own, after "logged/" where it is one of `TAKEN`."""
    name = visible(shown(given, 200))
    if name and not TAKEN.fullmatch(name):
        return name
    warn_once(f"a reward function logs {name!r}, a name of the log's own: its values are called 'logged/{name}'")
    return f"logged/{name}"


def read_metrics(path: Path) -> list[Record]:
    """The records of a .jsonl file, without a last line that a killed run did not finish; CheckpointError: another."""
    return list(iterate_records(path))


def iterate_records(path: Path) -> Iterator[Record]:
    """`read_metrics`, a record at a time."""
    with open(path, "rb", opener=_at_once) as file:
        for record, _ in _records(file, path):
            yield record


def rewind_logs(output_dir: Path, step: int, *, evaluation: bool = True) -> None:
    """Cut metrics.jsonl and rollouts.jsonl back to what they held when optimizer step `step` had been made.

    Without its `evaluation`, where the run is going to repeat that: a checkpoint of the last step is saved before it.
    They are cut in place, at the first record of a later step: that takes no space, and after a kill a log is either
    cut or unchanged. A block of rollouts that began after that step is removed, and the one before takes its place.
    CheckpointError where a line before that is no record, or the file cannot be written; that log is as it was.
    """

    def is_kept(record: Record) -> bool:
        at = record.get("step", 0)
        return at < step or (at == step and (evaluation or not any(name.startswith("eval/") for name in record)))

    logs = [Path(output_dir) / name for name in (METRICS_FILE, OLD_ROLLOUTS_FILE, ROLLOUTS_FILE)]
    for path in filter(Path.is_file, logs):
        try:
            with open(path, "r+b", opener=_at_once) as file:
                kept = takewhile(lambda item: is_kept(item[0]), _records(file, path))
                os.truncate(file.fileno(), max((end for _, end in kept), default=0))
                os.fsync(file.fileno())
        except OSError as error:
            raise CheckpointError(
                f"got {error.strerror} while cutting {path} back to step {step}; want a log that can be written; "
                "fix: make it so, and resume again"
            ) from error
    _, old, rollouts = logs
    if old.is_file() and _first_step(rollouts) is None:
        old.replace(rollouts)


def _first_step(path: Path) -> int | None:
    """The step of the first record of a log; None without one."""
    return next((record.get("step") for record in iterate_records(path)), None) if path.is_file() else None


def _records(lines: Iterable[bytes], path: Path) -> Iterator[tuple[Record, int]]:
    """The records of a log, each with the number of bytes up to its end."""
    end = 0
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            return
        try:
            record, end = json.loads(line), end + len(line)
            if not isinstance(record, dict) or not isinstance(record.get("step", 0), int):
                raise ValueError("no mapping with a step")
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"got line {number} of {path.name}, which is no record of a run; want a JSON object; fix: remove it"
            ) from error
        yield record, end


def metric(record: Mapping[str, object], name: str) -> float | None:
    """The number called `name` in `record`; None where it is absent or was not finite, or has no fp64."""
    value = record.get(name)
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:
        return None


def _at_once(path: str, flags: int) -> int:
    """Opens a file; a pipe without a reader in its place is an error and not a wait."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def _append(path: Path, records: Iterable[Mapping[str, object]]) -> None:
    lines = [json.dumps(to_json(record), ensure_ascii=False, allow_nan=False) + "\n" for record in records]
    write(path, "".join(lines), mode="ab")


def write(path: Path, text: str, *, mode: str = "wb") -> None:
    """Write or append to a file of a run; CheckpointError where the disk is full, or it cannot be written."""
    # A lone surrogate cannot be UTF-8; its backslash form is how JSON spells it.
    content = text.encode("utf-8", errors="backslashreplace")
    try:
        with open(path, mode, opener=_at_once) as file:
            file.write(content)
    except OSError as error:
        # A half-written line is cut off when a run is resumed here.
        raise CheckpointError(
            f"got {error.strerror} while writing {path}; want {len(content)} bytes for it; fix: free some space, or "
            "move what is in its place away, and resume"
        ) from error
