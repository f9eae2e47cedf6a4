"""What a run needs besides its weights to go on as if nothing had happened, as safetensors and JSON.

    optimizer.safetensors      the optimizer's tensors, by parameter name, so that any sharding can read them
    reference.safetensors      the reference model, where it has followed the policy
    process-<rank>.safetensors random generators and the rollouts in progress of one process
    training.json              everything else, of all processes

Nothing is pickled: what comes back is tensors, numbers and strings, whoever wrote the file. They are compared with what
this run would write itself, name by name and shape by shape, before any of it is put in.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer.checkpoint.manifest import unfit
from fused_grpo.trainer.data.stored_json import check, read_json, shape_of
from fused_grpo.trainer.models.adapters import ADAPTER_FILE, adapter_path, adapter_weights

OPTIMIZER_FILE = "optimizer.safetensors"
REFERENCE_FILE = "reference.safetensors"
TRAINING_FILE = "training.json"

_OPTIONS = StateDictOptions(full_state_dict=True, cpu_offload=True)
_OF = " of "  # "exp_avg of model.lm_head.weight"
_MERSENNE_WORDS = 624


def process_file(rank: int) -> str:
    return f"process-{rank}.safetensors"


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of an optimizer by parameter name: (tensors, all else). All processes ask, the first gets it."""
    return _by_name(get_optimizer_state_dict(model, optimizer, options=_OPTIONS))


def _by_name(state: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {"param_groups": state.get("param_groups"), "state": {}}
    for parameter, values in state.get("state", {}).items():
        for name, value in values.items():
            by_name = tensors if isinstance(value, Tensor) else numbers["state"]
            by_name[f"{name}{_OF}{parameter}"] = value
    return tensors, numbers


def load_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], numbers: dict[str, Any]
) -> None:
    """The inverse of `optimizer_state`, of a state that `check_optimizer_state` has accepted.

    Raises:
        CheckpointError: the state is that of another model or optimizer.
    """
    state: dict[str, Any] = {}
    for key, value in {**numbers["state"], **tensors}.items():
        name, _, parameter = key.partition(_OF)
        state.setdefault(parameter, {})[name] = value
    groups = [
        # JSON has no tuples: AdamW's betas.
        {name: tuple(value) if name == "betas" else value for name, value in group.items()}
        for group in numbers["param_groups"]
    ]
    try:
        whole: dict[str, Any] = {"state": state, "param_groups": groups}
        set_optimizer_state_dict(model, optimizer, whole, options=_OPTIONS)
    except (KeyError, RuntimeError, ValueError, AssertionError) as error:
        raise CheckpointError(
            f"got an optimizer state that does not fit this run ({error}); want the model and optimizer that it was "
            "saved with; fix: resume with the options of run.json"
        ) from error


def check_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, directory: Path, numbers: dict[str, Any]
) -> dict[str, Tensor]:
    """The tensors of a saved optimizer, known to be those of this one; `numbers` are what was saved with them.

    Raises:
        CheckpointError: a tensor is missing, unknown, or of another shape or dtype, or an option of another kind.
    """
    is_new = not optimizer.state
    # Without options: no process gathers anything. It makes the first state of an optimizer that has none.
    wanted, options = _by_name(get_optimizer_state_dict(model, optimizer))
    if is_new:
        optimizer.state.clear()
    try:
        check(numbers, shape_of(options), where="its optimizer")
    except ValueError as error:
        raise unfit(directory, TRAINING_FILE, f"cannot be used: {error}") from error
    return read_tensors(directory, OPTIMIZER_FILE, like=wanted)


def random_state() -> dict[str, Tensor]:
    """The generators of Python, NumPy and torch (CPU, and this process' GPU), each as a tensor."""
    version, python, gauss = random.getstate()
    numpy: Any = np.random.get_state(legacy=False)
    state = {
        "random.python": torch.tensor([version, *python], dtype=torch.int64),
        "random.python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "random.numpy_key": torch.from_numpy(numpy["state"]["key"].astype(np.int64)),
        "random.numpy_rest": torch.tensor(
            [numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"]], dtype=torch.float64
        ),
        "random.torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["random.cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Tensor]) -> None:
    """The inverse of `random_state`.

    Raises:
        CheckpointError: it is of none of these generators.
    """
    try:
        _set_random_state(state)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointError(
            f"got a state of the random generators that they do not take ({error}); fix: resume from another checkpoint"
        ) from error


def _set_random_state(state: dict[str, Tensor]) -> None:
    version, *python = state["random.python"].tolist()
    gauss = state["random.python_gauss"].tolist()
    random.setstate((version, tuple(python), gauss[0] if gauss else None))
    position, has_gauss, cached = state["random.numpy_rest"].tolist()
    if not 0 <= position <= _MERSENNE_WORDS:  # NumPy reads there, whatever is there
        raise ValueError(f"NumPy's is at word {position} of {_MERSENNE_WORDS}")
    key = state["random.numpy_key"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, int(position), int(has_gauss), cached))
    torch.set_rng_state(state["random.torch"])
    if torch.cuda.is_available() and "random.cuda" in state:
        torch.cuda.set_rng_state(state["random.cuda"])


def random_state_like(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `random_state` would be if it had been saved as `found`: with or without a cached number, and a GPU."""
    wanted = random_state()
    gauss, cuda = "random.python_gauss", "random.cuda"
    if gauss in found and found[gauss].shape in ((0,), (1,)):
        wanted[gauss] = torch.zeros(found[gauss].shape, dtype=torch.float64)
    wanted.pop(cuda, None)
    return wanted | ({cuda: found[cuda]} if cuda in found else {})


@dataclass(frozen=True)
class TrainingFiles:
    """A training state on its way to the disk: tensors by file name, and everything else."""

    numbers: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]]

    @property
    def nbytes(self) -> int:
        """About what writing them takes."""
        return sum(tensor.nbytes for named in self.tensors.values() for tensor in named.values())

    def __call__(self, directory: Path) -> None:
        """Put them into `directory`; a file that would hold no tensors is left out."""
        for name, named in self.tensors.items():
            if named:
                save_file({key: value.detach().contiguous().clone() for key, value in named.items()}, directory / name)
        (directory / TRAINING_FILE).write_text(json.dumps(self.numbers, indent=2) + "\n", encoding="utf-8")


def read_training_state(directory: Path, shape: Any) -> dict[str, Any]:
    """The numbers of a training state.

    Raises:
        CheckpointError: the checkpoint was saved without one, or it is not of this shape.
    """
    path = directory / TRAINING_FILE
    if not path.is_file():
        raise CheckpointError(
            f"got {directory}, a checkpoint of a model alone; want one with its training state; "
            "fix: resume from another, save without save_only_model, or pass it as the model of a new run"
        )
    try:
        state: dict[str, Any] = read_json(path, shape)
    except (ValueError, OSError) as error:
        raise unfit(directory, TRAINING_FILE, f"cannot be used: {error}") from error
    return state


def read_tensors(directory: Path, name: str, *, like: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The tensors of one file of a checkpoint; none where there is no such file.

    Raises:
        CheckpointError: the file cannot be read, or its names, shapes and dtypes are not those of `like`.
    """
    path = directory / name
    try:
        found = load_file(path) if path.is_file() else {}
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise unfit(directory, name, f"cannot be read ({error})") from error
    if like is not None:
        check_tensors(directory, name, found=found, like=like)
    return found


def check_tensors(directory: Path, name: str, *, found: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
    """Compare what a file holds with what it should.

    Raises:
        CheckpointError: a name is missing or unknown, or a tensor of another shape or dtype.
    """
    for tensor in sorted(found.keys() | like.keys()):
        got, want = form(found.get(tensor)), form(like.get(tensor))
        if got != want:
            raise unfit(directory, name, f"has {got} as {tensor[:200]!r}, where this run has {want}")


def form(tensor: Tensor | None) -> str:
    """Dtype and shape, as error messages have them."""
    return "nothing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def read_adapter(model: Any, directory: Path) -> dict[str, Tensor]:
    """The adapter that a checkpoint holds, for `load_adapter`.

    Raises:
        CheckpointError: it holds none, or that of another configuration or dtype.
    """
    path = adapter_path(model, directory)
    if not path.is_file():
        raise CheckpointError(
            f"got {directory}, which has no {ADAPTER_FILE}, to resume a run with an adapter; want a checkpoint of such "
            "a run; fix: resume without peft_config"
        )
    saved, here = read_tensors(path.parent, path.name), adapter_weights(model)
    strange = sorted(name for name in saved.keys() | here.keys() if form(saved.get(name)) != form(here.get(name)))
    if strange:
        raise CheckpointError(
            f"got an adapter in {directory} that does not fit ({strange[0]}: {form(saved.get(strange[0]))} there, "
            f"{form(here.get(strange[0]))} here); want the peft_config that it was saved with; fix: pass that one"
        )
    return saved
