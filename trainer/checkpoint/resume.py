"""Saving a run in the middle of it, and going on as if nothing had happened.

All of a checkpoint is read and looked at before any of it is put in: its sums say that it is what was saved, not that
this run has saved it. The order in `restore` is that of dependence: the place in the data, which can be refused; then
weights, what moves them, rollouts in progress and the logs, cut back to the checkpoint; and the random generators last,
after everything that may draw from them.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import reduce
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer.batching.rollout_buffer import RolloutBuffer
from fused_grpo.trainer.checkpoint import training_state as files
from fused_grpo.trainer.checkpoint.checkpoint import newest_checkpoint, verify_checkpoint, whole_checkpoint_in
from fused_grpo.trainer.checkpoint.manifest import manifest_sum, read_manifest, unfit
from fused_grpo.trainer.checkpoint.saved_rollouts import check_ahead, check_buffer
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.data.stored_json import AnyNumber, Maybe, check, shape_of
from fused_grpo.trainer.distributed.failures import anywhere, together
from fused_grpo.trainer.distributed.sharding import whole_state
from fused_grpo.trainer.logging.metrics import rewind_logs
from fused_grpo.trainer.models.adapters import adapter_identity, is_adapted, load_adapter

_BUFFER, _AHEAD = "buffer.", "ahead."
_BUFFER_NUMBERS = {"iterations": int, "weight_version": int, "metrics": {str: AnyNumber}, "done": int, "batches": int}
# Of training.json, as `training_state` writes it. The rest of it depends on the run, and is compared with that.
_NUMBERS = {
    "step": int,
    "run": dict,
    "optimizer": dict,
    "scheduler": dict,
    "collector": {"sampler": dict, "generate_calls": int},
    "entropy": {"coefficient": Maybe(float), "last_entropy": Maybe(float)},
    "skipped": {"in_a_row": int, "total": int},
    "eval_before": Maybe({str: AnyNumber}),
    "buffers": {str: Maybe(_BUFFER_NUMBERS)},
}


class Run(Protocol):
    """What a checkpoint knows of a trainer."""

    args: GRPOConfig
    accelerator: Accelerator
    output_dir: Path
    model: Any
    prompts_per_process: int
    learner: Any  # the policy, its reference, its optimizer and schedule
    collector: Any  # where it is in the data, and what was sampled ahead
    buffer: RolloutBuffer | None
    stop: Any  # whether to stop was asked for
    state: Any  # TrainerState
    eval_before: dict[str, float] | None

    @property
    def step(self) -> int:
        """Optimizer steps made so far."""
        ...

    def epoch(self) -> float | None:
        """How often the data was gone through."""
        ...


def find_checkpoint(output_dir: Path, resume: bool | str | Path, *, custom_code: bool = False) -> Path:
    """The checkpoint that `resume_from_checkpoint` means, every file of it compared with its manifest.

    Args:
        custom_code: whether code may lie in it, as that of a model which needs `trust_remote_code`.

    Raises:
        CheckpointError: there is none, or it is damaged; then it names the newest one that is whole.
    """
    if resume is True:
        return newest_checkpoint(output_dir, custom_code=custom_code)
    path = Path(str(resume))
    try:
        verify_checkpoint(path, custom_code=custom_code)
    except CheckpointError as error:
        other = whole_checkpoint_in(path.parent, but=path, custom_code=custom_code)
        raise CheckpointError(f"{error}; {other}") from error
    return path


def agreed_checkpoint(trainer: Run, resume: bool | str | Path) -> Path:
    """What `find_checkpoint` finds on the first process, for all of them: the others see that they have the same one.

    Raises:
        CheckpointError: there is none, or this process sees another one there.
        PeerError: so it is elsewhere.
    """
    accelerator = trainer.accelerator
    found: tuple[Path, str] | None = None
    with together(accelerator, "finding the checkpoint to resume from"):
        if accelerator.is_main_process:
            first = find_checkpoint(trainer.output_dir, resume, custom_code=trainer.args.trust_remote_code)
            found = first, manifest_sum(first)
    chosen, wanted = gather_object([found])[0]
    path = Path(chosen)
    with together(accelerator, f"looking at {path}"):
        if (got := manifest_sum(path)) != wanted:
            raise CheckpointError(
                f"got a {path} on rank {accelerator.process_index} whose manifest is another one (sha256 {got[:16]}), "
                f"want that of rank 0 ({wanted[:16]}); fix: an output_dir that all nodes share, or the same copy on all"
            )
    return path


def training_state(trainer: Run) -> files.TrainingFiles:
    """What puts the state of the run into a directory. Every process has to ask, the first one has to write."""
    learner, rank = trainer.learner, trainer.accelerator.process_index
    tensors, options = files.optimizer_state(learner.policy, learner.optimizer.optimizer)
    # Who has to stop has no time to wait for an engine.
    place, ahead = trainer.collector.state(wait=not anywhere(trainer.accelerator, trainer.stop.asked))
    mine = files.random_state() | {_AHEAD + name: value for name, value in ahead.items()}
    buffer: dict[str, Any] | None = None
    if trainer.buffer is not None and not trainer.buffer.is_exhausted:
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
        "skipped": learner.nonfinite.state(),
        "eval_before": trainer.eval_before,
        "buffers": {str(process["rank"]): process["buffer"] for process in everyone},
    }
    by_file = {files.OPTIMIZER_FILE: tensors}
    if learner.reference is not None and trainer.args.sync_ref_model:
        by_file[files.REFERENCE_FILE] = whole_state(_reference(learner))
    by_file |= {files.process_file(process["rank"]): process["tensors"] for process in everyone}
    return files.TrainingFiles(numbers, by_file)


def restore(trainer: Run, checkpoint: Path) -> None:
    """Put a run that has just been made to where `checkpoint` was saved.

    Raises:
        CheckpointError: a checkpoint without a training state, one of a run with other options, data or processes, or
            one that no run has written.
    """
    learner = trainer.learner
    with together(trainer.accelerator, f"reading {checkpoint}"):
        saved = _read(trainer, checkpoint)
        # It may still be refused, by a stream that ends too soon: before anything else moves.
        trainer.collector.load_state(saved.numbers["collector"], saved.ahead)
    if is_adapted(trainer.model):
        load_adapter(trainer.model, saved.weights)
    else:
        with torch.no_grad():
            set_model_state_dict(learner.policy, saved.weights, options=StateDictOptions(full_state_dict=True))
    numbers, optimizer = saved.numbers, learner.optimizer.optimizer
    files.load_optimizer_state(learner.policy, optimizer, saved.optimizer, numbers["optimizer"])
    learner.scheduler.load_state_dict(numbers["scheduler"])
    learner.entropy.load_state(numbers["entropy"])
    learner.nonfinite.load_state(numbers["skipped"])
    if saved.reference:
        set_model_state_dict(_reference(learner), saved.reference, options=StateDictOptions(full_state_dict=True))
    learner.step = trainer.state.global_step = numbers["step"]
    trainer.eval_before = numbers["eval_before"]
    trainer.state.epoch = trainer.epoch()
    trainer.buffer = saved.buffer
    if trainer.accelerator.is_main_process:
        rewind_logs(trainer.output_dir, numbers["step"])
    trainer.accelerator.wait_for_everyone()
    files.set_random_state(saved.random)


@dataclass(frozen=True)
class _Saved:
    """What a checkpoint holds, for this process."""

    numbers: dict[str, Any]
    weights: dict[str, Any]  # of a run with an adapter: the adapter's
    optimizer: dict[str, Tensor]
    reference: dict[str, Any]  # none of a run whose reference stays as it is
    ahead: dict[str, Tensor]
    buffer: RolloutBuffer | None
    random: dict[str, Tensor]


def _read(trainer: Run, checkpoint: Path) -> _Saved:
    """All that `restore` needs. The trainer is as it was afterwards."""
    learner, rank = trainer.learner, str(trainer.accelerator.process_index)
    numbers = files.read_training_state(checkpoint, _NUMBERS)
    read_weights = files.read_adapter if is_adapted(trainer.model) else _read_weights
    _check_same_run(trainer, numbers["run"], checkpoint)
    try:
        check(numbers["scheduler"], shape_of(learner.scheduler.state_dict()), where="its scheduler")
        if rank not in numbers["buffers"]:
            raise ValueError(f"it has no buffer of process {rank}")
    except ValueError as error:
        raise unfit(checkpoint, files.TRAINING_FILE, f"cannot be used: {error}") from error
    optimizer = files.check_optimizer_state(
        learner.policy, learner.optimizer.optimizer, directory=checkpoint, numbers=numbers["optimizer"]
    )
    reference: dict[str, Tensor] = {}
    if learner.reference is not None and trainer.args.sync_ref_model:
        reference = files.read_tensors(checkpoint, files.REFERENCE_FILE, like=_reference(learner).state_dict())
    name = files.process_file(trainer.accelerator.process_index)
    mine = files.read_tensors(checkpoint, name)
    ahead, rollouts = _take(mine, _AHEAD), _take(mine, _BUFFER)
    try:
        buffer = _read_rollouts(trainer, numbers["buffers"][rank], rollouts, ahead)
    except ValueError as error:
        raise unfit(checkpoint, name, f"cannot be used: {error}") from error
    files.check_tensors(checkpoint, name, found=mine, like=files.random_state_like(mine))
    return _Saved(
        numbers=numbers,
        weights=read_weights(trainer.model, checkpoint),
        optimizer=optimizer,
        reference=reference,
        ahead=ahead,
        buffer=buffer,
        random=mine,
    )


def _read_rollouts(
    trainer: Run, numbers: dict[str, Any] | None, tensors: dict[str, Tensor], ahead: dict[str, Tensor]
) -> RolloutBuffer | None:
    """The rollouts in progress; raises ValueError for those, or ones sampled ahead, that this run cannot have left."""
    args = trainer.args
    sizes = {"num_generations": args.num_generations, "vocab_size": trainer.collector.vocab_size}
    check_ahead(ahead, prompts=trainer.prompts_per_process, **sizes)
    if numbers is None:
        return None
    batches = args.steps_per_rollout(trainer.accelerator.num_processes)
    check_buffer(numbers, tensors, batches=batches, iterations=args.num_iterations, **sizes)
    return RolloutBuffer.from_state(numbers, tensors)


def _reference(learner: Any) -> nn.Module:
    """The reference model, of a learner that has a copy."""
    model: Any = learner.reference
    return cast(nn.Module, model.model)


def _take(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Those whose names begin like this, out of `tensors`."""
    names = [name for name in tensors if name.startswith(prefix)]
    return {name.removeprefix(prefix): tensors.pop(name) for name in names}


def _identity(trainer: Run) -> dict[str, Any]:
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


def _check_same_run(trainer: Run, saved: dict[str, Any], checkpoint: Path) -> None:
    here = _identity(trainer)
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


def _read_weights(model: Any, checkpoint: Path) -> dict[str, Any]:
    """The weights of a checkpoint, whole, under the policy's names.

    Read are the tensors that the manifest lists, and no configuration: that of the model which is here counts.
    """
    saved, here = dict[str, Tensor](), model.state_dict()
    for name in sorted(read_manifest(checkpoint)):
        if fnmatch(name, "model*.safetensors"):
            saved |= files.read_tensors(checkpoint, name)
    try:
        _check_dtypes(model, here, saved)
        # transformers knows the names that a checkpoint has for the weights of its models. It gives all of them one
        # dtype: one that holds them all exactly, so that each can have its own again.
        load: Any = type(model).from_pretrained
        dtype = reduce(torch.promote_types, (parameter.dtype for parameter in model.parameters()))
        loaded, report = load(None, config=model.config, state_dict=saved, dtype=dtype, output_loading_info=True)
        if wrong := sorted(str(name) for problem in report.values() for name in problem):
            raise ValueError(f"{wrong[0][:200]} is missing, unknown or of another shape")
    except (ValueError, RuntimeError, KeyError) as error:
        raise unfit(checkpoint, "model.safetensors", f"does not fit the model of this run ({error})") from error
    return {f"model.{name}": value.to(here[name].dtype) for name, value in loaded.state_dict().items()}


def _check_dtypes(model: Any, here: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Raise ValueError where a saved weight has another dtype than this run would save it with."""
    from transformers.core_model_loading import revert_weight_conversion

    # A checkpoint may have other names for them, and other shapes; on "meta" they take no memory.
    empty = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in here.items()}
    for name, value in revert_weight_conversion(model, empty).items():
        if name in saved and saved[name].dtype != value.dtype:
            raise ValueError(f"it has {saved[name].dtype} as {name[:200]!r}, where this run has {value.dtype}")
