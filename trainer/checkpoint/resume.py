"""Saving a run between two steps, and resuming it so that the next steps are those that it would have made.

`restore` first reads everything and compares it with the state that this run has in its place. Only then does it change
the model. The random generators come last, after everything that may draw from them. Every option of `GRPOConfig` has a
rule that says whose value counts, and every difference is said (docs/checkpoints.md).
"""

from __future__ import annotations

import logging
import reprlib
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from accelerate import Accelerator
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerState

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer.batching.rollout_buffer import RolloutBuffer
from fused_grpo.trainer.checkpoint import training_state as files
from fused_grpo.trainer.checkpoint.checkpoint import MANIFEST_FILE, find_checkpoint, refuse_unusable, sha256_of
from fused_grpo.trainer.checkpoint.optimizer_states import (
    check_optimizer_state,
    load_optimizer_state,
    optimizer_state,
    pack,
    unpack,
)
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.config.trl_fields import MISSING
from fused_grpo.trainer.distributed.failures import all_ranks_succeed, compare_ranks, gather_objects
from fused_grpo.trainer.models.adapters import adapter_identity, base_model, is_adapted, load_adapter
from fused_grpo.trainer.models.quantized import codes_identity

_log = logging.getLogger(__name__)
_FULL = StateDictOptions(full_state_dict=True)
_SHORT = reprlib.Repr()
_SHORT.maxdict = _SHORT.maxstring = _SHORT.maxother = 100  # an adapter's options, and not a file of them


class Rule(NamedTuple):
    """Whose value counts, and why."""

    wins: Literal["checkpoint", "new", "refused", "none"]
    why: str


_IN_STATE = "it is in the state of the optimizer, which is loaded; for another one, start a new run from this model"
_BATCHES = "the position in the data and the rollouts in progress are counted in such batches"
_SCHEDULE = "the schedule goes on from this step as if it had been so from the first"
_SCHEDULED = ("max_steps", "num_train_epochs", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")
_SAMPLED = "from the next generated batch on"
_RULES: tuple[tuple[str, Rule], ...] = (
    ("resume_from_checkpoint overwrite_output_dir output_dir", Rule("none", "it says where and how a run starts")),
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
    (" ".join(_SCHEDULED), Rule("new", _SCHEDULE)),
    ("max_completion_length top_p top_k min_p repetition_penalty generation_kwargs", Rule("new", _SAMPLED)),
    ("score_centering_topk", Rule("new", _SAMPLED)),
    ("router_replay", Rule("new", "rollouts in progress without experts are trained without them")),
    ("generate_ahead", Rule("new", "batches that are older than it allows are sampled again")),
    ("generate_ahead_max_kl", Rule("new", "from the next batch that is learned from on")),
    ("scale_rewards advantage_estimator pkpo_k reward_weights multi_objective_aggregation", Rule("new", _SAMPLED)),
)
# All other options, but those without effect (MISSING), are the new run's, from the next step on.
RULES = {name: rule for names, rule in _RULES for name in names.split()}


class Restored(NamedTuple):
    """What the loop gets back."""

    buffer: RolloutBuffer | None
    evaluations: dict[str, Any]
    windows: dict[str, Any]
    state: TrainerState


def agreed_checkpoint(accelerator: Accelerator, output_dir: Path, resume: bool | str | Path) -> Path:
    """What `find_checkpoint` finds on rank 0; CheckpointError for none, or where this rank sees another one there."""
    chosen = output_dir, ""  # on all ranks but the first
    compare_ranks("choosing a checkpoint", {"resume_from_checkpoint": str(resume)})
    with all_ranks_succeed(accelerator, "finding the checkpoint to resume from"):
        if accelerator.is_main_process:
            first = find_checkpoint(output_dir, resume)
            chosen = first, sha256_of(first / MANIFEST_FILE)
    path, wanted = gather_objects("finding a checkpoint", chosen)[0]
    with all_ranks_succeed(accelerator, f"looking at {path}"):
        if (got := sha256_of(path / MANIFEST_FILE)) != wanted:
            raise CheckpointError(
                f"got a {path} on rank {accelerator.process_index} whose manifest is another one (sha256 {got[:16]}), "
                f"want that of rank 0 ({wanted[:16]}); fix: an output_dir that all nodes share, or the same copy on all"
            )
    return path


def training_state(
    learner: Any,
    collector: Any,
    buffer: RolloutBuffer | None,
    *,
    evaluations: dict[str, Any] | None = None,
    windows: dict[str, Any] | None = None,
    wait: bool,
) -> files.TrainingFiles:
    """The state of a run, to be saved by rank 0; the `buffer` has the rollouts in progress. A collective.

    `evaluations` are those of the model that the run started from and of these weights, `windows` are the metrics since
    the last entry of the history and the last line of the console; `wait`: for rollouts that an engine is sampling now.
    """
    tensors = dict[str, torch.Tensor]()
    state = pack(optimizer_state(learner.policy, learner.optimizer.optimizer), tensors, "optimizer")
    schedule = pack(learner.scheduler.state_dict(), tensors, "scheduler")
    place, prefetched = collector.state(wait=wait)
    groups = {"random": files.random_state()}
    groups |= {files.prefetched_group(number): table for number, table in enumerate(prefetched)}
    numbers: dict[str, Any] | None = None
    if buffer is not None and not buffer.is_exhausted:
        numbers, tables = buffer.state()
        groups |= tables
    own = {f"{group}.{name}": value for group, named in groups.items() for name, value in named.items()}
    ranks = list(enumerate(gather_objects("collecting the state", (own, numbers))))
    by_file = {files.OPTIMIZER_FILE: tensors}
    if _reference_moves(learner):
        by_file[files.REFERENCE_FILE] = files.model_state(learner.reference.model)
    by_file |= {files.PROCESS_FILE.format(rank=rank): named for rank, (named, _) in ranks}
    everything_else = {
        **_numbers(learner, place, state, schedule),
        "run": identity(learner),
        "options": saved_options(learner.args) | collector.described(),
        **(evaluations or dict.fromkeys(files.EVALUATIONS)),
        **(windows or {window: {} for window in files.WINDOWS}),
        "buffers": {str(rank): numbers for rank, (_, numbers) in ranks},
    }
    return files.TrainingFiles(everything_else, by_file)


def _numbers(learner: Any, place: dict[str, Any], optimizer: Any, scheduler: Any) -> dict[str, Any]:
    return {
        "step": learner.step,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "collector": place,
        "entropy": learner.entropy.state(),
        "skipped": learner.nonfinite.state(),
    }


def restore(checkpoint: Path, learner: Any, collector: Any) -> Restored:
    """Put a new run into the state in which `checkpoint` was saved.

    CheckpointError where it has no training state, or one that this run could not have saved: of other options, data or
    processes, or with something missing, of another form or out of its range. PeerError where another rank raised it.
    """
    accelerator, optimizer = learner.accelerator, learner.optimizer.optimizer
    rank = accelerator.process_index
    process_file, is_torch_class = files.PROCESS_FILE.format(rank=rank), type(optimizer).__module__.startswith("torch.")
    # Collectives are outside of `all_ranks_succeed`.
    own_reference = files.model_state(learner.reference.model, full=False) if _reference_moves(learner) else {}
    own_optimizer, options = optimizer_state(learner.policy, optimizer, full=False), saved_options(learner.args)
    own_numbers = _numbers(learner, collector.state(wait=False)[0], {}, learner.scheduler.state_dict())
    with all_ranks_succeed(accelerator, f"reading {checkpoint}"):
        numbers = files.read_numbers(checkpoint, learner.max_steps)
        with refuse_unusable(checkpoint, files.TRAINING_FILE):
            saved, names = numbers["buffers"].get(str(rank)), numbers["tensors"]
            packed = {name: numbers[name] for name in ("optimizer", "scheduler")}
            described = collector.described()
            changed = differences(learner, numbers, checkpoint, mid_batch=saved is not None, described=described)
            kind, lambdas = "lr_scheduler_type", own_numbers["scheduler"].get("lr_lambdas")
            if numbers["options"].get(kind) != options[kind] and lambdas is not None:
                packed["scheduler"]["lr_lambdas"] = lambdas  # of another formula
        weights = files.read_weights(_model(learner), checkpoint)
        with files.tensors_of(checkpoint, files.OPTIMIZER_FILE, names) as tensors:
            unread_tensors = dict(tensors)
            numbers |= {name: unpack(value, unread_tensors) for name, value in packed.items()}
        with refuse_unusable(checkpoint, files.TRAINING_FILE):
            checked_numbers = files.check_numbers(numbers, own_numbers, collector.sampler.stream_form)
            state = files.read_trainer_state(checkpoint, numbers["step"])
            files.check_cursors(numbers, state.epoch, learner)
        with refuse_unusable(checkpoint, files.OPTIMIZER_FILE):
            files.check_tensors({}, unread_tensors)  # no other is named in training.json
            for name, scheduled in (("lr", "_last_lr"), ("initial_lr", "base_lrs")):
                rates = [group.get(name) for group in numbers["optimizer"]["param_groups"]]
                if numbers["scheduler"].get(scheduled, rates) != rates:
                    changed.append(f"{name} is {rates}, where its schedule has {numbers['scheduler'][scheduled]}")
            unlike = check_optimizer_state(own_optimizer, numbers["optimizer"], is_torch_class=is_torch_class)
        with files.tensors_of(checkpoint, files.REFERENCE_FILE, names) as reference:
            files.check_tensors(own_reference, reference)
        with files.tensors_of(checkpoint, process_file, names) as rank_tensors:
            groups = files.by_group(rank_tensors)
            prefetched = files.check_rollouts(groups, saved, learner, step=numbers["step"])
            buffer = None if saved is None else RolloutBuffer.from_state(saved, groups)
            # Of a stream it may still be refused: before anything else changes.
            unused = 0 if saved is None else saved["batches"] * saved["iterations"] - saved["done"]
            collector.load_state(numbers["collector"], prefetched, step=numbers["step"] + unused)
        with refuse_unusable(checkpoint, files.TRAINING_FILE):
            learner.load_state(**{name: checked_numbers[name] for name in ("step", "scheduler", "skipped", "entropy")})
    _set_weights(learner, weights)
    with refuse_unusable(checkpoint, files.OPTIMIZER_FILE):
        load_optimizer_state(learner.policy, optimizer, packed["optimizer"], tensors)
        if any(numbers["options"].get(name) != options[name] for name in _SCHEDULED):
            _set_rates(learner.scheduler, optimizer)
    if _reference_moves(learner):
        with refuse_unusable(checkpoint, files.REFERENCE_FILE):
            set_model_state_dict(learner.reference.model, reference, options=_FULL)
    gather_objects("restoring the state", None)
    with refuse_unusable(checkpoint, process_file):
        files.set_random_state(groups["random"])
    # An option that says it says it better.
    lines = changed if any("checkpoint's counts" in line for line in changed) else changed + unlike
    if lines and accelerator.is_main_process:
        _log.warning("resuming from %s with other options:\n  %s", checkpoint, "\n  ".join(lines))
    evaluations = {name: numbers[name] for name in files.EVALUATIONS}
    return Restored(buffer, evaluations, {name: numbers[name] for name in files.WINDOWS}, state)


def _set_rates(schedule: Any, optimizer: torch.optim.Optimizer) -> None:
    """The learning rates of this step by the schedule of this run: those of the checkpoint are by another one."""
    if isinstance(schedule, LambdaLR):  # as all that options ask for
        each = zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True)
        for group, rate, factor in each:
            group["lr"] = rate * factor(schedule.last_epoch)
        schedule._last_lr = [group["lr"] for group in optimizer.param_groups]


def load_model_of(checkpoint: Path, learner: Any) -> None:
    """Put weights of a checkpoint into the policy, and nothing else of it; CheckpointError where they do not fit."""
    with all_ranks_succeed(learner.accelerator, f"reading {checkpoint}"):
        weights = files.read_weights(_model(learner), checkpoint)
    _set_weights(learner, weights)


def _set_weights(learner: Any, weights: dict[str, Any]) -> None:
    if is_adapted(_model(learner)):
        load_adapter(_model(learner), weights)
    else:
        with torch.no_grad():
            set_model_state_dict(learner.policy, weights, options=_FULL)


def _model(learner: Any) -> Any:
    return learner.accelerator.unwrap_model(learner.policy).model


def _reference_moves(learner: Any) -> bool:
    return learner.reference is not None and bool(learner.args.sync_ref_model)


def rule_of(name: str, args: GRPOConfig, *, mid_batch: bool) -> Rule:
    """The rule of an option. `mid_batch`: the checkpoint has rollouts in progress."""
    if name in MISSING:
        return Rule("none", MISSING[name].why)
    if name == "temperature" and mid_batch:
        return Rule("refused", "the checkpoint has rollouts in progress, with log-probs at that temperature")
    if name == "score_centering" and mid_batch:
        return Rule("refused", "the checkpoint has rollouts in progress, with the log-probs that it needs")
    if name == "curriculum":
        return Rule("refused", "another order of the data is refused")
    if name == "entropy_coef" and args.use_adaptive_entropy:
        return Rule("checkpoint", "use_adaptive_entropy has moved it since")
    if name.startswith("model.config."):
        return Rule("new", "the weights are the checkpoint's, what is computed with them is not")
    return RULES.get(name, Rule("new", "from the next step on"))


def saved_options(args: GRPOConfig) -> dict[str, Any]:
    """The options that are compared, as JSON and without secrets."""
    options = args.to_dict().items()
    return {name: value for name, value in options if rule_of(name, args, mid_batch=False).wins != "none"}


def identity(learner: Any) -> dict[str, Any]:
    """What has to be as it was: options, processes, the classes of optimizer and schedule, adapter, frozen models."""
    args, processes = learner.args, learner.accelerator.num_processes
    return {
        **{name: getattr(args, name) for name, rule in RULES.items() if rule.wins == "refused"},
        "steps_per_generation": args.micro_batches_per_generation(processes),
        "num_processes": processes,
        "optimizer": type(learner.optimizer.optimizer).__name__,
        "schedule": type(learner.scheduler).__name__,
        "adapter": adapter_identity(_model(learner)),
        "frozen_weights": learner.frozen_weights,
        "quantization_config": codes_identity(base_model(_model(learner)).config),
        "teacher": None if learner.teacher is None else learner.teacher.identity,
    }


def differences(
    learner: Any, saved: dict[str, Any], checkpoint: Path, *, mid_batch: bool, described: dict[str, Any]
) -> list[str]:
    """A line for each option that differs from the checkpoint's: both values, which one counts, and why.

    CheckpointError where one of them has to be as it was. `saved` is the content of training.json, `described` are the
    model's config, tokenizer and rewards of this run.
    """
    own_run, saved_run = identity(learner), saved["run"]
    refused = [(name, saved_run.get(name), own_run[name]) for name in own_run if saved_run.get(name) != own_run[name]]
    options, saved_values, lines = saved_options(learner.args) | described, saved["options"], list[str]()
    for name in sorted(name for name in options.keys() & saved_values.keys() if options[name] != saved_values[name]):
        wins, reason = rule_of(name, learner.args, mid_batch=mid_batch)
        if wins == "refused":
            refused += [] if name in own_run else [(name, saved_values[name], options[name])]
        else:
            which = "the checkpoint's" if wins == "checkpoint" else "the new one"
            values = f"{_SHORT.repr(saved_values[name])} in the checkpoint, {_SHORT.repr(options[name])} now"
            lines.append(f"{name}: {values}; {which} counts: {reason}")
    if refused:
        got, want = (", ".join(f"{entry[0]}={_SHORT.repr(entry[place])}" for entry in refused) for place in (2, 1))
        raise CheckpointError(
            f"got {got} to resume from {checkpoint}, want {want} as it was saved with; fix: resume with those options "
            "and the model that the run began with, or start a new run with the checkpoint as its model"
        )
    return lines
