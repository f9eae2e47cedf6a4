"""The tables of docs/from-trl.md, made from the installed TRL, trl_differences.py, trl_fields.json and trl_names.json.

    python scripts/trl_table.py          write them
    python scripts/trl_table.py --check  say whether they are current (exit 1: they are not)

Options that are the same are listed by section of the help; what is absent for one reason shares a line.
Needs trl, which is installed for tests and benchmarks only.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from trl_differences import BEHAVIOURS, DIFFERENT, NO_NUMBERS, SIZES, UNMEASURED

from fused_grpo.trainer import GRPOTrainer
from fused_grpo.trainer.cli.options import SECTIONS, TrainOptions
from fused_grpo.trainer.config.grpo_config import GRPOConfig, own_fields
from fused_grpo.trainer.config.trl_fields import MISSING
from fused_grpo.trainer.config.trl_names import REASONS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "from-trl.md"


def differences() -> str:
    """Behaviour that differs, and options with the same name and another default or meaning."""
    trl_options, ours = trl_fields(), {entry.name: entry for entry in own_fields(GRPOConfig)}
    rows = [(line.trl, line.here, line.size) for line in BEHAVIOURS]
    rows += [
        (f"`{name}`, by default {shown(entry)}", difference(entry, ours[name]), SIZES.get(name, NO_NUMBERS))
        for name, entry in sorted(trl_options.items())
        if name in ours and difference(entry, ours[name])
    ]
    return table(["TRL", "here", "size of the difference"], rows)


def options() -> str:
    """Every field of TRL's `GRPOConfig` that is not in `differences`, then those that only this trainer has."""
    trl_options, ours = trl_fields(), {entry.name: entry for entry in own_fields(GRPOConfig)}
    same = [name for name in trl_options if name in ours and not difference(trl_options[name], ours[name])]
    other = len(trl_options) - len(same) - len(MISSING)
    groups: dict[tuple[str, str], list[str]] = {}
    for name in sorted(MISSING):
        groups.setdefault((MISSING[name].why, MISSING[name].others), []).append(name)
    rows = [(quoted(names), values, why) for (why, values), names in sorted(groups.items(), key=lambda item: item[1])]
    return "\n\n".join(
        [
            f"{len(trl_options)} options: {len(same)} are the same, {other} differ (above), "
            f"{len(MISSING)} have no effect.",
            table(["section of `fused-grpo train --help`", "the same", "only here"], by_section(same, trl_options)),
            table(["without an effect", "values other than the default", "why"], rows),
        ]
    )


def by_section(same: list[str], trl_options: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """(title, options that are the same, options that only this trainer has), as the help has them."""
    sections: dict[str, list[str]] = {title: [] for title in SECTIONS.values()}
    title = ""
    for entry in own_fields(TrainOptions):
        title = SECTIONS.get(entry.name, title)
        sections[title].append(entry.name)
    own = {entry.name for entry in own_fields(GRPOConfig)}.difference(trl_options)
    for title, names in sections.items():
        row = quoted(name for name in names if name in same), quoted(name for name in names if name in own)
        if any(row):
            yield title, *row


def surface() -> str:
    """Public methods and attributes of TRL's `GRPOTrainer`, those of transformers' `Trainer` included."""
    trl_names, ours = public(trl_trainer()), public(GRPOTrainer)
    absent: dict[str, list[str]] = {}
    for name in sorted(trl_names - ours):
        absent.setdefault(REASONS.get(name, UNMEASURED), []).append(name)
    rows = [(quoted(names), reason) for reason, names in sorted(absent.items(), key=lambda item: item[1])]
    return "\n\n".join(
        [
            table(
                ["", "methods", "attributes"],
                [("here as there", *methods(trl_names & ours)), ("only here", *methods(ours - trl_names))],
            ),
            table(["not here", "why"], rows),
        ]
    )


def methods(names: set[str]) -> tuple[str, str]:
    """Of these names of `GRPOTrainer`, the methods and the others."""
    called = {name for name in names if callable(getattr(GRPOTrainer, name, None))}
    return quoted(sorted(called)), quoted(sorted(names - called))


TABLES: dict[str, Callable[[], str]] = {"differences": differences, "surface": surface, "options": options}


def trl_fields() -> dict[str, dataclasses.Field[Any]]:
    from trl import GRPOConfig as TRLConfig

    return {entry.name: entry for entry in dataclasses.fields(TRLConfig)}


def trl_trainer() -> type:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's, about the version of vLLM
        from trl import GRPOTrainer as TRLTrainer
    return TRLTrainer  # type: ignore[no-any-return]


def difference(trl_option: dataclasses.Field[Any], ours: dataclasses.Field[Any]) -> str:
    """In which way an option of one name differs; empty where it is the same."""
    if ours.name in DIFFERENT:
        return DIFFERENT[ours.name]
    return "" if shown(ours) == shown(trl_option) else f"{shown(ours)} by default"


@functools.cache
def public(cls: type) -> set[str]:
    """The public names of a class, and of what its methods assign to `self`."""
    names = set(dir(cls))
    for owner in cls.__mro__[:-1]:
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(owner)))):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                names.add(node.attr)
    return {name for name in names if not name.startswith("_")}


def shown(entry: dataclasses.Field[Any]) -> str:
    """The default of a field, as Markdown."""
    made = entry.default_factory is not dataclasses.MISSING
    value = entry.default_factory() if made else entry.default  # type: ignore[misc]
    value = getattr(value, "value", value)  # of an enumeration
    if isinstance(value, float) and value == int(value):
        value = int(value)
    return "`None`" if value in (None, "") else f"`{value!r}`".replace("'", '"')


def quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def table(head: list[str], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace("| --- ", "|---").replace("|--- |", "|---|")


def page_with(text: str) -> str:
    """The page with its tables replaced."""
    for name, make in TABLES.items():
        begin, end = f"<!-- {name}: scripts/trl_table.py -->", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n\n{make()}\n\n{end}{rest.partition(end)[2]}"
    return text


def main(arguments: list[str]) -> int:
    old = PAGE.read_text()
    new = page_with(old)
    if arguments == ["--check"]:
        return int(old != new)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
