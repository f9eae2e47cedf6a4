"""Completes the options that say when a run logs, evaluates and saves, as transformers does."""

from __future__ import annotations

import math
from typing import Any


def complete_intervals(args: Any) -> None:
    """Names of strategies as text, whole numbers of steps as int, and the values that None stands for."""
    for name in ("logging_strategy", "eval_strategy", "save_strategy"):
        chosen = getattr(args, name)
        setattr(args, name, str(getattr(chosen, "value", chosen)))  # a member of transformers' IntervalStrategy
    for name in ("logging_steps", "eval_steps", "save_steps"):
        steps = getattr(args, name)
        if isinstance(steps, float) and steps >= 1 and steps.is_integer():
            setattr(args, name, int(steps))
    if args.eval_strategy == "steps" and args.eval_steps is None:
        args.eval_steps = args.logging_steps
    if args.greater_is_better is None and args.metric_for_best_model is not None:
        args.greater_is_better = not args.metric_for_best_model.endswith("loss")


def whole_steps(steps: float, max_steps: int) -> int:
    """A number of steps, which may be given as a share of all steps."""
    return math.ceil(steps * max_steps) if steps < 1 else int(steps)
