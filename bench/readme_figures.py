"""Figures in Markdown pages, from result files: `python -m fused_grpo.bench.readme_figures [--check] [PAGE...]`.

A page has blocks, whose inside is written by this and never by hand:

    <!-- figures: loss from bench/results/cpu-2-cores/2026-11-21.json -->
    ...
    <!-- end of figures -->

    loss, logprobs    a table of the most telling group of that kind (`results_file.headline`)
    trainer           tables of the groups of whole trainers and generation
    machine           where, with what and when it was measured, in one sentence

`loss of GPT-2, N=2048 from ...` takes into account only groups with that in their names; so does `trainer of ...`. The
path is relative to the page, as that of a link is. Without pages it is about README.md and docs/benchmarks.md of the
current folder, where they are. `--check` changes nothing, and exits with 1 if a block is not what its file says.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from fused_grpo.bench import tables
from fused_grpo.bench.results_file import Group, Result, commit, day, groups_of, headline, machine_text, read
from fused_grpo.errors import DataError, FusedGRPOError

PAGES = ("README.md", "docs/benchmarks.md")
START = re.compile(r"<!-- figures: (?P<what>\S+)(?: of (?P<group>.+?))? from (?P<path>\S+) -->")
END = "<!-- end of figures -->"
BLOCK = re.compile(START.pattern + rf"\n(?P<inside>.*?){re.escape(END)}", re.DOTALL)
COMPACT: dict[str, tables.Cell] = {
    "": tables.named_with_version,
    "time ({time})": tables.time_cell,
    "x products": tables.products_cell,
    "memory (MiB)": tables.memory_cell,
    "largest error": tables.error_cell,
}


def figures(what: str, group: str | None, result: Result) -> str:
    """The inside of a block, without the link to its file."""
    if what in ("loss", "logprobs"):
        return head_text(headline(result, kind=what, name=group))
    if what == "trainer":
        return trainer_text(result, group)
    if what == "machine":
        return f"Measured on {machine_text(result)}, on {day(result)} at commit `{commit(result)}`."
    raise DataError(f"got the figures {what!r}, want loss, logprobs, trainer or machine; fix: name one of these")


def head_text(group: Group) -> str:
    """A compact table, and below it who is not in it."""
    absent = ", ".join(group.absent)
    parts = [f"{group.name}:", tables.table(group, COMPACT), f"Not measured here: {absent}." if absent else ""]
    return "\n\n".join(part for part in parts if part)


def trainer_text(result: Result, name: str | None) -> str:
    found = [group for group in groups_of(result).values() if not tables.is_head(group)]
    chosen = [group for group in found if name is None or name in group.name]
    if not chosen:
        has = "; ".join(group.name for group in found) or "none"
        raise DataError(
            f"got no group of a trainer with {name!r} in its name, want one of: {has}; fix: name one of these"
        )
    return "\n\n".join(f"{group.name}:\n\n{tables.other_table(group)}" for group in chosen)


def rewritten(text: str, folder: Path) -> str:
    """A page with its blocks as their files have it. `folder` is where the page is."""
    if not len(START.findall(text)) == len(BLOCK.findall(text)) == text.count(END):
        raise DataError(f"got a block of figures without its end, or an end without a block, want {END!r} after each")

    def block(match: re.Match[str]) -> str:
        what, group, path = match["what"], match["group"], match["path"]
        inside = figures(what, group, read(folder / path))
        return f"{match[0].partition(chr(10))[0]}\n{inside}\n\nRaw file: [{Path(path).name}]({path}).\n{END}"

    return BLOCK.sub(block, text)


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite pages, or check them; 2 if one or its file cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m fused_grpo.bench.readme_figures", description="Figures of pages.")
    parser.add_argument("pages", type=Path, nargs="*", metavar="PAGE")
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if a block is not what its file says")
    options = parser.parse_args(argv)
    pages = options.pages or [page for page in map(Path, PAGES) if page.exists()]
    stale = []
    for page in pages:
        try:
            text = page.read_text()
            fresh = rewritten(text, page.parent)
        except (OSError, FusedGRPOError) as error:
            print(f"{page}: {error}", file=sys.stderr)
            return 2
        if fresh != text:
            stale.append(page)
            if not options.check:
                page.write_text(fresh)
    if options.check and stale:
        command = f"python -m fused_grpo.bench.readme_figures {' '.join(map(str, stale))}"
        print(f"got figures that are not those of their files in {', '.join(map(str, stale))}; fix: {command}")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
