"""Saving a run between two steps, and resuming it so that the next steps are those that it would have made.

`restore` first reads everything and refuses what does not fit; only then does it change the model. The random
generators come last, after everything that may draw from them.
"""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer.batching.rollout_buffer import RolloutBuffer
from fused_grpo.trainer.checkpoint import training_state as files
from fused_grpo.trainer.checkpoint.checkpoint import find_checkpoint
from fused_grpo.trainer.checkpoint.manifest import MANIFEST_FILE, refuse_unusable, sha256_of
from fused_grpo.trainer.checkpoint.read_checkpoint import read_adapter, read_weights
from fused_grpo.trainer.distributed.failures import all_ranks_succeed
from fused_grpo.trainer.models.adapters import adapter_identity, is_adapted, load_adapter

# Options that have to stay as they were for the next step to be what it would have been.
_SAME_OPTIONS = (
    "seed",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_generations",
    "num_iterations",
    "loss_type",
    "beta",
    "sync_ref_model",
    "optim",
)
_FULL = StateDictOptions(full_state_dict=True)


def agreed_checkpoint(accelerator: Accelerator, output_dir: Path, resume: bool | str | Path) -> Path:
    """What `find_checkpoint` finds on rank 0. The other ranks check that they see the same one.

    Raises:
        CheckpointError: there is none, or this rank sees another one there.
        PeerError: another rank raised one of these.
    """
    found: tuple[Path, str] | None = None
    with all_ranks_succeed(accelerator, "finding the checkpoint to resume from"):
        if accelerator.is_main_process:
            first = find_checkpoint(output_dir, resume)
            found = first, sha256_of(first / MANIFEST_FILE)
    path, wanted = gather_object([found])[0]
    with all_ranks_succeed(accelerator, f"looking at {path}"):
        if (got := sha256_of(Path(path) / MANIFEST_FILE)) != wanted:
            raise CheckpointError(
                f"got a {path} on rank {accelerator.process_index} whose manifest is another one (sha256 {got[:16]}), "
                f"want that of rank 0 ({wanted[:16]}); fix: an output_dir that all nodes share, or the same copy on all"
            )
    return Path(path)


def training_state(
    learner: Any, collector: Any, buffer: RolloutBuffer | None, *, eval_before: dict[str, float] | None, wait: bool
) -> files.TrainingFiles:
    """The state of a run, to be saved by rank 0. A collective.

    Args:
        learner: the `Learner` of the run.
        collector: its `Collector`.
        buffer: the rollouts in progress.
        eval_before: the evaluation of the model that the run started from.
        wait: whether to wait for rollouts that an engine is sampling now.
    """
    accelerator = learner.accelerator
    tensors, options = files.optimizer_state(learner.policy, learner.optimizer.optimizer)
    place, prefetched = collector.state(wait=wait)
    groups = {"random": files.random_state(), "prefetched": prefetched}
    numbers: dict[str, Any] | None = None
    if buffer is not None and not buffer.is_exhausted:
        numbers, groups["buffer"] = buffer.state()
    mine = {f"{group}.{name}": value for group, named in groups.items() for name, value in named.items()}
    ranks = gather_object([{"rank": accelerator.process_index, "tensors": mine, "buffer": numbers}])
    by_file = {files.OPTIMIZER_FILE: tensors}
    if _reference_moves(learner):
        by_file[files.REFERENCE_FILE] = files.model_state(learner.reference.model)
    by_file |= {files.process_file(rank["rank"]): rank["tensors"] for rank in ranks}
    everything_else = {
        "step": learner.step,
        "run": _identity(learner),
        "optimizer": options,
        "scheduler": learner.scheduler.state_dict(),
        "collector": place,
        "entropy": learner.entropy.state(),
        "skipped": learner.nonfinite.state(),
        "eval_before": eval_before,
        "buffers": {str(rank["rank"]): rank["buffer"] for rank in ranks},
    }
    return files.TrainingFiles(everything_else, by_file)


def restore(checkpoint: Path, learner: Any, collector: Any) -> tuple[RolloutBuffer | None, dict[str, float] | None]:
    """Put a new run into the state in which `checkpoint` was saved; returns its `buffer` and `eval_before`.

    Raises:
        CheckpointError: a checkpoint without a training state, or one of a run with other options, data or processes.
        PeerError: another rank raised it.
    """
    accelerator, model = learner.accelerator, _model(learner)
    rank = accelerator.process_index
    with all_ranks_succeed(accelerator, f"reading {checkpoint}"):
        numbers = files.read_numbers(checkpoint)
        _check_same_run(learner, numbers["run"], checkpoint)
        weights = _read_weights(model, checkpoint)
        mine = files.read_tensors(checkpoint, files.process_file(rank))
        optimizer = files.read_tensors(checkpoint, files.OPTIMIZER_FILE)
        reference: dict[str, Any] = files.read_tensors(checkpoint, files.REFERENCE_FILE)
        with refuse_unusable(checkpoint, files.TRAINING_FILE):
            saved = numbers["buffers"][str(rank)]
            buffer = None if saved is None else RolloutBuffer.from_state(saved, _group(mine, "buffer"))
            # Of a stream it may still be refused: before anything else changes.
            collector.load_state(numbers["collector"], _group(mine, "prefetched"))
            learner.scheduler.load_state_dict(numbers["scheduler"])
            learner.entropy.load_state(numbers["entropy"])
            learner.nonfinite.load_state(numbers["skipped"])
    _set_weights(learner, weights)
    with refuse_unusable(checkpoint, files.OPTIMIZER_FILE):
        files.load_optimizer_state(learner.policy, learner.optimizer.optimizer, optimizer, numbers["optimizer"])
    if _reference_moves(learner):
        with refuse_unusable(checkpoint, files.REFERENCE_FILE):
            set_model_state_dict(learner.reference.model, reference, options=_FULL)
    learner.step = numbers["step"]
    accelerator.wait_for_everyone()
    with refuse_unusable(checkpoint, files.process_file(rank)):
        files.set_random_state(_group(mine, "random"))
    return buffer, numbers["eval_before"]


def load_model_of(checkpoint: Path, learner: Any) -> None:
    """Put the weights of a checkpoint into the policy, and nothing else of it.

    Raises:
        CheckpointError: they do not fit.
        PeerError: another rank raised it.
    """
    with all_ranks_succeed(learner.accelerator, f"reading {checkpoint}"):
        weights = _read_weights(_model(learner), checkpoint)
    _set_weights(learner, weights)


def _read_weights(model: Any, checkpoint: Path) -> dict[str, Any]:
    return read_adapter(model, checkpoint) if is_adapted(model) else read_weights(model, checkpoint)


def _set_weights(learner: Any, weights: dict[str, Any]) -> None:
    if is_adapted(_model(learner)):
        load_adapter(_model(learner), weights)
        return
    with torch.no_grad():
        set_model_state_dict(learner.policy, weights, options=_FULL)


def _model(learner: Any) -> Any:
    return learner.accelerator.unwrap_model(learner.policy).model


def _reference_moves(learner: Any) -> bool:
    return learner.reference is not None and bool(learner.args.sync_ref_model)


def _group(tensors: dict[str, Tensor], group: str) -> dict[str, Tensor]:
    prefix = f"{group}."
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _identity(learner: Any) -> dict[str, Any]:
    """What has to be as it was: options, processes, the classes of optimizer and schedule, adapter and teacher."""
    processes = learner.accelerator.num_processes
    return {
        **{name: getattr(learner.args, name) for name in _SAME_OPTIONS},
        "steps_per_generation": learner.args.micro_batches_per_generation(processes),
        "num_processes": processes,
        "optimizer": type(learner.optimizer.optimizer).__name__,
        "schedule": type(learner.scheduler).__name__,
        "adapter": adapter_identity(_model(learner)),
        "teacher": None if learner.teacher is None else learner.teacher.identity,
    }


def _check_same_run(learner: Any, saved: dict[str, Any], checkpoint: Path) -> None:
    here = _identity(learner)
    changed = [name for name in here if saved.get(name) != here[name]]
    if changed:
        raise CheckpointError(
            f"got {_values(here, changed)} to resume from {checkpoint}, want {_values(saved, changed)} as it was saved "
            "with; fix: resume with those options, or start a new run with the checkpoint as its model"
        )


def _values(options: dict[str, Any], names: list[str]) -> str:
    shortened = reprlib.Repr()
    shortened.maxdict = shortened.maxstring = shortened.maxother = 100  # an adapter's options, and not a file of them
    return ", ".join(f"{name}={shortened.repr(options.get(name))}" for name in names)
