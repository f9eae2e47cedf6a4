"""The states of an optimizer and its schedule as tensors and JSON, and whether a run can use them at all.

A state may be any tree of mappings, lists, tuples, tensors and plain values. Nothing is known here of what is in one.
"""

from __future__ import annotations

import inspect
import json
import math
import reprlib
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from fused_grpo.errors import UnsupportedError
from fused_grpo.trainer.checkpoint.training_state import FULL, check_alike, random_state, set_random_state
from fused_grpo.trainer.distributed.sharding import as_shards

_TENSOR, _TUPLE, _DICT = "$tensor", "$tuple", "$dict"


def pack(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """A tree as JSON; its tensors get into `tensors`, by their paths. TypeError for what is neither."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Tensor):
        while path in tensors:  # of other keys
            path += "'"
        tensors[path] = value
        return {_TENSOR: path}
    if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
        packed = {key: pack(one, tensors, f"{path}/{key}") for key, one in value.items()}
        is_plain = all(isinstance(key, str) and key[:1] != "$" for key in packed)
        return packed if is_plain else {_DICT: list(packed.items())}
    if isinstance(value, list | tuple):
        entries = [pack(one, tensors, f"{path}/{index}") for index, one in enumerate(value)]
        return {_TUPLE: entries} if isinstance(value, tuple) else entries
    raise TypeError(f"{path} is a {type(value).__name__}: {reprlib.repr(value)}")


def unpack(packed: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of `pack`: takes each tensor out of `tensors`."""
    if isinstance(packed, list):
        return [unpack(one, tensors) for one in packed]
    match packed:
        case {"$tensor": path}:
            return tensors.pop(path)
        case {"$tuple": entries}:
            return tuple(unpack(entries, tensors))
        case {"$dict": pairs}:
            return {key: unpack(one, tensors) for key, one in pairs}
        case dict():
            return {key: unpack(one, tensors) for key, one in packed.items()}
    return packed


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, *, full: bool = True) -> dict[str, Any]:
    """The state of an optimizer, by parameter name. A collective; only rank 0 gets all of it.

    Without `full`, every rank gets its own tensors, as they are: shards know the whole shape.
    """
    return {**optimizer.state_dict(), **get_optimizer_state_dict(model, optimizer, options=FULL if full else None)}


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Any, tensors: Any) -> None:
    """The inverse of `optimizer_state` and `pack`, of what `check_optimizer_state` accepts. A collective."""
    own, shards = optimizer_state(model, optimizer, full=False), dict[str, Tensor]()
    pack(own, shards, "optimizer")
    parameters = dict[str, Tensor]()
    for group, own_group in zip(optimizer.param_groups, own["param_groups"], strict=True):
        parameters |= zip(own_group["params"], group["params"], strict=True)
    # In the same order on all ranks.
    placed = {
        path: as_shards(tensors[path], shards.get(path, parameters.get(path.split("/")[2]))) for path in sorted(tensors)
    }
    state = unpack(saved, placed)
    optimizer.load_state_dict(state)
    # What most classes inherit casts tensors to the dtype of their parameter, and takes text apart.
    if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
        optimizer.state.update({parameters[name]: values for name, values in state["state"].items()})


def check_optimizer_state(own: dict[str, Any], saved: Any, *, is_torch_class: bool = False) -> list[str]:
    """Compare the state of an optimizer with this run's (`own`). Returns its hyperparameters that differ.

    Parameters may have no state at all, as those that never had a gradient. Without `is_torch_class`,
    those of an optimizer may have names that it did not have at the start. TypeError or ValueError for another form, or
    a number that no step leaves.
    """
    names, differ = {name for group in own["param_groups"] for name in group["params"]}, list[str]()
    unknown = saved["state"].keys() - names | saved.keys() - own.keys()
    for own_entries, saved_entries in (
        (own["state"].values(), saved["state"].values()),
        (own["param_groups"], saved["param_groups"]),
    ):
        unknown |= {name for entry in saved_entries for name in entry if is_torch_class}.difference(*own_entries)
    if unknown:
        raise ValueError(f"{min(unknown, key=str)!r} is nothing of this run's")
    expected = {name: value for name, value in own.items() if name != "param_groups"}
    expected["state"] = {name: values for name, values in own["state"].items() if name in saved["state"]}
    check_alike(expected, saved, "optimizer", counts=True)
    for place, (group, saved_group) in enumerate(zip(own["param_groups"], saved["param_groups"], strict=True)):
        for name, value in group.items():
            # It may have begun with nothing.
            counts = isinstance(value, list) or (isinstance(value, float) and value in (0.0, math.inf, -math.inf))
            check_alike(value, saved_group.get(name), f"optimizer.param_groups[{place}].{name}", counts=counts)
        if group["params"] != saved_group["params"] or not all(0 <= beta < 1 for beta in saved_group.get("betas", ())):
            raise ValueError(f"a group of parameters has others, or betas={saved_group.get('betas')}")
        for name in sorted(group.keys() & saved_group.keys() - {"lr", "params"}):
            if _written(group[name]) != _written(saved_group[name]):
                values = f"{reprlib.repr(saved_group[name])} in the checkpoint, {reprlib.repr(group[name])} now"
                differ.append(f"{name} of the optimizer: {values}; the checkpoint's counts: it is loaded")
    return differ


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, *, is_saved: bool) -> None:
    """Raise UnsupportedError for what could not be used: in the first step, the first save, or a resumed run.

    It is tried out: two more of the optimizer's class, over a parameter like the smallest of each group, make a step
    and save and load the state, in shards under FSDP2. One whose constructor wants other arguments is not tried.
    """
    generators, part, stage = random_state(), schedule, "step() or state"
    trained = {id(parameter): parameter.requires_grad for parameter in model.parameters()}
    try:
        inspect.signature(type(schedule).step).bind(schedule)
        if is_saved:
            _written(schedule.state_dict())
        part, stage = optimizer, "parameters or step()"
        own = [trained.get(id(parameter)) for group in optimizer.param_groups for parameter in group["params"]]
        if None in own or not any(own):
            numbers = f"of {len(own)}, {own.count(None)} are not the model's and {own.count(True)} are trained"
            raise ValueError(f"{numbers} (a peft_config freezes a model: pass a PeftModel and the optimizer of that)")
        inspect.signature(type(optimizer).step).bind(optimizer)
        if pair := _trial_optimizers(optimizer):
            pair[0][1].step()
            stage = "saved state"
        if pair and is_saved:
            if named := [key for key in pair[0][1].state if not isinstance(key, Tensor)]:  # as PEFT's LoRA-FA
                raise TypeError(f"a part of it is that of {named[0]!r}, want parts of parameters alone")
            first, second = (optimizer_state(*one, full=False) for one in pair)
            written, tensors = _written(first), dict[str, Tensor]()
            pack(first, tensors, "optimizer")
            check_optimizer_state(second, first)
            load_optimizer_state(*pair[1], json.loads(written[0]), tensors)
            if _written(optimizer_state(*pair[1], full=False)) != written:
                raise ValueError("another one comes back")
    except Exception as error:
        raise UnsupportedError(
            f"got {type(part).__name__} in optimizers, whose {stage} gives {type(error).__name__}: {error}; want steps "
            "without arguments, on dense gradients of the model's parameters (of shards, under FSDP2), and states of "
            "tensors, numbers, text, None, and lists, tuples and mappings of these; fix: another one; where it is its "
            "state alone, save_only_model=True"
        ) from error
    finally:
        set_random_state(generators)


def _trial_optimizers(optimizer: torch.optim.Optimizer) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    """Two with the same options, over a parameter like the smallest one of each group, and their models; or none."""
    trials, kind = list[tuple[nn.Module, torch.optim.Optimizer]](), type(optimizer)
    for _ in range(2):
        groups, model = list[dict[str, Any]](), nn.ParameterList()
        for group in optimizer.param_groups:
            groups.append(deepcopy({**group, "params": []}))
            for like in sorted(group["params"], key=Tensor.numel)[:1]:  # PEFT's LoRA+ has groups without any
                model.append(nn.Parameter(torch.zeros_like(like)))  # in shards where that is
                model[-1].grad = torch.ones_like(model[-1])
                groups[-1]["params"].append(model[-1])
        defaults = {
            name: optimizer.defaults[name] for name in inspect.signature(kind).parameters if name in optimizer.defaults
        }
        with suppress(Exception):
            trials.append((model, kind(groups, **deepcopy(defaults))))
    return trials


def _written(state: Any) -> tuple[str, bytes]:
    """A state as it is in files."""
    tensors = dict[str, Tensor]()
    text = json.dumps(pack(state, tensors, "optimizer"))
    own = {path: tensor.to_local() if isinstance(tensor, DTensor) else tensor for path, tensor in tensors.items()}
    return text, save({path: tensor.detach().contiguous().clone() for path, tensor in own.items()})
