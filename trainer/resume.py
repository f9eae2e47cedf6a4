"""Saving a run in the middle of it, and going on as if nothing had happened.

The order in `restore` is that of dependence: weights, then what moves them, then data and rollouts in progress, then
the logs, cut back to the checkpoint, and the random generators last, after everything that may draw from them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer import training_state as files
from fused_grpo.trainer.adapters import adapter_identity, is_adapted, load_adapter
from fused_grpo.trainer.buffer import RolloutBuffer
from fused_grpo.trainer.checkpoint import newest_checkpoint, verify_checkpoint
from fused_grpo.trainer.metrics import rewind_logs

if TYPE_CHECKING:
    from fused_grpo.trainer.loop import GRPOTrainer

_BUFFER, _AHEAD = "buffer.", "ahead."


def find_checkpoint(output_dir: Path, resume: bool | str | Path) -> Path:
    """The checkpoint that `resume_from_checkpoint` means.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    if resume is True:
        return newest_checkpoint(output_dir)
    path = Path(str(resume))
    verify_checkpoint(path)
    return path


def training_state(trainer: GRPOTrainer) -> Callable[[Path], None]:
    """What puts the state of the run into a directory. Every process has to ask, the first one has to write."""
    learner, rank = trainer.learner, trainer.accelerator.process_index
    tensors, options = files.optimizer_state(learner.policy, learner.optimizer.optimizer)
    place, ahead = trainer.collector.state()
    mine = files.random_state() | {_AHEAD + name: value for name, value in ahead.items()}
    buffer: dict[str, Any] | None = None
    if trainer.buffer is not None and not trainer.buffer.is_used_up:
        buffer, rollouts = trainer.buffer.state()
        mine |= {_BUFFER + name: value for name, value in rollouts.items()}
    everyone = gather_object([{"rank": rank, "tensors": mine, "buffer": buffer}])
    numbers = {
        "step": trainer.step,
        "run": _identity(trainer),
        "optimizer": options,
        "scheduler": learner.scheduler.state_dict(),
        "collector": place,
        "entropy": learner.entropy.state(),
        "eval_before": trainer.eval_before,
        "buffers": {str(process["rank"]): process["buffer"] for process in everyone},
    }
    by_file = {files.OPTIMIZER_FILE: tensors}
    if learner.reference is not None and trainer.args.sync_ref_model:
        by_file[files.REFERENCE_FILE] = dict(learner.reference.model.state_dict())
    by_file |= {files.process_file(process["rank"]): process["tensors"] for process in everyone}
    return lambda directory: files.write_training_state(directory, numbers=numbers, tensors=by_file)


def restore(trainer: GRPOTrainer, checkpoint: Path) -> None:
    """Put a run that has just been made to where `checkpoint` was saved.

    Raises:
        CheckpointError: a checkpoint without a training state, or of a run with other options or processes.
    """
    numbers = files.read_training_state(checkpoint)
    _check_same_run(trainer, numbers["run"], checkpoint)
    learner = trainer.learner
    _load_weights(trainer, checkpoint)
    tensors = files.read_tensors(checkpoint, files.OPTIMIZER_FILE)
    files.load_optimizer_state(learner.policy, learner.optimizer.optimizer, tensors, numbers["optimizer"])
    learner.scheduler.load_state_dict(numbers["scheduler"])
    learner.entropy.load_state(numbers["entropy"])
    if reference := files.read_tensors(checkpoint, files.REFERENCE_FILE):
        assert learner.reference is not None
        learner.reference.model.load_state_dict(reference, strict=False)
    learner.step = trainer.state.global_step = numbers["step"]
    trainer.eval_before = numbers["eval_before"]
    mine = files.read_tensors(checkpoint, files.process_file(trainer.accelerator.process_index))
    trainer.collector.load_state(numbers["collector"], _named(mine, _AHEAD))
    trainer.state.epoch = trainer.epoch()  # type: ignore[assignment]
    buffer = numbers["buffers"][str(trainer.accelerator.process_index)]
    if buffer is not None:
        trainer.buffer = RolloutBuffer.from_state(buffer, _named(mine, _BUFFER))
    if trainer.accelerator.is_main_process:
        rewind_logs(trainer.output_dir, numbers["step"])
    trainer.accelerator.wait_for_everyone()
    files.set_random_state(mine)


def _named(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _identity(trainer: GRPOTrainer) -> dict[str, Any]:
    """What has to be as it was for the next step to be what it would have been."""
    names = (
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
    processes = trainer.accelerator.num_processes
    return {
        **{name: getattr(trainer.args, name) for name in names},
        "steps_per_generation": trainer.args.micro_batches_per_generation(processes),
        "num_processes": processes,
        "adapter": adapter_identity(trainer.model),
    }


def _check_same_run(trainer: GRPOTrainer, saved: dict[str, Any], checkpoint: Path) -> None:
    here = _identity(trainer)
    changed = [name for name in here if saved.get(name) != here[name]]
    if changed:
        raise CheckpointError(
            f"got {', '.join(f'{name}={here[name]!r}' for name in changed)} to resume from {checkpoint}, want "
            f"{', '.join(f'{name}={saved.get(name)!r}' for name in changed)} as it was saved with; fix: resume with "
            "those options, or start a new run with the checkpoint as its model"
        )


def _load_weights(trainer: GRPOTrainer, checkpoint: Path) -> None:
    """The weights of a checkpoint into the policy, however it is wrapped or sharded."""
    if is_adapted(trainer.model):
        load_adapter(trainer.model, checkpoint)
        return
    dtype = next(trainer.model.parameters()).dtype
    loaded = type(trainer.model).from_pretrained(checkpoint, dtype=dtype)
    weights: dict[str, Any] = {f"model.{name}": value for name, value in loaded.state_dict().items()}
    with torch.no_grad():
        set_model_state_dict(trainer.learner.policy, weights, options=StateDictOptions(full_state_dict=True))
