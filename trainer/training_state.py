"""What a run needs besides its weights to go on as if nothing had happened, as safetensors and JSON.

    optimizer.safetensors      the optimizer's tensors, by parameter name, so that any sharding can read them
    reference.safetensors      the reference model, where it has followed the policy
    process-<rank>.safetensors random generators and the rollouts in progress of one process
    training.json              everything else, of all processes

Nothing is pickled: what comes back is tensors, numbers and strings, whoever wrote the file.
"""

from __future__ import annotations

import json
import random
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

OPTIMIZER_FILE = "optimizer.safetensors"
REFERENCE_FILE = "reference.safetensors"
TRAINING_FILE = "training.json"

_OPTIONS = StateDictOptions(full_state_dict=True, cpu_offload=True)
_OF = " of "  # "exp_avg of model.lm_head.weight"


def process_file(rank: int) -> str:
    return f"process-{rank}.safetensors"


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of an optimizer by parameter name: (tensors, all else). All processes ask, the first gets it."""
    state: Any = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
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
    """The inverse of `optimizer_state`.

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
    """The inverse of `random_state`."""
    version, *python = state["random.python"].tolist()
    gauss = state["random.python_gauss"].tolist()
    random.setstate((version, tuple(python), gauss[0] if gauss else None))
    position, has_gauss, cached = state["random.numpy_rest"].tolist()
    key = state["random.numpy_key"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, int(position), int(has_gauss), cached))
    torch.set_rng_state(state["random.torch"])
    if torch.cuda.is_available() and "random.cuda" in state:
        torch.cuda.set_rng_state(state["random.cuda"])


def write_training_state(directory: Path, *, numbers: dict[str, Any], tensors: dict[str, dict[str, Tensor]]) -> None:
    """Put the files of a training state into `directory`; `tensors` by file name, those without any left out."""
    for name, named in tensors.items():
        if named:
            save_file({key: value.detach().contiguous().clone() for key, value in named.items()}, directory / name)
    (directory / TRAINING_FILE).write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")


def read_training_state(directory: Path) -> dict[str, Any]:
    """The numbers of a training state.

    Raises:
        CheckpointError: the checkpoint was saved without one.
    """
    path = directory / TRAINING_FILE
    if not path.is_file():
        raise CheckpointError(
            f"got {directory}, a checkpoint of a model alone; want one with its training state; "
            "fix: resume from another, save without save_only_model, or pass it as the model of a new run"
        )
    state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return state


def read_tensors(directory: Path, name: str) -> dict[str, Tensor]:
    """The tensors of one file of a training state; none where there is no such file.

    Raises:
        CheckpointError: the file cannot be read.
    """
    path = directory / name
    if not path.is_file():
        return {}
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"got {path}, which cannot be read: {error}; fix: resume from another checkpoint"
        ) from error
