"""Which options of a resumed run count, those of its checkpoint or its own: the rule of every option of `GRPOConfig`.

As users of transformers expect: what is part of a state is loaded with it (the checkpoint's learning rate counts), and
all else is the new run's. What cannot be continued is refused. Every difference is said (docs/checkpoints.md).
"""

from __future__ import annotations

import dataclasses
import logging
import reprlib
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.config.redaction import redacted
from fused_grpo.trainer.config.trl_fields import MISSING
from fused_grpo.trainer.models.adapters import adapter_identity

_log = logging.getLogger(__name__)


class Rule(NamedTuple):
    """Whose value counts, and why."""

    wins: Literal["checkpoint", "new", "refused", "none"]
    why: str


_BATCH = "the position in the data and the rollouts in progress are counted in such batches"
_OPTIMIZER = "it is in the state of the optimizer, which is loaded; for another one, start a new run from this model"
_SCORED = "from the next generated batch on"
_NEXT = "from the next step on"
_ASKED = "it says how this process starts, and nothing of the run"

# Options that are neither in here nor without effect (MISSING) are the new run's, from the next step on.
RULES: dict[str, Rule] = {
    **dict.fromkeys(("resume_from_checkpoint", "overwrite_output_dir"), Rule("none", _ASKED)),
    # By the numbers that follow from them: None may be the same as a number.
    **dict.fromkeys(("steps_per_generation", "generation_batch_size"), Rule("none", f"refused by number: {_BATCH}")),
    **dict.fromkeys(("data_seed", "shuffle_dataset"), Rule("none", "another order of the data is refused")),
    **dict.fromkeys(
        ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "num_iterations"),
        Rule("refused", _BATCH),
    ),
    "seed": Rule("refused", "the samples of the next step depend on it"),
    "loss_type": Rule("refused", "it is another objective"),
    "beta": Rule("refused", "it is another objective, and a reference model may be missing"),
    "sync_ref_model": Rule("refused", "the reference model has moved, or has not"),
    "optim": Rule("refused", "the state of the optimizer is that of another one"),
    "optim_target_modules": Rule("none", "a state of the optimizer with other parameters is refused"),
    **dict.fromkeys(
        ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim_args"),
        Rule("checkpoint", _OPTIMIZER),
    ),
    **dict.fromkeys(
        ("max_steps", "num_train_epochs", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
        Rule("new", "the schedule goes on from this step as if it had been so from the first"),
    ),
    **dict.fromkeys(
        ("max_completion_length", "top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs"),
        Rule("new", _SCORED),
    ),
    **dict.fromkeys(
        ("scale_rewards", "advantage_estimator", "reward_weights", "multi_objective_aggregation"), Rule("new", _SCORED)
    ),
}
_ADAPTIVE = Rule("checkpoint", "use_adaptive_entropy has moved it since")
_MID_BATCH = Rule("refused", "the checkpoint has rollouts in progress, with log-probs at that temperature")


def rule_of(name: str, args: GRPOConfig, *, mid_batch: bool) -> Rule:
    """The rule of an option. `mid_batch`: the checkpoint has rollouts in progress."""
    if name in MISSING:
        return Rule("none", MISSING[name].why)
    if name == "temperature" and mid_batch:
        return _MID_BATCH
    if name == "entropy_coef" and args.use_adaptive_entropy:
        return _ADAPTIVE
    return RULES.get(name, Rule("new", _NEXT))


def saved_options(args: GRPOConfig) -> dict[str, Any]:
    """All options as JSON, without secrets."""
    return {entry.name: redacted(getattr(args, entry.name), entry.name) for entry in dataclasses.fields(args)}


def identity(learner: Any) -> dict[str, Any]:
    """What has to be as it was: options, processes, the classes of optimizer and schedule, adapter and teacher."""
    args, processes = learner.args, learner.accelerator.num_processes
    model = learner.accelerator.unwrap_model(learner.policy).model
    return {
        **{name: getattr(args, name) for name, rule in RULES.items() if rule.wins == "refused"},
        "steps_per_generation": args.micro_batches_per_generation(processes),
        "num_processes": processes,
        "optimizer": type(learner.optimizer.optimizer).__name__,
        "schedule": type(learner.scheduler).__name__,
        "adapter": adapter_identity(model),
        "teacher": None if learner.teacher is None else learner.teacher.identity,
    }


def differences(learner: Any, saved: dict[str, Any], checkpoint: Path, *, mid_batch: bool) -> list[str]:
    """A line for each option that differs from the checkpoint's: both values, which one counts, and why.

    Args:
        saved: the content of training.json; older checkpoints have no "options".

    Raises:
        CheckpointError: one of them has to be as it was.
    """
    here, there, lines = identity(learner), saved["run"], list[str]()
    refused = [name for name in here if there.get(name) != here[name]]
    options, before = saved_options(learner.args), saved.get("options", {})
    if not before:
        lines.append("it is of an earlier version, which did not save its options: those of this run count")
    for name in sorted(options.keys() & before.keys()):
        rule = rule_of(name, learner.args, mid_batch=mid_batch)
        if options[name] != before[name] and rule.wins == "refused" and name not in refused:
            here[name], there = options[name], {**there, name: before[name]}
            refused.append(name)
        elif options[name] != before[name] and rule.wins != "none":
            which = "the checkpoint's" if rule.wins == "checkpoint" else "the new one"
            values = f"{_shortened(before[name])} in the checkpoint, {_shortened(options[name])} now"
            lines.append(f"{name}: {values}; {which} counts: {rule.why}")
    if refused:
        raise CheckpointError(
            f"got {_values(here, refused)} to resume from {checkpoint}, want {_values(there, refused)} as it was saved "
            "with; fix: resume with those options, or start a new run with the checkpoint as its model"
        )
    return lines


def _values(options: dict[str, Any], names: list[str]) -> str:
    return ", ".join(f"{name}={_shortened(options.get(name))}" for name in names)


def _shortened(value: Any) -> str:
    shortened = reprlib.Repr()
    shortened.maxdict = shortened.maxstring = shortened.maxother = 100  # an adapter's options, and not a file of them
    return shortened.repr(value)
