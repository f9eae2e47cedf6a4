"""What a person sees while a run is going: a line per optimizer step, and now and then what the model wrote.

Plain lines instead of a live dashboard: they survive `tee`, `ssh`, `tmux` and a crash, and a log of them can be read a
month later. Colour only where the output is a terminal (rich decides). Columns are chosen from the first step: what the
run does not measure takes no room, and what does not fit the width is left out, least wanted first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console as RichConsole
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from fused_grpo.trainer.logging.formatting import (
    MISSING,
    conversation,
    duration,
    elide_lines,
    elide_middle,
    message_text,
    percent,
    short_number,
    sparkline,
    visible,
)
from fused_grpo.trainer.logging.metrics import metric

PIPED_WIDTH = 120
TREND = 10
HEADER_EVERY = 25
# Fixed, because the first step need not have them all: an engine that has just loaded the weights is not synced.
PHASES = ("generate", "reward", "train", "sync")
PHASE_TITLE = "%gen rew tra syn"
PROMPT_CHARACTERS = 240
COMPLETION_CHARACTERS = 480
MAX_LINES = 12
NARROW = 72
DEFAULT_ROWS = 4


@dataclass(frozen=True, kw_only=True)
class StepView:
    """All that a line about one step is made from."""

    step: int
    total_steps: int
    metrics: Mapping[str, object]
    phases: Mapping[str, float]
    seconds: float
    eta: float | None
    rewards: Sequence[float | None]
    ascii_only: bool


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of the step lines. `rank` 0 is always shown; of the others, the greatest goes first."""

    title: str
    width: int
    rank: int
    cell: Callable[[StepView], str]
    style: str = ""

    def fit(self, text: str) -> str:
        return text.rjust(self.width)


class Console:
    """Writes the progress of a run.

    Args:
        total_steps: optimizer steps that the run will take.
        quiet: write nothing at all (every process but the first).
        file: where to write; standard output by default.
    """

    def __init__(self, total_steps: int, *, quiet: bool = False, file: TextIO | None = None) -> None:
        self.total_steps = total_steps
        self._rich = RichConsole(file=file, quiet=quiet, highlight=False, markup=False, emoji=False)
        if not self._rich.is_terminal:
            self._rich.width = PIPED_WIDTH
        self._rewards: list[float | None] = []
        self._seconds: list[float] = []
        self._columns: list[Column] = []

    def banner(self, lines: Mapping[str, str]) -> None:
        """What is about to run, as a framed list of names and values."""
        self._panel("fused-grpo", lines, style="cyan")

    def done(self, lines: Mapping[str, str]) -> None:
        """What came of it, as a framed list of names and values."""
        self._panel("done", lines, style="green")

    def note(self, text: str) -> None:
        """A line of its own between the step lines."""
        self._print(Text(self._encodable(visible(text, keep="\n")), style="yellow"))

    def step(self, step: int, metrics: Mapping[str, object], phases: Mapping[str, float]) -> None:
        """The line of one optimizer step.

        Args:
            step: optimizer steps taken so far, this one included.
            metrics: the record of the step, as in metrics.jsonl.
            phases: seconds of each phase of the step: generate, reward, train, sync.
        """
        view = self._view(step, metrics, phases)
        if not self._columns:
            self._columns = _fitting(_columns(view), self._rich.width)
        if len(self._seconds) % HEADER_EVERY == 1:
            self._line([(column.fit(column.title), "dim") for column in self._columns])
        self._line([(column.fit(column.cell(view)), column.style) for column in self._columns])

    def completions(self, step: int, rows: Sequence[Mapping[str, object]], limit: int | None = None) -> None:
        """The best and the worst of `rows` (as for `RunLog.log_rollouts`), `limit` in all; None: 4.

        Of different prompts, as far as there are any. Long texts are elided in the middle; a narrow terminal gets one
        below the other, which a table of three columns would cut into strips.
        """
        chosen = best_and_worst(rows, DEFAULT_ROWS if limit is None else limit)
        title = f"step {step}: {len(chosen)} of {len(rows)} completions, the best first"
        self._print(Text(title, style="italic"))
        if self._rich.width < NARROW:
            for row in chosen:
                prompt, completion = self._texts(row)
                heading = f"reward {short_number(metric(row, 'reward'))}, advantage {_signed(metric(row, 'advantage'))}"
                self._rich.print(Text(heading, style="bold"), prompt, completion, "", sep="\n")
            return
        table = Table(show_lines=True)
        table.add_column("reward", justify="right", style="bold")
        table.add_column("adv.", justify="right")
        table.add_column("prompt", ratio=2, overflow="fold")
        table.add_column("completion", ratio=3, overflow="fold")
        for row in chosen:
            numbers = short_number(metric(row, "reward")), _signed(metric(row, "advantage"))
            table.add_row(*numbers, *self._texts(row))
        self._rich.print(table)

    def _texts(self, row: Mapping[str, object]) -> tuple[Text, Text]:
        prompt = self._sample(message_text(row.get("prompt", "")), PROMPT_CHARACTERS, style="dim")
        parts = conversation(row.get("completion", ""), name="")
        # An answer that is one message of the assistant's need not say so.
        text = parts[0][1] if len(parts) == 1 else message_text(row.get("completion", ""))
        completion = self._sample(text, COMPLETION_CHARACTERS)
        if row.get("finish_reason") == "length":
            completion.append(" [cut at the length limit]", style="yellow")
        return prompt, completion

    def _view(self, step: int, metrics: Mapping[str, object], phases: Mapping[str, float]) -> StepView:
        seconds = metric(metrics, "step_time") or sum(phases.values())
        self._seconds.append(seconds)
        self._rewards.append(metric(metrics, "reward"))
        # The first step pays for compilation and cold caches; a mean with it would promise hours too many.
        warm = self._seconds[1:]
        return StepView(
            step=step,
            total_steps=self.total_steps,
            metrics=metrics,
            phases=phases,
            seconds=seconds,
            eta=sum(warm) / len(warm) * max(self.total_steps - step, 0) if warm else None,
            rewards=self._rewards,
            ascii_only=not self._speaks_unicode,
        )

    @property
    def _speaks_unicode(self) -> bool:
        return self._rich.encoding.lower().startswith("utf")

    def _encodable(self, text: str) -> str:
        """What the output's encoding cannot spell must not end a run."""
        return text.encode(self._rich.encoding, errors="backslashreplace").decode(self._rich.encoding)

    def _sample(self, text: str, limit: int, *, style: str = "") -> Text:
        shown = elide_lines(visible(elide_middle(text, limit), keep="\n"), MAX_LINES)
        return Text(self._encodable(shown), style=style)

    def _line(self, cells: Sequence[tuple[str, str]]) -> None:
        gap = "  " if _width(self._columns, gap=2) <= self._rich.width else " "
        self._print(Text(gap).join(Text(self._encodable(text), style=style) for text, style in cells))

    def _panel(self, title: str, lines: Mapping[str, str], *, style: str) -> None:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim")
        grid.add_column(overflow="fold")
        for name, value in lines.items():
            grid.add_row(Text(name), Text(self._encodable(visible(str(value)))))
        self._rich.print(Panel(grid, title=title, title_align="left", border_style=style, expand=False))

    def _print(self, text: Text) -> None:
        self._rich.print(text, soft_wrap=True)


def best_and_worst(rows: Sequence[Mapping[str, object]], limit: int) -> list[Mapping[str, object]]:
    """`limit` of the rows by falling reward: the best half and the worst half, of as many prompts as there are."""
    scored = sorted((row for row in rows if metric(row, "reward") is not None), key=_worth, reverse=True)
    prompts = [message_text(row.get("prompt", "")) for row in scored]
    count = min(limit, len(scored))
    best = _of_many_prompts(list(range(len(scored))), prompts, count - count // 2)
    rest = [number for number in reversed(range(len(scored))) if number not in best]
    return [scored[number] for number in sorted(best + _of_many_prompts(rest, prompts, count // 2))]


def _of_many_prompts(numbers: list[int], prompts: Sequence[str], count: int) -> list[int]:
    """The first `count` of the numbers, those that repeat the prompt of an earlier one last."""
    seen, fresh, repeated = set[str](), list[int](), list[int]()
    for number in numbers:
        (repeated if prompts[number] in seen else fresh).append(number)
        seen.add(prompts[number])
    return (fresh + repeated)[:count]


def _worth(row: Mapping[str, object]) -> tuple[float, float]:
    """Of equal rewards, the one that stands out in its group is the better or the worse one."""
    return metric(row, "reward") or 0.0, metric(row, "advantage") or 0.0


def _signed(value: float | None) -> str:
    return f"+{short_number(value)}" if value is not None and value > 0 else short_number(value)


def _columns(first: StepView) -> list[Column]:
    """The columns for a run whose first step is `first`, in order."""
    step_width = max(2 * len(str(first.total_steps)) + 1, len("step"))
    candidates = [
        Column(title="step", width=step_width, rank=0, cell=lambda v: f"{v.step}/{v.total_steps}", style="bold"),
        _measured("reward", "reward", width=6, rank=0, style="bold cyan"),
        Column(title="±std", width=6, rank=6, cell=_spread),
        Column(title="trend", width=TREND, rank=8, cell=_trend, style="cyan"),
        _measured("len", "completion_length", width=5, rank=3),
        _measured("kl", "kl", width=6, rank=5),
        _measured("entr", "entropy", width=5, rank=7),
        Column(title="clip", width=5, rank=9, cell=lambda v: percent(metric(v.metrics, "clip_ratio"))),
        _measured("lr", "learning_rate", width=6, rank=11),
        _measured("grad", "grad_norm", width=5, rank=4),
        Column(title="time", width=5, rank=1, cell=lambda v: duration(v.seconds)),
        Column(title=PHASE_TITLE, width=len(PHASE_TITLE), rank=10, cell=_phase_split),
        Column(title="tok/s", width=5, rank=8, cell=_tokens_per_second),
        Column(title="ETA", width=6, rank=2, cell=lambda v: duration(v.eta), style="green"),
    ]
    return [c for c in candidates if c.rank <= 2 or c.cell(first).strip() not in ("", MISSING)]


def _measured(title: str, name: str, *, width: int, rank: int, style: str = "") -> Column:
    def cell(view: StepView) -> str:
        return short_number(metric(view.metrics, name))

    return Column(title=title, width=width, rank=rank, cell=cell, style=style)


def _fitting(columns: list[Column], width: int) -> list[Column]:
    """The columns that fit into `width` characters, the least wanted left out."""
    kept = list(columns)
    while _width(kept, gap=1) > width and max(column.rank for column in kept) > 0:
        kept.remove(max(kept, key=lambda column: column.rank))
    return kept


def _width(columns: Sequence[Column], *, gap: int) -> int:
    return sum(column.width for column in columns) + gap * (len(columns) - 1)


def _spread(view: StepView) -> str:
    spread = metric(view.metrics, "reward_std")
    return MISSING if spread is None else f"{'' if view.ascii_only else '±'}{short_number(spread)}"


def _trend(view: StepView) -> str:
    # Scaled to the whole run, so that the noise of ten steps does not look like progress.
    known = [reward for reward in view.rewards if reward is not None] or [0.0]
    return sparkline(view.rewards[-TREND:], bounds=(min(known), max(known)), ascii_only=view.ascii_only)


def _phase_split(view: StepView) -> str:
    total = sum(view.phases.values())
    if total <= 0:
        return MISSING
    return " ".join(f"{100 * view.phases.get(name, 0.0) / total:3.0f}" for name in PHASES)


def _tokens_per_second(view: StepView) -> str:
    tokens = metric(view.metrics, "num_tokens")
    return MISSING if tokens is None or view.seconds <= 0 else short_number(tokens / view.seconds)
