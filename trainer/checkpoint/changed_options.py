"""Which options of a resumed run count, those of its checkpoint or its own: the rule of every option of `GRPOConfig`.

As users of transformers expect: what is part of a state is loaded with it (the checkpoint's learning rate counts), and
all else is the new run's. What cannot be continued is refused. Every difference is said (docs/checkpoints.md).
"""

from __future__ import annotations

import dataclasses
import reprlib
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.config.redaction import redacted
from fused_grpo.trainer.config.trl_fields import MISSING
from fused_grpo.trainer.models.adapters import adapter_identity


class Rule(NamedTuple):
    """Whose value counts, and why."""

    wins: Literal["checkpoint", "new", "refused", "none"]
    why: str


_IN_STATE = "it is in the state of the optimizer, which is loaded; for another one, start a new run from this model"
_BATCHES = "the position in the data and the rollouts in progress are counted in such batches"
_SCHEDULE = "the schedule goes on from this step as if it had been so from the first"
_SAMPLED = "from the next generated batch on"
_RULES: tuple[tuple[str, Rule], ...] = (
    (
        "resume_from_checkpoint overwrite_output_dir output_dir",
        Rule("none", "it says where and how this process starts"),
    ),
    # None may be the same as a number.
    ("steps_per_generation generation_batch_size", Rule("none", f"refused by its number: {_BATCHES}")),
    ("data_seed shuffle_dataset", Rule("none", "another order of the data is refused")),
    ("optim_target_modules", Rule("none", "a state of the optimizer with other parameters is refused")),
    ("per_device_train_batch_size gradient_accumulation_steps", Rule("refused", _BATCHES)),
    ("num_generations num_iterations", Rule("refused", _BATCHES)),
    ("seed", Rule("refused", "the samples of the next step depend on it")),
    ("loss_type beta sync_ref_model", Rule("refused", "it is another objective, or another reference model")),
    ("optim", Rule("refused", "the state of the optimizer is that of another one")),
    ("learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon optim_args", Rule("checkpoint", _IN_STATE)),
    ("max_steps num_train_epochs lr_scheduler_type lr_scheduler_kwargs warmup_steps", Rule("new", _SCHEDULE)),
    ("max_completion_length top_p top_k min_p repetition_penalty generation_kwargs", Rule("new", _SAMPLED)),
    ("scale_rewards advantage_estimator reward_weights multi_objective_aggregation", Rule("new", _SAMPLED)),
)
# All other options, but those without effect (MISSING), are the new run's, from the next step on.
RULES = {name: rule for names, rule in _RULES for name in names.split()}


def rule_of(name: str, args: GRPOConfig, *, mid_batch: bool) -> Rule:
    """The rule of an option. `mid_batch`: the checkpoint has rollouts in progress."""
    if name in MISSING:
        return Rule("none", MISSING[name].why)
    if name == "temperature" and mid_batch:
        return Rule("refused", "the checkpoint has rollouts in progress, with log-probs at that temperature")
    if name == "entropy_coef" and args.use_adaptive_entropy:
        return Rule("checkpoint", "use_adaptive_entropy has moved it since")
    return RULES.get(name, Rule("new", "from the next step on"))


def saved_options(args: GRPOConfig) -> dict[str, Any]:
    """The options that are compared, as JSON and without secrets."""
    names = (entry.name for entry in dataclasses.fields(args))
    compared = (name for name in names if rule_of(name, args, mid_batch=False).wins != "none")
    return {name: redacted(getattr(args, name), name) for name in compared}


def identity(learner: Any) -> dict[str, Any]:
    """What has to be as it was: options, processes, the classes of optimizer and schedule, adapter and teacher."""
    args, processes = learner.args, learner.accelerator.num_processes
    return {
        **{name: getattr(args, name) for name, rule in RULES.items() if rule.wins == "refused"},
        "steps_per_generation": args.micro_batches_per_generation(processes),
        "num_processes": processes,
        "optimizer": type(learner.optimizer.optimizer).__name__,
        "schedule": type(learner.scheduler).__name__,
        "adapter": adapter_identity(learner.accelerator.unwrap_model(learner.policy).model),
        "teacher": None if learner.teacher is None else learner.teacher.identity,
    }


def differences(learner: Any, saved: dict[str, Any], checkpoint: Path, *, mid_batch: bool) -> list[str]:
    """A line for each option that differs from the checkpoint's: both values, which one counts, and why.

    Args:
        saved: the content of training.json; older checkpoints have no "options".

    Raises:
        CheckpointError: one of them has to be as it was.
    """
    here, there = identity(learner), saved["run"]
    refused = [(name, there.get(name), here[name]) for name in here if there.get(name) != here[name]]
    options, before, lines = saved_options(learner.args), saved.get("options", {}), list[str]()
    for name in sorted(name for name in options.keys() & before.keys() if options[name] != before[name]):
        wins, why = rule_of(name, learner.args, mid_batch=mid_batch)
        if wins == "refused":
            refused += [] if name in here else [(name, before[name], options[name])]
        else:
            which = "the checkpoint's" if wins == "checkpoint" else "the new one"
            values = f"{_shortened(before[name])} in the checkpoint, {_shortened(options[name])} now"
            lines.append(f"{name}: {values}; {which} counts: {why}")
    if refused:
        got, want = (", ".join(f"{entry[0]}={_shortened(entry[place])}" for entry in refused) for place in (2, 1))
        raise CheckpointError(
            f"got {got} to resume from {checkpoint}, want {want} as it was saved with; fix: resume with those options, "
            "or start a new run with the checkpoint as its model"
        )
    earlier = "it is of an earlier version, which did not save its options: all but the optimizer's are the new ones"
    return lines if before else [earlier]


def _shortened(value: Any) -> str:
    shortened = reprlib.Repr()
    shortened.maxdict = shortened.maxstring = shortened.maxother = 100  # an adapter's options, and not a file of them
    return shortened.repr(value)
