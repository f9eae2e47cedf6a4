"""Trackers (TensorBoard, Weights & Biases, trackio, MLflow, ...), through Accelerate's.

`metrics.jsonl` is the record of a run; a tracker is a second reader of the same numbers, every step of them. Which ones
is `report_to`. That they are installed is known before a model is loaded: Accelerate leaves out, at debug level, those
that are not, and a run that logs to nowhere is found out days later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers
from accelerate.utils import ProjectConfiguration

from fused_grpo.errors import UnavailableError
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.config.publishable import publishable

# What a tracker calls the name of a run, and its package where that is not the tracker's own name.
NAME_ARGUMENTS = {"wandb": "name", "trackio": "name", "mlflow": "run_name", "swanlab": "experiment_name"}
PACKAGES = {"comet_ml": "comet-ml"}


def tracker_arguments(args: GRPOConfig) -> dict[str, Any]:
    """What `Accelerator(...)` has to be told for `args.report_to`; nothing, where nothing is to be tracked.

    Raises:
        UnavailableError: a tracker that does not exist, or that is not installed.
    """
    if not args.report_to:
        return {}
    installed = {str(name) for name in get_available_trackers()}
    for name in args.report_to:
        if isinstance(name, GeneralTracker) or name == "all" or name in installed:
            continue
        if name not in LOGGER_TYPE_TO_CLASS:
            known = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
            raise UnavailableError(f"got report_to={name!r}, want one or several of {known}")
        raise UnavailableError(
            f"got report_to={name!r}, which is not installed; fix: pip install {PACKAGES.get(name, name)}"
        )
    logs = str(Path(args.output_dir) / "trackers")  # of those that write files: TensorBoard
    return {"log_with": args.report_to, "project_config": ProjectConfiguration(logging_dir=logs)}


class Trackers:
    """The trackers of one run, on its first process; begun when this is made.

    Args:
        accelerator: made with `tracker_arguments(args)`.
        args: the options of the run; trackers get them without secrets and home directories.
        facts: what else to say about the run beforehand: task, model, engine, ...
    """

    def __init__(self, accelerator: Accelerator, args: GRPOConfig, facts: Mapping[str, str]) -> None:
        self.accelerator = accelerator
        if not args.report_to:
            return
        name = args.run_name or Path(args.output_dir).name
        config = publishable({**vars(args), **facts})
        assert isinstance(config, dict)
        accelerator.init_trackers(
            args.project,
            config={
                key: value if isinstance(value, bool | int | float | str) else str(value)
                for key, value in config.items()
            },
            init_kwargs={tracker: {argument: name} for tracker, argument in NAME_ARGUMENTS.items()},
        )

    def log(self, record: Mapping[str, object]) -> None:
        """The numbers of a record of metrics.jsonl, at its step. What is not finite is left out."""
        numbers = {
            name: value
            for name, value in record.items()
            if isinstance(value, int | float) and math.isfinite(value) and name != "step"
        }
        self.accelerator.log(numbers, step=record["step"])

    def finish(self) -> None:
        """End the run. Not `Accelerator.end_training`, which takes the process group down with it."""
        for tracker in self.accelerator.trackers:
            tracker.finish()
