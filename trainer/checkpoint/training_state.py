"""What a run needs to resume, beside the weights in a checkpoint:

    optimizer.safetensors      the optimizer's tensors by parameter name, which any sharding can read
    reference.safetensors      the reference model, where it follows the policy
    process-<rank>.safetensors random generators and the rollouts in progress of one rank
    training.json              everything else, of all ranks

Tensors, numbers and strings: nothing is pickled.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
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

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer.checkpoint.manifest import open_regular, read_json, refuse_unusable
from fused_grpo.trainer.checkpoint.state_checks import check_alike

OPTIMIZER_FILE = "optimizer.safetensors"
REFERENCE_FILE = "reference.safetensors"
TRAINING_FILE = "training.json"

_OPTIONS = StateDictOptions(full_state_dict=True, cpu_offload=True)
OF = " of "  # "exp_avg of model.lm_head.weight"


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
    """The content of training.json; `check_numbers` compares it with the run.

    Raises:
        CheckpointError: the checkpoint has none, or it cannot be read.
    """
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
    """The inverse of `random_state`.

    Raises:
        KeyError, TypeError, ValueError, RuntimeError: it is no state of these generators.
    """
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
