"""The fields of TRL 1.16's `GRPOConfig` that have no effect here: trl_fields.json has them and their defaults.

They stand there by what other values do, and by the reason; "types" has those that a default does not show. A test
compares all with TRL's own class. "former" are fields of older versions of TRL and transformers, and what to write now.
"arguments of GRPOTrainer" are those of ours.

`GRPOConfig` has every field of TRL's, so that parsers and callbacks find them. The default of one that has no effect
here changes nothing; a value that changes nothing either gets a warning with the reason, any other an error with it.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import functools
import inspect
import json
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from fused_grpo.errors import InputError, UnsupportedError, WrongTypeError
from fused_grpo.trainer.common.redaction import REDACTED, redacted
from fused_grpo.trainer.common.warnings import warn_once

Config = TypeVar("Config")
# Of an `accelerator_config`.
LOADS_ROWS = {"dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking"}


class Missing(NamedTuple):
    """A field that only TRL has: its default there, why it has no effect here, and what other values do."""

    default: Any
    why: str
    others: str
    kind: str
    """The type, as an annotation."""

    def accepts(self, value: Any) -> bool:
        """Whether a value other than the default changes nothing either."""
        if self.others == "change nothing":
            return True
        settings = value.to_dict() if callable(getattr(value, "to_dict", None)) else value
        if self.others == "change nothing where they only load rows" and isinstance(settings, Mapping):
            return all(name in LOADS_ROWS or not setting for name, setting in settings.items())
        is_empty = value is None or (isinstance(value, bool | str | list | tuple | dict) and not value)
        return is_empty and not self.others.startswith("refused")


_FILE = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_KINDS, FORMER = _FILE.pop("types"), _FILE.pop("former")
TRAINER_ARGUMENTS = dict.fromkeys(_FILE.pop("arguments of GRPOTrainer"), "it is an argument of GRPOTrainer")
OPTIONS_HELP = "fused-grpo train --help"
MISSING = {
    name: Missing(default, why, others, _KINDS.get(name, "str | None" if default is None else type(default).__name__))
    for others, reasons in _FILE.items()
    for why, fields in reasons.items()
    for name, default in fields.items()
}

READ = {"per_device_eval_batch_size", "dataloader_num_workers"}  # all the same: by data loaders, and for callbacks


def with_trl_fields(cls: type[Config]) -> type[Config]:
    """The class, which `dataclass` is about to read, with the fields that only TRL has."""
    for name, missing in MISSING.items():
        cls.__annotations__[name] = missing.kind
        listed = isinstance(missing.default, list)
        setattr(cls, name, dataclasses.field(default_factory=list) if listed else missing.default)
    return cls


def refusing_others(elsewhere: Mapping[str, str], see: str) -> Callable[[type[Config]], type[Config]]:
    """Of a class the one whose constructor says of an unknown name what to write instead, as `unknown_options`."""

    def refusing(cls: type[Config]) -> type[Config]:
        construct, names = cls.__init__, [*inspect.signature(cls).parameters]

        @functools.wraps(construct)
        def checked(self: Any, *values: Any, **options: Any) -> None:
            if others := [name for name in options if name not in names]:
                raise WrongTypeError(unknown_options(others, names, f"of {cls.__name__}", elsewhere, see=see))
            construct(self, *values, **options)

        cls.__init__ = checked  # type: ignore[method-assign]
        return cls

    return refusing


def field_docstrings(cls: type) -> dict[str, str]:
    """The string below each annotated field of a class, its parents' included."""
    texts: dict[str, str] = {}
    for owner in reversed(cls.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, below in zip(body.body, body.body[1:], strict=False):
            match statement, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[name] = " ".join(text.split())
    return texts


def with_help(cls: type[Config]) -> type[Config]:
    """The dataclass, whose fields have their docstrings where HfArgumentParser, of TRL's scripts, looks for a help."""
    texts = {name: f"Of TRL; other values: {missing.others}. {missing.why}" for name, missing in MISSING.items()}
    with contextlib.suppress(OSError):  # installed without its source
        texts |= field_docstrings(cls)
    for entry in dataclasses.fields(cls):  # type: ignore[arg-type]
        if entry.name in texts:
            entry.metadata = MappingProxyType({"help": texts[entry.name]})
    return cls


def unknown_options(
    others: Iterable[object],
    names: Iterable[str],
    place: str,
    elsewhere: Mapping[str, str] = TRAINER_ARGUMENTS,
    *,
    see: str = OPTIONS_HELP,
) -> str:
    """The text of an error about what is no option: what to write instead, by the history or by similarity."""

    def instead(other: str) -> str:
        close = difflib.get_close_matches(other, names, n=1)
        replacement = FORMER.get(other) or elsewhere.get(other)
        return replacement or (f"did you mean {close[0]!r}?" if close else f"see {see}")

    fixes = "; ".join(f"{other}: {instead(other)}" for other in map(str, others))
    return f"got unknown option(s) {', '.join(map(repr, others))} {place}; fix: {fixes}"


def _stream_default(config: Any) -> list[Any]:
    return [type(config)(dispatch_batches=False)] if hasattr(config, "dispatch_batches") else []


def refuse_unless_harmless(name: str, value: Any, *, uploads: bool) -> None:
    """Raise where a value of a field that only TRL has would change the run; report any other value, once.

    `uploads`: whether the run uploads its model.
    """
    missing = MISSING[name]
    # An `eval_strategy` makes it True (`complete_intervals`).
    if value == missing.default or (name, value) == ("do_eval", True):
        return
    # What a trainer makes of None (`fill_loader_options`); of a stream without batches that one process reads for all.
    if name == "accelerator_config" and value in (type(value)(), *_stream_default(value)):
        return
    text = repr(REDACTED if redacted(value, name) == REDACTED else value)
    is_idle = missing.others == "refused with push_to_hub" and (not uploads or (name, value) == ("hub_strategy", "end"))
    if not is_idle and not missing.accepts(value):
        error = InputError if missing.others == "refused by TRL, too" else UnsupportedError  # there a ValueError
        raise error(
            f"got {name}={text}, a field of TRL's that this trainer does not have: {missing.why}; "
            f"fix: leave it out (default {missing.default!r})"
        )
    warn_once(f"got {name}={text[:200]}, which changes nothing here: {missing.why}")
