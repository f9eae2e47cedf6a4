"""The table of TRL's options in docs/from-trl.md, made from trainer/config/trl_fields.py and the two `GRPOConfig`s.

    python scripts/trl_table.py          write it
    python scripts/trl_table.py --check  say whether it is current (exit 1: it is not)

Needs trl, which is installed for tests and benchmarks only.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.config.trl_fields import DIFFERENT, MISSING

PAGE = Path(__file__).resolve().parent.parent / "docs" / "from-trl.md"
BEGIN, END = "<!-- table: scripts/trl_table.py -->", "<!-- end of the table -->"


def table() -> str:
    """One row for every field of TRL's `GRPOConfig`, then those that only this trainer has."""
    from trl import GRPOConfig as TRLConfig

    theirs = {entry.name: entry for entry in dataclasses.fields(TRLConfig)}
    ours = {entry.name: entry for entry in dataclasses.fields(GRPOConfig)}
    rows = [row(entry, ours.get(name)) for name, entry in sorted(theirs.items())]
    same = sum("| same |" in line for line in rows)
    other = len(theirs) - same - len(MISSING)
    counts = f"{len(theirs)} options: {same} are the same, {other} differ, {len(MISSING)} are not here."
    added = ", ".join(f"`{name}`" for name in ours if name not in theirs)
    head = ["| option | TRL's default | here |", "|---|---|---|"]
    return "\n".join([counts, "", *head, *rows, "", f"Only here: {added}."])


def row(entry: dataclasses.Field[Any], ours: dataclasses.Field[Any] | None) -> str:
    """The line of one field; `ours` is the field of that name here, where there is one."""
    name = entry.name
    if ours is None:
        here = f"not here: {MISSING[name].why}"
    else:
        notes = [DIFFERENT[name]] if name in DIFFERENT else []
        if not notes and shown(ours) != shown(entry):
            notes = [f"{shown(ours)} by default"]
        here = "; ".join(notes) or "same"
    return f"| `{name}` | {shown(entry)} | {here} |"


def shown(entry: dataclasses.Field[Any]) -> str:
    """The default of a field, as Markdown."""
    made = entry.default_factory is not dataclasses.MISSING
    value = entry.default_factory() if made else entry.default  # type: ignore[misc]
    value = getattr(value, "value", value)  # of an enumeration
    if isinstance(value, float) and value == int(value):
        value = int(value)
    return "`None`" if value in (None, "") else f"`{value!r}`".replace("'", '"')


def page_with(text: str, new: str) -> str:
    """The page with its table replaced."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{new}\n\n{END}{rest.partition(END)[2]}"


def main(arguments: list[str]) -> int:
    old = PAGE.read_text()
    new = page_with(old, table())
    if arguments == ["--check"]:
        return int(old != new)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
