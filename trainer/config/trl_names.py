"""Methods and attributes of TRL's and transformers' trainers that the loop does not call or read: trl_names.json.

They stand there by what takes their place. A script that replaces one of them, in a subclass or on the trainer itself,
means to change the run, and would not.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import Trainer

from fused_grpo.errors import InputError, MissingAttributeError, UnsupportedError, quoted
from fused_grpo.trainer.config.grpo_config import GRPOConfig

_FILE: dict[str, list[str]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
REASONS = {name: why for why, names in _FILE.items() for name in names}
# What is no argument of the trainer.
NO_ARGUMENTS = {name: f"leave it out: {why}" for name, why in REASONS.items()}
NO_ARGUMENTS |= {entry.name: f"it is an option: args=GRPOConfig({entry.name}=...)" for entry in fields(GRPOConfig)}
NO_ARGUMENTS["tokenizer"] = "processing_class"
OWN = "a name of transformers' or this trainer's own"
# What may be replaced: the loop calls it, or scripts alone do.
HOOKS = {
    *("train", "evaluate", "log", "end", "save_checkpoint", "push_to_hub"),
    *("save_state", "save_metrics", "log_metrics", "metrics_format", "get_num_trainable_parameters"),
    *("add_callback", "pop_callback", "remove_callback", "is_world_process_zero", "is_local_process_zero"),
}
# What the loop gives to those that it calls.
CALLS: dict[str, tuple[Any, ...]] = {"log": ({}, 0.0), "evaluate": (), "save_checkpoint": ()}
_TRAINER_NAMES = {name for name in (*REASONS, *vars(Trainer)) if not name.startswith("__")} - HOOKS


def check_replaced(trainer: object, made: Mapping[str, Any], moves: Mapping[str, Any]) -> None:
    """Check what a subclass, or a script, has put in the place of a part of the trainer.

    `made` are the attributes that it was made with, `moves` those that a run or a script may change, by their types.
    UnsupportedError for a method or an attribute that nothing would call or read, or that is a part of its own;
    InputError for a method that cannot be called as the loop calls it.
    """
    set_here = _set_attributes(vars(trainer), made, moves)
    if wrong := dict(_replaced_methods(type(trainer), made)) | {name: name for name in set_here}:
        listed = "; ".join(f"{what} ({REASONS.get(name, OWN)})" for what, name in wrong.items())
        raise UnsupportedError(
            f"got {listed}: this trainer does not use them as TRL's does; fix: leave them out, or take other names "
            "(docs/from-trl.md says what is in their place)"
        )
    for name, given in CALLS.items():
        try:
            inspect.signature(getattr(trainer, name)).bind(*given)
        except TypeError as error:
            raise InputError(
                f"got {type(trainer).__name__}.{name}{inspect.signature(getattr(trainer, name))}, which cannot be "
                f"called as this trainer does ({error}), want the signature of transformers' own; fix: "
                f"{name}(self, *args, **kwargs)"
            ) from error


def made_from(early: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes that a trainer was made with. UnsupportedError for those that a subclass had set before its
    `super().__init__`, if the trainer has some of that name: they are gone."""
    if gone := [name for name, value in early.items() if made[name] is not value]:
        raise UnsupportedError(
            f"got {', '.join(gone)} set before super().__init__(), which sets {OWN}, want other names; "
            "fix: rename them, such as my_" + gone[0].lstrip("_")
        )
    return dict(made)


def absent(trainer: Any, name: str) -> Any:
    """What a script gets that reads a name that a trainer has not: the option of that name.

    MissingAttributeError, which `hasattr` takes for one, for any other name of TRL's or transformers' trainer.
    """
    if name not in _TRAINER_NAMES:
        raise AttributeError(f"{type(trainer).__name__!r} object has no attribute {name!r}", name=name, obj=trainer)
    if name in type(trainer.args).__dataclass_fields__:
        return getattr(trainer.args, name)
    raise MissingAttributeError(
        f"got trainer.{name}, which TRL's trainer has and this one has not: {REASONS.get(name, OWN)}; fix: leave it "
        "out (docs/from-trl.md says what is in its place)"
    )


def check_not_given(method: str, given: Mapping[str, Any], *, want: str) -> None:
    """UnsupportedError for arguments of transformers' own method that are not None, which is their default."""
    if values := {name: value for name, value in given.items() if value is not None}:
        listed = ", ".join(f"{name}={quoted(value)}" for name, value in values.items())
        raise UnsupportedError(f"got {method}({listed}), want {want}; fix: leave {' and '.join(values)} out")


def replaces(trainer: object, *names: str) -> bool:
    """Whether a subclass, or a script that patched ours, has one of these methods of its own."""
    return not all(_is_ours(getattr(type(trainer), name)) for name in names)


def _replaced_methods(kind: type, made: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(what a class, or one between it and ours, has in the place of a name of TRL's or ours, that name)."""
    own = {name for base in kind.__mro__ if _is_ours(base) for name in vars(base)} | made.keys()
    for base in kind.__mro__[:-1]:
        for name, value in vars(base).items():
            # A function that was put into our own class has another module.
            if name.startswith("__") or (_is_ours(base) and _is_ours(value, base)):
                continue
            if name in _TRAINER_NAMES or (not _is_ours(base) and name in own - HOOKS):
                yield f"{base.__name__}.{name}", name


def _set_attributes(attributes: Mapping[str, Any], made: Mapping[str, Any], moves: Mapping[str, Any]) -> Iterator[str]:
    """The attributes that were set on a trainer and may not be."""
    for name, value in attributes.items():
        is_same = isinstance(value, moves[name]) if name in moves else name in made and value is made[name]
        if not is_same and (name in moves or name in made or name in _TRAINER_NAMES):
            yield name


def _is_ours(one: object, of: object = None) -> bool:
    """Whether a class, or what one `of` ours has, comes from this package or, as some methods, from transformers."""
    return f"{getattr(one, '__module__', getattr(of, '__module__', ''))}.".startswith(("fused_grpo.", "transformers."))
