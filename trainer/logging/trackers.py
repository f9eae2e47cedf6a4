"""Trackers (TensorBoard, Weights & Biases, trackio, MLflow, ...), through Accelerate's.

A tracker gets the same numbers as `metrics.jsonl`, every step, under transformers' names: `train/loss`, `eval/reward`,
and at the end `train/train_runtime`. `report_to` names the trackers. That they are installed is checked before a model
is loaded: Accelerate skips a missing one with a message at debug level only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers
from accelerate.utils import ProjectConfiguration
from transformers.integrations.integration_utils import rewrite_logs

from fused_grpo.errors import UnavailableError
from fused_grpo.trainer.config.file_names import TRACKERS_FOLDER
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.config.redaction import redacted

# The argument of each tracker for the name of a run; packages whose name is not the tracker's.
NAME_ARGUMENTS = {"wandb": "name", "trackio": "name", "mlflow": "run_name", "swanlab": "experiment_name"}
PACKAGES = {"comet_ml": "comet-ml"}


def tracker_arguments(args: GRPOConfig) -> dict[str, Any]:
    """The arguments of `Accelerator(...)` for `args.report_to`; none where there is no tracker.

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
    logs = str(Path(args.output_dir) / TRACKERS_FOLDER)  # for those that write files: TensorBoard
    return {"log_with": args.report_to, "project_config": ProjectConfiguration(logging_dir=logs)}


class Trackers:
    """The trackers of one run, on its first process. The constructor starts them.

    Args:
        accelerator: made with `tracker_arguments(args)`.
        args: the options of the run; trackers get them without secrets and home directories.
        facts: further entries of the configuration: task, model, engine, ...
    """

    def __init__(self, accelerator: Accelerator, args: GRPOConfig, facts: Mapping[str, str]) -> None:
        self.accelerator = accelerator
        if not args.report_to:
            return
        name = args.run_name or Path(args.output_dir).name
        config = redacted({**args.to_dict(), **facts})
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
            re.sub(r"^(eval|test)/", r"\1_", name): value
            for name, value in record.items()
            if isinstance(value, int | float) and math.isfinite(value) and name != "step"
        }
        self.accelerator.log(rewrite_logs(numbers), step=record["step"])

    def finish(self) -> None:
        """End the run. Not by `Accelerator.end_training`, which also destroys the process group."""
        for tracker in self.accelerator.trackers:
            tracker.finish()
