"""What a run needs to resume, beside the weights in a checkpoint:

    optimizer.safetensors      the optimizer's tensors by parameter name, which any sharding can read
    reference.safetensors      the reference model, where it follows the policy
    process-<rank>.safetensors random generators and the rollouts in progress of one rank
    training.json              everything else, of all ranks

Tensors, numbers and strings: nothing is pickled. The weights are read here too, as the model of this run takes them:
each in its own dtype, bit for bit. No configuration is read from the checkpoint: that of the model of this run counts.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import random
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from transformers import TrainerState
from transformers.core_model_loading import revert_weight_conversion

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer.checkpoint.checkpoint import STATE_FILE
from fused_grpo.trainer.checkpoint.manifest import open_regular, read_json, read_manifest, refuse_unusable
from fused_grpo.trainer.checkpoint.state_checks import OF, check_alike, form
from fused_grpo.trainer.models.adapters import ADAPTER_FILE, adapter_path, adapter_weights, is_adapted

_log = logging.getLogger(__name__)

OPTIMIZER_FILE = "optimizer.safetensors"
REFERENCE_FILE = "reference.safetensors"
TRAINING_FILE = "training.json"

_OPTIONS = StateDictOptions(full_state_dict=True, cpu_offload=True)


def process_file(rank: int) -> str:
    """The name of the file of one rank's tensors."""
    return f"process-{rank}.safetensors"


@dataclass(frozen=True)
class TrainingFiles:
    """A training state to be saved: the content of training.json, and tensors by file name."""

    numbers: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]]

    @property
    def nbytes(self) -> int:
        """About how many bytes are written."""
        return sum(tensor.nbytes for named in self.tensors.values() for tensor in named.values())

    def __call__(self, directory: Path) -> None:
        """Write them into `directory`, except for files that would hold no tensors."""
        for name, named in self.tensors.items():
            if named:
                save_file({key: value.detach().contiguous().clone() for key, value in named.items()}, directory / name)
        names = {name: sorted(named) for name, named in self.tensors.items()}
        text = json.dumps({**self.numbers, "tensors": names}, indent=2)
        (directory / TRAINING_FILE).write_text(text + "\n", encoding="utf-8")


def read_numbers(directory: Path) -> dict[str, Any]:
    """The content of training.json, which `check_numbers` compares with the run; CheckpointError without one."""
    path = directory / TRAINING_FILE
    if not path.exists():
        raise CheckpointError(
            f"got {directory}, a checkpoint of a model alone; want one with its training state; "
            "fix: resume from another, save without save_only_model, or pass it as the model of a new run"
        )
    with refuse_unusable(directory, TRAINING_FILE):
        numbers: dict[str, Any] = read_json(path)
        check_alike({"run": {}, "buffers": {}, "tensors": {}, "options": {}}, numbers, "content")
    return numbers


def read_tensors(directory: Path, name: str, names: dict[str, list[str]] | None = None) -> dict[str, Tensor]:
    """The tensors of one file of a checkpoint; none where there is no such file, which may be where there are none.

    Raises:
        CheckpointError: the file cannot be read, or does not have the tensors that it had when it was saved: `names`.
    """
    with refuse_unusable(directory, name):
        tensors = dict[str, Tensor]()
        if (directory / name).exists():
            open_regular(directory / name).close()
            tensors = load_file(directory / name)
        for other in tensors.keys() ^ (tensors if names is None else names.get(name, [])):
            raise ValueError(f"{other!r} is {'unknown' if other in tensors else 'missing'}")
        return tensors


def read_weights(model: Any, checkpoint: Path) -> dict[str, Any]:
    """The full weights, under the policy's names, or the adapter; CheckpointError where they do not fit the model."""
    if is_adapted(model):
        return read_adapter(model, checkpoint)
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
        best = {"best_metric": 0.0, "best_global_step": 0, "best_model_checkpoint": ""}
        known = {name: value for name, value in best.items() if saved.get(name) is not None}
        check_alike(known, saved, "content", signed=True)
        if saved["global_step"] != step or not all(isinstance(entry, dict) for entry in saved["log_history"]):
            raise ValueError(f"global_step is {saved['global_step']}, want {step}, and log_history a list of entries")
        state = TrainerState(**{name: saved[name] for name in fresh.keys() & saved.keys()})
    if state.best_model_checkpoint is not None and not Path(str(state.best_model_checkpoint)).is_dir():
        _log.warning("the best checkpoint, %s, does not exist any more", state.best_model_checkpoint)
        state.best_model_checkpoint = None
    return state


def read_adapter(model: Any, checkpoint: Path) -> dict[str, Tensor]:
    """The adapter of a checkpoint, for `load_adapter`; CheckpointError where there is none, or of another form."""
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


def model_state(model: nn.Module, *, full: bool = True) -> dict[str, Tensor]:
    """The full state dict of a model. A collective; only rank 0 gets it. Without `full`, as in `optimizer_state`."""
    state: dict[str, Any] = get_model_state_dict(model, options=_OPTIONS if full else StateDictOptions())
    return state


def optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, full: bool = True
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of an optimizer by parameter name: (tensors, all else). A collective; only rank 0 gets it.

    Without `full`, every rank gets its own tensors, as they are: shards know the whole shape.
    """
    options = _OPTIONS if full else StateDictOptions()
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=options)
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {"param_groups": state.get("param_groups"), "state": {}}
    for parameter, values in state.get("state", {}).items():
        for name, value in values.items():
            by_name = tensors if isinstance(value, Tensor) else numbers["state"]
            by_name[f"{name}{OF}{parameter}"] = value
    return tensors, numbers


def load_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], numbers: dict[str, Any]
) -> None:
    """The inverse of `optimizer_state`, of what `check_optimizer` accepts."""
    state: dict[str, Any] = {}
    for key, value in {**numbers["state"], **tensors}.items():
        name, _, parameter = key.partition(OF)
        state.setdefault(parameter, {})[name] = value
    groups = [
        # JSON has no tuples: AdamW's betas.
        {name: tuple(value) if name == "betas" else value for name, value in group.items()}
        for group in numbers["param_groups"]
    ]
    full: dict[str, Any] = {"state": state, "param_groups": groups}
    # PyTorch finds the device of a full state by its tensors, which SGD has not.
    set_optimizer_state_dict(model, optimizer, full, options=_OPTIONS if tensors else StateDictOptions())


def random_state() -> dict[str, Tensor]:
    """The generators of Python, NumPy and torch (CPU, and this process' GPU), as tensors."""
    version, python, gauss = random.getstate()
    numpy: Any = np.random.get_state(legacy=False)
    state = {
        "python": torch.tensor([version, *python], dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy_key": torch.from_numpy(numpy["state"]["key"].astype(np.int64)),
        "numpy_rest": torch.tensor([numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"]], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Tensor]) -> None:
    """The inverse of `random_state`; an error of any kind where it is no state of these generators."""
    if other := {name for name in state.keys() ^ random_state().keys() if name != "cuda"}:
        raise ValueError(f"{min(other)} is missing or unknown")
    if not all(tensor.isfinite().all() for tensor in state.values()):
        raise ValueError("a value that is not finite")
    version, *python = state["python"].tolist()
    gauss = state["python_gauss"].tolist()
    random.setstate((version, tuple(python), gauss[0] if gauss else None))
    position, has_gauss, cached = state["numpy_rest"].tolist()
    if not 0 <= position <= 624:  # NumPy reads its key there without a check
        raise ValueError(f"position {position} of NumPy's generator")
    key = state["numpy_key"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, int(position), int(has_gauss), cached))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    for name, value in random_state().items():
        if name in state and (value.dtype != state[name].dtype or not torch.equal(value, state[name])):
            raise ValueError(f"{name} is no state of that generator")
