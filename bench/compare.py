"""Two result files beside each other: `python -m fused_grpo.bench.compare OLD NEW`.

Exit status 1 if something of ours got worse: slower by more than `--time` (10 %) and by more than noise; more than
`--memory` (1 %) more bytes; an error more than twice as large; or not measured any more. Changes of peers are shown and
fail nothing. Status 2, without a comparison, if the files are of different machines, devices, threads or versions of
torch, unless `--allow-other-machine`.

Time. Rounds are interleaved, so a disturbance of the machine in a round affects the products alone as well. Where a
group has them, the time of a round is divided by that of the products in the same round: a throttled or shared machine
is no regression, and a faster one hides none. A slower product itself is not detected by this; its own line shows it.
Without the products seconds are compared directly.

Noise. A median moves although nothing has changed. So it has to move by more than the threshold, and the middle halves
of old and new rounds must not overlap. Quartiles are used instead of the fastest and slowest rounds, because one
disturbed round of either file would excuse everything.

Errors are of a small problem and nearly equal in every run; differences below one rounding of fp32 are ignored.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fused_grpo.bench.report.results_file import (
    Group,
    Result,
    Row,
    bytes_text,
    commit,
    day,
    groups_of,
    read,
    seconds_text,
    version_of,
)
from fused_grpo.bench.report.tables import MISSING, markdown
from fused_grpo.errors import FusedGRPOError, InputError

MOST_GROWTH_OF_ERRORS = 2.0
ROUNDING = 2.0**-23


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """The allowed growth, as a share."""

    time: float = 0.10
    memory: float = 0.01


@dataclass(frozen=True, kw_only=True)
class Change:
    """One implementation of one group in both files; a row is None where the file does not have it."""

    old: Row | None
    new: Row | None
    time: float | None
    """Growth of the median as a share; of its quotient with the products alone, where both files have them."""
    relative: bool
    worse: tuple[str, ...]
    """Descriptions of what got worse."""

    @property
    def row(self) -> Row:
        row = self.new or self.old
        assert row is not None
        return row

    @property
    def fails(self) -> bool:
        """Ours fail; the products alone fail where they are missing, because times cannot be compared then."""
        return bool(self.worse) and (self.row.ours or (self.row.is_floor and self.new is None))


def compare(old: Result, new: Result, allowed: Thresholds) -> list[Change]:
    """The changes of every implementation of either file, in the order of the old one."""
    before, after = groups_of(old), groups_of(new)
    nothing = Group(name="", rows=(), absent={})
    changes = []
    for name in dict.fromkeys([*before, *after]):
        pair = before.get(name, nothing), after.get(name, nothing)
        old_rows, new_rows = ({row.implementation: row for row in group.rows} for group in pair)
        for implementation in dict.fromkeys([*old_rows, *new_rows]):
            changes.append(change_of(old_rows.get(implementation), new_rows.get(implementation), pair, allowed))
    return changes


def change_of(old: Row | None, new: Row | None, groups: tuple[Group, Group], allowed: Thresholds) -> Change:
    if old is None or new is None:
        gone = () if new is not None else (f"gone{reason_for(old, groups[1])}",)
        return Change(old=old, new=new, time=None, relative=False, worse=gone)
    floors = groups[0].floor, groups[1].floor
    relative = None not in floors and not old.is_floor
    before, after = (rounds_of(row, floor if relative else None) for row, floor in zip((old, new), floors, strict=True))
    growth = statistics.median(after) / statistics.median(before) - 1
    worse = [f"{growth:.0%} slower"] if growth > allowed.time and beyond_noise(before, after) else []
    worse += memory_worse(old, new, allowed) + errors_worse(old, new)
    return Change(old=old, new=new, time=growth, relative=relative, worse=tuple(worse))


def rounds_of(row: Row, floor: Row | None) -> list[float]:
    """Seconds of each round over those of the floor in that round; over its median if the rounds do not match."""
    seconds = list(row.seconds) if len(row.seconds) > 1 else [row.fastest, row.median, row.slowest]
    if floor is None:
        return seconds
    if len(row.seconds) == len(floor.seconds) > 1:
        return [measured / floor_seconds for measured, floor_seconds in zip(row.seconds, floor.seconds, strict=True)]
    return [second / floor.median for second in seconds]


def beyond_noise(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether three quarters of the new rounds are slower than three quarters of the old."""
    (_, _, high), (low, _, _) = (statistics.quantiles(rounds, n=4, method="inclusive") for rounds in (before, after))
    return low > high


def memory_worse(old: Row, new: Row, allowed: Thresholds) -> list[str]:
    if old.peak is None:
        return []
    if new.peak is None:
        return ["memory is not measured any more"]
    grew = new.peak > old.peak * (1 + allowed.memory)
    return [f"{bytes_text(new.peak - old.peak)} more memory"] if grew else []


def errors_worse(old: Row, new: Row) -> list[str]:
    """NaN counts as larger than every number."""
    descriptions = []
    for name, before in old.errors.items():
        after = new.errors.get(name)
        if after is None:
            descriptions.append(f"error of {name} is not measured any more")
        elif not after <= max(MOST_GROWTH_OF_ERRORS * before, ROUNDING):
            descriptions.append(f"error of {name} from {before:.1e} to {after:.1e}")
    return descriptions


def reason_for(row: Row | None, group: Group) -> str:
    reason = None if row is None else group.absent.get(row.implementation)
    return f": {reason}" if reason else ""


def render(changes: Sequence[Change]) -> str:
    """A table for each group, and a summary."""
    parts = []
    for name in dict.fromkeys(change.row.group for change in changes):
        lines = [line_of(change) for change in changes if change.row.group == name]
        header = ["implementation", "time", "now", "change", "memory", "now", "change", "verdict"]
        parts.append(f"## {name}\n\n{markdown(header, lines)}")
    failed = [change for change in changes if change.fails]
    lines_of = [f"- {change.row.implementation}, {change.row.group}: {'; '.join(change.worse)}" for change in failed]
    heading = f"{len(failed)} of ours worse:" if failed else "Nothing of ours is worse."
    return "\n\n".join([*parts, "\n".join([heading, "", *lines_of] if failed else [heading])])


def line_of(change: Change) -> list[str]:
    rows = change.old, change.new
    times = [MISSING if row is None else seconds_text(row.median) for row in rows]
    sizes = [MISSING if row is None or row.peak is None else bytes_text(row.peak) for row in rows]
    note = "" if change.time is None or not change.relative else " x products"
    time = MISSING if change.time is None else f"{change.time:+.1%}{note}"
    return [change.row.implementation, *times, time, *sizes, memory_change(change), verdict_of(change)]


def memory_change(change: Change) -> str:
    old, new = (None if row is None else row.peak for row in (change.old, change.new))
    return MISSING if not old or new is None else f"{new / old - 1:+.1%}"


def verdict_of(change: Change) -> str:
    if change.worse:
        text = "; ".join(change.worse)
        return f"**WORSE**: {text}" if change.fails else text
    return "new" if change.old is None else "ok"


def check_same_machine(old: Result, new: Result) -> None:
    """Refuse files whose times cannot be compared.

    Raises:
        InputError: the files are of different machines, threads or versions of torch.
    """
    fields = ("name", "device", "threads")
    pairs = {name: tuple(result["machine_info"].get(name) for result in (old, new)) for name in fields}
    pairs["version of torch"] = (version_of(old, "torch"), version_of(new, "torch"))
    facts = [f"{name} {old!r} and {new!r}" for name, (old, new) in pairs.items() if old != new]
    if facts:
        raise InputError(
            f"got files of different machines ({'; '.join(facts)}), want two of the same, whose times can be compared; "
            "fix: measure both on one machine, or --allow-other-machine"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Compare two files: 0 if nothing of ours got worse, 1 if something did, 2 if they cannot be compared."""
    parser = argparse.ArgumentParser(prog="python -m fused_grpo.bench.compare", description="Compare two result files.")
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--time", type=float, default=0.10, help="allowed growth of time, as a share (%(default)s)")
    parser.add_argument("--memory", type=float, default=0.01, help="allowed growth of memory, as a share (%(default)s)")
    parser.add_argument("--allow-other-machine", action="store_true", help="compare files of different machines, too")
    options = parser.parse_args(argv)
    try:
        old, new = read(options.old), read(options.new)
        if not options.allow_other_machine:
            check_same_machine(old, new)
    except FusedGRPOError as error:
        print(error, file=sys.stderr)
        return 2
    changes = compare(old, new, Thresholds(time=options.time, memory=options.memory))
    for name, result in (("old", old), ("now", new)):
        print(f"{name}: commit {commit(result)}, {day(result)}")
    print("", render(changes), sep="\n")
    return int(any(change.fails for change in changes))


if __name__ == "__main__":
    sys.exit(main())
