"""The weights of a checkpoint, as the model of this run takes them: each in its own dtype, bit for bit. And its state.

No configuration is read from the checkpoint: that of the model of this run counts.
"""

from __future__ import annotations

import dataclasses
import logging
from fnmatch import fnmatch
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerState

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer.checkpoint.checkpoint import STATE_FILE
from fused_grpo.trainer.checkpoint.manifest import read_json, read_manifest, refuse_unusable
from fused_grpo.trainer.checkpoint.state_checks import check_alike, form
from fused_grpo.trainer.checkpoint.training_state import read_tensors
from fused_grpo.trainer.models.adapters import ADAPTER_FILE, adapter_path, adapter_weights

_log = logging.getLogger(__name__)


def read_weights(model: Any, checkpoint: Path) -> dict[str, Any]:
    """The full weights, under the policy's names.

    Raises:
        CheckpointError: a weight is missing, unknown, or of another shape or dtype.
    """
    saved, here = dict[str, Tensor](), model.state_dict()
    for name in sorted(read_manifest(checkpoint)):
        if fnmatch(name, "model*.safetensors"):
            saved |= read_tensors(checkpoint, name)
    with refuse_unusable(checkpoint, "model.safetensors"):
        _check_dtypes(model, here, saved)
        # transformers maps the names of a checkpoint to those of its models. It gives all weights one dtype: here one
        # that holds them all exactly, so that each can have its own again.
        load: Any = type(model).from_pretrained
        dtype = reduce(torch.promote_types, (parameter.dtype for parameter in model.parameters()))
        loaded, report = load(None, config=model.config, state_dict=saved, dtype=dtype, output_loading_info=True)
        if wrong := sorted(str(name) for problem in report.values() for name in problem):
            raise ValueError(f"{wrong[0]} is missing, unknown or of another shape")
        _refuse_infinite(dict(loaded.named_parameters()))
        return {f"model.{name}": value.to(here[name].dtype) for name, value in loaded.state_dict().items()}


def _check_dtypes(model: Any, here: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Raise ValueError where a saved weight has another dtype than this run would save it with."""
    from transformers.core_model_loading import revert_weight_conversion

    # A checkpoint may have other names for them, and other shapes; on "meta" they take no memory.
    empty = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in here.items()}
    for name, value in revert_weight_conversion(model, empty).items():
        if name in saved and saved[name].dtype != value.dtype:
            raise ValueError(f"it has {saved[name].dtype} as {name!r}, where this run has {value.dtype}")


def read_trainer_state(checkpoint: Path, step: int, *, is_old: bool) -> TrainerState:
    """transformers' state of the run at `step`: its log and its best metric.

    Fields that this version of transformers does not have are left out. Early versions of this package saved none
    (`is_old`): then its epoch is -1.

    Raises:
        CheckpointError: the file cannot be read, or is not of that step.
    """
    fresh = dataclasses.asdict(TrainerState())
    with refuse_unusable(checkpoint, STATE_FILE):
        saved = read_json(checkpoint / STATE_FILE)
        if is_old and "global_step" not in saved:
            return TrainerState(global_step=step, epoch=-1.0)
        check_alike({name: fresh[name] for name in fresh.keys() & {*saved, "global_step", "epoch"}}, saved, "content")
        best = {name: saved.get(name) for name in ("best_metric", "best_global_step", "best_model_checkpoint")}
        kinds = {"best_metric": 0.0, "best_global_step": 0, "best_model_checkpoint": ""}
        check_alike({name: kinds[name] for name in kinds if best[name] is not None}, best, "content", signed=True)
        if saved["global_step"] != step or not all(isinstance(entry, dict) for entry in saved["log_history"]):
            raise ValueError(f"global_step is {saved['global_step']}, want {step}, and log_history a list of entries")
        state = TrainerState(**{name: saved[name] for name in fresh.keys() & saved.keys()})
    if state.best_model_checkpoint is not None and not Path(str(state.best_model_checkpoint)).is_dir():
        _log.warning("the best checkpoint, %s, does not exist any more", state.best_model_checkpoint)
        state.best_model_checkpoint = None
    return state


def read_adapter(model: Any, checkpoint: Path) -> dict[str, Tensor]:
    """The adapter of a checkpoint, for `load_adapter`.

    Raises:
        CheckpointError: there is none, or it is of another configuration or dtype.
    """
    path = adapter_path(model, checkpoint)
    if not path.is_file():
        raise CheckpointError(
            f"got {checkpoint}, which has no {ADAPTER_FILE}, to resume a run with an adapter; want a checkpoint of "
            "such a run; fix: resume without peft_config"
        )
    saved, here = read_tensors(path.parent, path.name), adapter_weights(model)
    with refuse_unusable(checkpoint, path.name):
        _refuse_infinite(saved)
    wrong = sorted(name for name in saved.keys() | here.keys() if form(saved.get(name)) != form(here.get(name)))
    if wrong:
        raise CheckpointError(
            f"got an adapter in {checkpoint} that does not fit ({wrong[0]}: {form(saved.get(wrong[0]))} there, "
            f"{form(here.get(wrong[0]))} here); want the peft_config that it was saved with; fix: pass that one"
        )
    return saved


def _refuse_infinite(weights: dict[str, Tensor]) -> None:
    for name, weight in weights.items():
        if not weight.isfinite().all():
            raise ValueError(f"{name} is not finite")
