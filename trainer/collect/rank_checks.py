"""What ranks are given is the same on all of them: they say so at the start, by digests of a few bytes each.

A script that shuffles its rows without a seed, or an option that depends on the rank, would train on something else
than either rank was asked for, or have the ranks wait for each other for ever. Of datasets, the rows count that a
checkpoint compares; of functions, their names and their code. What these hold (variables of an outer function,
defaults, arguments of a `partial`, attributes) may be a device or a server of the rank's own: a warning names what
differs. Callbacks may differ: what one decides holds on all ranks. Weights are compared where they are copied
(`same_weights` of distributed/sharding.py).
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import nn

from fused_grpo import __version__
from fused_grpo.trainer.collect.start_checks import Start, check_start
from fused_grpo.trainer.common.formatting import digest_of_array, is_array
from fused_grpo.trainer.common.redaction import redacted
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.config.grpo_config import GRPOConfig, own_fields
from fused_grpo.trainer.data.datasets import is_stream, read_rows
from fused_grpo.trainer.data.prompt_sampler import fingerprint, spelled
from fused_grpo.trainer.distributed.failures import all_ranks_succeed, compare_ranks, gather_objects
from fused_grpo.trainer.learner import Optimizers
from fused_grpo.trainer.logging.console import progress
from fused_grpo.trainer.models.loading import SELF
from fused_grpo.trainer.models.loading import fingerprint as fingerprint_of_weights
from fused_grpo.trainer.models.optimizer import check_pair
from fused_grpo.trainer.rewards.reward_call import reward_name
from fused_grpo.trainer.rewards.reward_functions import RewardModel

# Options of what the first rank shows, logs and uploads. Scripts turn them off on the others.
_FIRST_RANK_OPTIONS = re.compile(
    "log_|logging_|report_to|run_name|project|num_completions_to_print|rollouts_kept|hub_"
    "|vllm_gpu_memory_utilization"  # of its own GPU
)
MANY = 10_000  # entries of what a function holds, of which the number counts alone
# Of configurations and arguments of `from_pretrained`.
_MACHINE_KEYS = frozenset({"_name_or_path", "base_model_name_or_path", "transformers_version", "device_map"})
# What loading and a run set in a configuration.
_RUN_KEYS = _MACHINE_KEYS | {"dtype", "architectures", "use_cache", "pad_token_id", "id2label", "label2id"}


def check_ranks(start: Start, optimizers: Optimizers) -> None:
    """`check_pair` and `check_start` on every rank; then InputError where they are not given the same."""
    assert start.accelerator is not None
    check_pair(optimizers)
    # Of millions of rows it takes minutes to encode all prompts.
    with progress(doing := "checking what the run needs"), all_ranks_succeed(start.accelerator, doing):
        check_start(start)
    if start.processes == 1:
        return
    with all_ranks_succeed(start.accelerator, "reading what this rank is given"):
        own = rank_inputs(start, optimizers)
        held = held_by_functions(start)
    compare_ranks("comparing what ranks are given", own)
    ranks = gather_objects("comparing what functions hold", held)
    if start.is_main:
        warn_of_other_values(ranks)


def rank_inputs(start: Start, optimizers: Optimizers) -> dict[str, str]:
    """Of everything that a rank is given a short text, which is the same on all ranks for the same things."""
    accelerator: Any = start.accelerator
    facts = dict[str, str]()
    for name in (entry.name for entry in own_fields(GRPOConfig) if not _FIRST_RANK_OPTIONS.match(entry.name)):
        value: Any = redacted(plain(getattr(start.args, name)), name)
        facts |= fields_of(name, value) if isinstance(value, Mapping) else {name: spelled(value)}
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    facts |= {"fused_grpo": __version__, "device": accelerator.device.type}
    facts["distributed_type"] = accelerator.distributed_type.value
    facts |= fields_of("fsdp_plugin", {} if plugin is None else vars(plugin))
    facts |= {name: rows_of(rows, name) for name, rows in start.sets.items()}
    facts |= fields_of("model.config", start.config.to_dict()) | parameters_of("model", start.model)
    facts |= parameters_of("teacher_model", start.teacher_model)
    facts["processing_class"] = tokenizer_of(start.tokenizer)
    facts |= {name: ", ".join(map(function_of, functions)) for name, functions in functions_of(start).items()}
    facts["rollout_engine"] = type(start.rollout_engine).__name__
    factories = start.environment_factory
    factories = factories if isinstance(factories, Mapping) else {"": factories}
    facts["environment_factory"] = ", ".join(f"{name}{function_of(one)}" for name, one in factories.items())
    for name in ("peft_config", "quantization_config"):
        config = getattr(start, name)
        facts |= {name: type(config).__name__} | ({} if config is None else fields_of(name, config.to_dict()))
    for name, one in zip(("optimizer", "schedule"), optimizers, strict=True):
        facts[name] = settings_of(one) if one else "None"
    return facts


def functions_of(start: Start) -> dict[str, Sequence[Any]]:
    """Those that a rank is given, by the argument."""
    tools = [] if start.rules is None else start.rules.tools
    return {"reward_funcs": start.rewards.functions, "tools": tools, "rollout_func": [start.rollout_func]}


def held_by_functions(start: Start) -> dict[str, str]:
    """A digest of each value that a function holds, by the function's and its own name."""
    digests = dict[str, str]()
    for function in chain.from_iterable(functions_of(start).values()):
        if function is not None and not isinstance(function, RewardModel):
            digests |= {f"{name} of {reward_name(function)}": _held(value) for name, value in held_by(function)}
    return digests


def _held(value: Any) -> str:
    if isinstance(value, list | tuple | set | frozenset | Mapping) and len(value) > MANY:
        return f"{len(value)} of a {type(value).__name__}"  # a table takes seconds to read
    try:
        return digest(plain(value))
    except Exception:  # of somebody's array, or of a list that is in itself
        return type(value).__name__


def held_by(function: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of the variables that a function takes from where it was made, and of a callable's attributes."""
    function = inspect.unwrap(function)
    if isinstance(function, partial):
        yield from held_by(function.func)
        yield from (
            *((f"argument {place}", one) for place, one in enumerate(function.args)),
            *function.keywords.items(),
        )
        return
    if inspect.ismethod(function):
        yield from vars(function.__self__).items() if hasattr(function.__self__, "__dict__") else ()
        function = function.__func__
    if not inspect.isfunction(function):
        yield from getattr(function, "__dict__", {}).items()
        return
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a variable without a value yet
            yield name, cell.cell_contents


def warn_of_other_values(ranks: Sequence[Mapping[str, str]]) -> None:
    """A warning, once, for what functions hold of the same name and not of the same value."""
    first, *others = ranks
    for rank, other in enumerate(others, 1):
        if names := [name for name in first if other.get(name, first[name]) != first[name]]:
            warn_once(
                f"got another value of {', '.join(names[:5])} on rank {rank} than on rank 0: completions are scored "
                "by what their rank has; fix: the same on every rank, unless it is a device or a server of its own"
            )
            return


def described(start: Start) -> dict[str, Any]:
    """What a checkpoint names beside the options: a resumed run goes on with its own. JSON."""
    config = plain(start.config.to_dict(), but=_RUN_KEYS)
    tokenizer_text, functions_text = tokenizer_of(start.tokenizer), ", ".join(map(function_of, start.rewards.functions))
    return {
        f"model.config.{name}": spelled(value) if isinstance(value, dict | list) else value
        for name, value in config.items()
    } | {"processing_class": tokenizer_text, "reward_funcs": functions_text}


def digest(value: Any) -> str:
    return f"sha256 {hashlib.sha256(spelled(value).encode(errors='backslashreplace')).hexdigest()[:16]}"


def rows_of(rows: Any, name: str) -> str:
    """A dataset: its rows, or of a stream the first two."""
    if is_stream(rows):
        return f"a stream, {digest(list(islice(read_rows(rows, name=name), 2)))}"
    return f"{len(rows)} rows, sha256 {fingerprint(rows)}"


def fields_of(name: str, values: Mapping[str, Any]) -> dict[str, str]:
    """A configuration by its fields; paths in it may differ from machine to machine."""
    return {f"{name}.{key}": spelled(one) for key, one in plain(values).items()}


def plain(value: Any, *, but: Set[str] = _MACHINE_KEYS) -> Any:
    """A value without what differs between processes: the order of a set, and where an object lies in memory."""
    if isinstance(value, Mapping):
        return {str(key): plain(one, but=but) for key, one in value.items() if key not in but}
    if isinstance(value, list | tuple):
        return [plain(one, but=but) for one in value]
    if isinstance(value, set | frozenset):
        return sorted(map(spelled, map(plain, value)))
    if isinstance(value, str | int | float | None):
        return value
    if is_array(value):
        return digest_of_array(value)
    if inspect.isfunction(value):
        return digest(_instructions(value.__code__))
    return str(value) if isinstance(value, torch.dtype | Path) else type(value).__name__


def parameters_of(name: str, model: Any) -> dict[str, str]:
    """Names, shapes and types of a module's parameters, and which are trained; whether there is another model."""
    if not isinstance(model, nn.Module):
        return {name: str(model) if model in (None, SELF) else "a path"}
    facts = {key: f"{[*one.shape]} {one.dtype} {one.requires_grad}" for key, one in model.named_parameters()}
    return {name: f"{type(model).__name__} with {len(facts)} parameters, {digest(facts)}"}


def tokenizer_of(tokenizer: Any) -> str:
    special = [tokenizer.eos_token_id, tokenizer.pad_token_id, str(getattr(tokenizer, "chat_template", None))]
    return f"{type(tokenizer).__name__}, {digest([tokenizer.get_vocab(), special])}"


def function_of(function: Any) -> str:
    """A function or an object by its name and its code; a reward model by its weights."""
    if isinstance(function, RewardModel):
        model: Any = function.model
        return f"{reward_name(function)} ({fingerprint_of_weights(model)[:16]}, {tokenizer_of(function.tokenizer)})"
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    name = "None" if function is None else reward_name(function)
    return name if code is None else f"{name} ({digest(_instructions(code))})"


def _instructions(code: CodeType) -> list[Any]:
    """Without the names of files: those differ from machine to machine."""
    constants = [_instructions(one) if isinstance(one, CodeType) else one for one in code.co_consts]
    return [code.co_code, list(code.co_names), constants]


def settings_of(instance: Any) -> str:
    """An optimizer by the options of its groups, a schedule by its attributes."""
    groups = getattr(instance, "param_groups", None)
    if groups is None:
        return f"{type(instance).__name__}, {digest(plain(vars(instance)))}"
    shapes = [{**group, "params": [[*weight.shape] for weight in group["params"]]} for group in groups]
    return f"{type(instance).__name__}, {digest(plain(shapes))}"
