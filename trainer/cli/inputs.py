"""What a run trains: the user's model, data and rewards, or in their place a task."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from fused_grpo.errors import InputError
from fused_grpo.trainer.cli.options import TrainOptions
from fused_grpo.trainer.logging.console import progress
from fused_grpo.trainer.tasks.named import ARITHMETIC, named_task
from fused_grpo.trainer.tasks.task import Task

# Options that say where rows come from, which a task says itself.
_OF_DATA = ("dataset", "dataset_config", "prompt_column", "answer_column", "eval_dataset")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Arguments of `GRPOTrainer`."""

    model: Any
    reward_funcs: Any
    train: Any
    heldout: Any  # None: there are none
    processing_class: Any = None  # None: the tokenizer beside the model
    task: Task | None = None  # where these come from


def check_combination(options: TrainOptions) -> None:
    """Raise InputError where only some of model, data and rewards are given; with a teacher, rewards may lack."""
    if options.task is not None:
        return _check_task(options, options.task)
    if options.task_options:
        raise InputError(
            f"got --task-options {' '.join(options.task_options)} without --task, want the task that takes them; "
            "fix: add --task"
        )
    given = {
        "--model": options.model is not None,
        "--dataset": options.dataset is not None,
        "--reward-funcs": bool(options.reward_funcs),
    }
    if options.teacher_model is not None and options.model is not None:
        del given["--reward-funcs"]
    if any(given.values()) and not all(given.values()):
        has, lacks = (" and ".join(option for option in given if given[option] is wanted) for wanted in (True, False))
        raise InputError(
            f"got {has} without {lacks}, want all three, or --model and --task, or none for the built-in task; fix: "
            f"add {lacks}"
        )


def _check_task(options: TrainOptions, name: str) -> None:
    defaults = {entry.name: entry.default for entry in dataclasses.fields(options)}
    for option in _OF_DATA:
        if (value := getattr(options, option)) != defaults[option]:
            raise InputError(
                f"got --task {name} and --{option.replace('_', '-')} {value}, want one of them: a task has rows of its "
                "own; fix: leave one out"
            )
    if options.model is None and name != ARITHMETIC:
        raise InputError(f"got --task {name} without --model, want one to train; fix: add --model")


def load_task(options: TrainOptions) -> Task | None:
    """The task, which is arithmetic where there is no model; None where data and rewards are the user's own."""
    name = options.task or (ARITHMETIC if options.model is None else None)
    if name is None:
        return None
    with progress(f"making the rows of {name}"):
        return named_task(name, options.task_options, limit=options.limit, eval_limit=options.eval_limit)
