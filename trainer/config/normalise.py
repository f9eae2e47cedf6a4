"""Options as a user may write them, in the form in which the run uses them: JSON as mappings, shares as steps."""

from __future__ import annotations

import json
import math
import os
import warnings
from typing import Any

from fused_grpo.errors import InputError

# Sampling options that `generation_kwargs` replaces, as in TRL.
OVERRIDDEN = {"top_p", "top_k", "min_p", "repetition_penalty"}
DICTS = (
    "model_init_kwargs",
    "teacher_model_init_kwargs",
    "gradient_checkpointing_kwargs",
    "activation_checkpointing_kwargs",
    "lr_scheduler_kwargs",
    "generation_kwargs",
    "chat_template_kwargs",
    "vllm_engine_kwargs",
)


def normalise(args: Any) -> None:
    """Bring options into the form that has their type, before types are checked.

    Raises:
        InputError: text that is not JSON of a mapping, or trackers without names.
    """
    scale = _as_bool(args.scale_rewards)
    args.scale_rewards = ("group" if scale else "none") if isinstance(scale, bool) else scale
    args.resume_from_checkpoint = _as_bool(args.resume_from_checkpoint)
    args.report_to = _listed(args.report_to)
    for name in ("output_dir", "resume_from_checkpoint"):
        if isinstance(getattr(args, name), os.PathLike):
            setattr(args, name, os.fspath(getattr(args, name)))
    for name in DICTS:
        setattr(args, name, _mapping(name, getattr(args, name)))
    for name in ("checkpointing", "checkpointing_kwargs"):
        if getattr(args, f"activation_{name}") is not None:
            setattr(args, f"gradient_{name}", getattr(args, f"activation_{name}"))
    given = args.generation_kwargs if isinstance(args.generation_kwargs, dict) else {}
    for name in OVERRIDDEN.intersection(given):
        setattr(args, name, given[name])
    if args.optim_target_modules == ["all-linear"]:  # as the command line reads it
        args.optim_target_modules = "all-linear"
    if args.vllm_importance_sampling_cap is not None:
        fix = "fix: set vllm_importance_sampling_clip_max"
        warnings.warn(f"vllm_importance_sampling_cap is deprecated; {fix}", FutureWarning, stacklevel=4)
        args.vllm_importance_sampling_clip_max = args.vllm_importance_sampling_cap


def complete_intervals(args: Any) -> None:
    """Names of strategies as text, whole numbers of steps as int, and the values that None stands for."""
    # A script for TRL looks for "no" where it sets nothing.
    if args.eval_at_ends is None:
        args.eval_at_ends = args.eval_strategy is None
    args.eval_strategy = args.eval_strategy or "no"
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


def _as_bool(value: Any) -> Any:
    """True or False for their text, and any other value as it is."""
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


def _listed(names: str | list[str] | None) -> list[str]:
    """`report_to` as a list: a name, several, or "none"."""
    if not isinstance(names, str | list | tuple | None):
        raise InputError(f"got report_to={names!r}, want the names of trackers")
    listed = [names] if isinstance(names, str) else names or []
    return [name for name in listed if name != "none"]


def _mapping(name: str, value: dict[str, Any] | str | None) -> dict[str, Any] | None:
    """A mapping, or the JSON of one, as in TRL."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InputError(f"got {name}={value[:200]!r}, which is not JSON ({error}); want a mapping") from error
    if not isinstance(parsed, dict):
        raise InputError(f"got {name}={value!r}, want a mapping")
    return parsed
