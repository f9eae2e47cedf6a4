"""The console of a run: a line per optimizer step, now and then a table of completions, and what it is doing meanwhile.

Plain lines instead of a live dashboard: they survive `tee`, `ssh`, `tmux` and a crash. Columns are chosen at the first
step: what the run does not measure has none, and where the width is too small some are left out, by their `priority`.

    with progress("loading Qwen/Qwen3-0.6B"):      # leaves the line "loading Qwen/Qwen3-0.6B: 12.3s"
    with live("sampling"):                         # leaves nothing
    with phases("generate"):                       # one of these, and adds to the seconds of that phase of a step

On a terminal and in a notebook, the phase and its seconds so far are a line that is rewritten until the phase is over.
It leaves the cursor at its start, so that what others print meanwhile overwrites it. Only the first process writes.
"""

from __future__ import annotations

import math
import os
import select
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from io import TextIOWrapper
from typing import Any, NamedTuple, TextIO

import torch
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars
from rich.console import Console as RichConsole
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from fused_grpo.errors import elide_lines, elide_middle, visible
from fused_grpo.trainer.common.contexts import contextmanager
from fused_grpo.trainer.common.formatting import MISSING, conversation, duration, message_text, percent, short_number
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.logging.run_log import metric

PIPED_WIDTH = 120
TREND, BARS = 10, "▁▂▃▄▅▆▇█"
HEADER_EVERY = 25
# Of a step, and what the live line says meanwhile. Fixed, because the first step may lack one: an engine that has just
# loaded the weights is not synced.
PHASES = {"generate": "sampling", "reward": "scoring", "train": "learning", "sync": "sending weights to the engine"}
PHASE_TITLE = "%gen rew tra syn"
PROMPT_CHARACTERS = 240
COMPLETION_CHARACTERS = 480
MAX_LINES = 12
NARROW = 72
DEFAULT_ROWS = 4
REFRESH, SLOW = 0.25, 1.0  # seconds

# There is one live line: phases of other threads, and those inside another phase, are not shown.
_line = threading.Lock()
_is_shown = threading.Event()
_drawing = threading.RLock()  # a line in the place of the live one: nothing is drawn between removing and printing


class Column(NamedTuple):
    """One column of the step lines. Priority 0 is always shown; of the others, the largest number is left out first."""

    title: str
    width: int
    priority: int
    style: str = ""
    metric: str = ""  # whose number it shows


COLUMNS = (
    Column("step", 4, 0, "bold"),
    Column("reward", 6, 0, "bold cyan", metric="reward"),
    Column("±std", 6, 6),
    Column("trend", TREND, 8, "cyan"),
    Column("len", 5, 3, metric="completions/mean_length"),
    Column("kl", 6, 5, metric="kl"),
    Column("entr", 5, 7, metric="entropy"),
    Column("clip", 5, 9),
    Column("lr", 6, 11, metric="learning_rate"),
    Column("grad", 5, 4, metric="grad_norm"),
    Column("time", 5, 1),
    Column(PHASE_TITLE, len(PHASE_TITLE), 10),
    Column("tok/s", 5, 8),
    Column("ETA", 6, 2, "green"),
)


class Console:
    """Writes the progress of a run; nothing at all where it is `quiet`, as on every process but the first."""

    def __init__(self, total_steps: int, *, quiet: bool = False, file: TextIO | None = None) -> None:
        self.total_steps = total_steps
        out = sys.stdout if file is None else file
        if isinstance(out, TextIOWrapper) and not quiet:
            with _may_be_lost():  # what a script has printed before is written now
                out.reconfigure(errors="backslashreplace")  # a character that the encoding lacks must not end a run
        # Lines of text in a notebook too: rich would make page elements of them, in an order of their own.
        self._rich = _Console(file=file, quiet=quiet, highlight=False, markup=False, emoji=False, force_jupyter=False)
        if out is None or not out.isatty():  # None: of a process without one
            self._rich.width = PIPED_WIDTH
        # Of all lines, however many there are.
        self._lines, self._warm_seconds = 0, 0.0
        self._range = math.inf, -math.inf
        self._rewards = deque[float | None](maxlen=TREND)
        self._columns: list[Column] = []

    def banner(self, lines: Mapping[str, str]) -> None:
        """The description of the run, as a framed list of names and values."""
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim")
        grid.add_column(overflow="fold")
        for name, value in lines.items():
            grid.add_row(Text(name), Text(visible(str(value))))
        self._rich.print(Panel(grid, title="fused-grpo", title_align="left", border_style="cyan", expand=False))

    def note(self, text: str) -> None:
        """A line of its own between the step lines."""
        self._rich.print(Text(visible(text, keep="\n"), style="yellow"), soft_wrap=True)

    def warn(self, text: str) -> None:
        """A warning with its fix, on as many lines as it takes."""
        self._rich.print(Text("warning: ", style="bold yellow") + Text(visible(text), style="yellow"))

    def step(self, step: int, metrics: Mapping[str, object]) -> None:
        """The line of one optimizer step, from its record in metrics.jsonl."""
        cells = self._cells(step, metrics)
        if not self._columns:
            self._columns = _fitting(cells, self._rich.width)
        if self._lines % HEADER_EVERY == 1:
            self._line([(column, column.title, "dim") for column in self._columns])
        self._line([(column, cells[column.title], column.style) for column in self._columns])

    def completions(self, step: int, rows: Sequence[Mapping[str, object]], limit: int | None = None) -> None:
        """The best and the worst of `rows` (as for `RunLog.log_rollouts`), `limit` in all; None: 4.

        Of different prompts, as far as there are any. Long texts are elided in the middle; on a narrow terminal they
        are below each other instead of in a table.
        """
        chosen = best_and_worst(rows, DEFAULT_ROWS if limit is None else limit)
        title = f"step {step}: {len(chosen)} of {len(rows)} completions, the best first"
        self._rich.print(Text(title, style="italic"), soft_wrap=True)
        table = Table(show_lines=True)
        table.add_column("reward", justify="right", style="bold")
        table.add_column("adv.", justify="right")
        table.add_column("prompt", ratio=2, overflow="fold")
        table.add_column("completion", ratio=3, overflow="fold")
        for row in chosen:
            reward, value = short_number(metric(row, "reward")), metric(row, "advantage")
            advantage = f"{'+' * ((value or 0.0) > 0)}{short_number(value)}"
            prompt, completion = _texts(row)
            table.add_row(reward, advantage, prompt, completion)
            if self._rich.width < NARROW:
                heading = Text(f"reward {reward}, advantage {advantage}", style="bold")
                self._rich.print(heading, prompt, completion, "", sep="\n")
        if self._rich.width >= NARROW:
            self._rich.print(table)

    def _cells(self, step: int, metrics: Mapping[str, object]) -> dict[str, str]:
        # Without the parts of a phase, such as time/reward/accuracy.
        phases = [metric(metrics, f"time/{name}") or 0.0 for name in PHASES]
        total = sum(phases)
        seconds = metric(metrics, "step_time") or total
        self._rewards.append(reward := metric(metrics, "reward"))
        if reward is not None:
            self._range = min(self._range[0], reward), max(self._range[1], reward)
        # Compilation and cold caches make the first step slow: a mean with it would be too high.
        self._warm_seconds += seconds if self._lines else 0.0
        self._lines += 1
        warm = self._warm_seconds / (self._lines - 1) if self._lines > 1 else None
        shares = (f"{100 * spent / total:3.0f}" for spent in phases)
        tokens, spread = metric(metrics, "completion_tokens"), metric(metrics, "reward_std")
        clipped = "cispo_clip_ratio" if "cispo_clip_ratio" in metrics else "clip_ratio/region_mean"
        cells = {column.title: short_number(metric(metrics, column.metric)) for column in COLUMNS} | {
            "step": f"{step}/{self.total_steps}".rjust(2 * len(str(self.total_steps)) + 1),
            "±std": MISSING if spread is None else f"±{short_number(spread)}",
            "trend": sparkline(self._rewards, self._range),
            "clip": percent(metric(metrics, clipped)),
            "time": duration(seconds),
            PHASE_TITLE: " ".join(shares) if total > 0 else MISSING,
            "tok/s": short_number(tokens / seconds if tokens is not None and seconds > 0 else None),
            "ETA": duration(None if warm is None else warm * (self.total_steps - step)),
        }
        if not self._rich.encoding.lower().startswith("utf"):
            cells |= {"±std": cells["±std"].strip("±"), "trend": MISSING}
        return cells

    def _line(self, cells: Sequence[tuple[Column, str, str]]) -> None:
        gap = "  " if _width(self._columns, gap=2) <= self._rich.width else " "
        texts = (Text(text.rjust(column.width), style=style) for column, text, style in cells)
        self._rich.print(Text(gap).join(texts), soft_wrap=True)


class _Console(RichConsole):
    """Prints in the place of a live line."""

    def print(self, *objects: Any, **options: Any) -> None:
        with _drawing, _may_be_lost():
            clear_line()
            super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        """As any other output that is lost; rich would end the process, with the steps since the last checkpoint."""
        raise


@contextmanager
def _may_be_lost() -> Iterator[None]:
    """A terminal that is gone, a full disk or a broken pipe ends no run: its files have all.

    A scheduler stops the `tee` behind a run with the same signal, and the run has yet to save.
    """
    try:
        yield
    except OSError as error:
        warn_once(f"standard output cannot be written ({error.strerror}): the run goes on without these lines")


def _leave_ended_reader() -> None:
    """Standard output to nowhere once its reader has ended: what a reward function prints would raise otherwise."""
    with suppress(OSError, TypeError, ValueError):  # none, of a notebook, closed
        output = select.poll()
        output.register(sys.stdout, 0)  # errors alone
        if output.poll(0):
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())
            warn_once("the reader of standard output has ended: the run goes on without these lines")


def best_and_worst(rows: Sequence[Mapping[str, object]], limit: int) -> list[Mapping[str, object]]:
    """`limit` of the rows by falling reward: the best half and the worst half, of as many prompts as there are."""
    # Of equal rewards, the advantage says how far a completion is from its group.
    scored = sorted(
        (row for row in rows if metric(row, "reward") is not None),
        key=lambda row: (metric(row, "reward") or 0.0, metric(row, "advantage") or 0.0),
        reverse=True,
    )
    prompts = [message_text(row.get("prompt", "")) for row in scored]
    count = min(limit, len(scored))
    best = _varied(list(range(len(scored))), prompts, count - count // 2)
    rest = [number for number in reversed(range(len(scored))) if number not in best]
    return [scored[number] for number in sorted(best + _varied(rest, prompts, count // 2))]


def _varied(numbers: list[int], prompts: Sequence[str], count: int) -> list[int]:
    """The first `count` of the numbers, those that repeat the prompt of an earlier one last."""
    first = {prompts[number]: number for number in reversed(numbers)}
    return sorted(numbers, key=lambda number: first[prompts[number]] != number)[:count]


def _texts(row: Mapping[str, object]) -> tuple[Text, Text]:
    prompt = Text(_sample(message_text(row.get("prompt", "")), PROMPT_CHARACTERS), style="dim")
    said = row.get("messages", row.get("completion", ""))
    parts = conversation(said, name="")
    # The role of a single message is known: the assistant.
    text = parts[0][1] if len(parts) == 1 else message_text(said)
    completion = Text(_sample(text, COMPLETION_CHARACTERS))
    if row.get("finish_reason") == "length":
        completion.append(" [cut at the length limit]", style="yellow")
    return prompt, completion


def _sample(text: str, limit: int) -> str:
    return elide_lines(visible(elide_middle(text, limit), keep="\n"), MAX_LINES)


def _fitting(cells: Mapping[str, str], width: int) -> list[Column]:
    """The columns that were measured at the first step and that fit into `width` characters."""
    measured = (
        column for column in COLUMNS if column.priority <= 2 or cells[column.title].strip() not in ("", MISSING)
    )
    kept = [column._replace(width=max(column.width, len(cells[column.title]))) for column in measured]
    while _width(kept, gap=1) > width and max(column.priority for column in kept) > 0:
        kept.remove(max(kept, key=lambda column: column.priority))
    return kept


def _width(columns: Sequence[Column], *, gap: int) -> int:
    return sum(column.width for column in columns) + gap * (len(columns) - 1)


def sparkline(values: Iterable[float | None], ends: tuple[float, float]) -> str:
    """One character for each value; a blank for None.

    The heights are scaled to `ends`, the least and the greatest of all values there were, so that the noise of the last
    ones does not look like progress.
    """
    low, high = ends
    share = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if value is None else BARS[round((value - low) * share)] for value in values)


@contextmanager
def progress(text: str, *, bars: bool = False) -> Iterator[None]:
    """A phase that is worth a line of its own; `bars`: a library draws some, so a terminal gets plain lines too."""
    if not is_first_process():
        yield
        return
    start = time.perf_counter()
    with ExitStack() as shown:
        if bars or not _rewrites_lines():
            begun = threading.Timer(SLOW, _say, [f"{visible(text)} ..."])
            begun.daemon = True
            begun.start()
            shown.callback(begun.cancel)
        else:
            shown.enter_context(live(text))
        yield
    if (seconds := time.perf_counter() - start) >= SLOW:
        _say(f"{visible(text)}: {duration(seconds)}")


def _say(line: str) -> None:
    with _drawing, _may_be_lost():
        clear_line()
        print(line, flush=True)


@contextmanager
def live(text: str) -> Iterator[None]:
    """A phase that a terminal or a notebook shows with its seconds while it lasts."""
    if not (_rewrites_lines() and is_first_process() and _line.acquire(blocking=False)):
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_rewrite, args=(visible(text), over), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        with _may_be_lost():
            clear_line()
        _line.release()


@contextmanager
def without_bars() -> Iterator[None]:
    """transformers draws no bar meanwhile: a notebook has standard error in blocks of its own, between our lines."""
    are_off, are_hub_bars_off = not is_progress_bar_enabled(), are_progress_bars_disabled()
    if not are_off:
        disable_progress_bar()  # also those of the hub
    try:
        yield
    finally:
        if not are_off:
            enable_progress_bar()
            if are_hub_bars_off:
                disable_progress_bars()


def clear_line() -> None:
    """Remove the live line, if there is one, before another line is printed in its place."""
    if _is_shown.is_set():
        _is_shown.clear()
        _overwrite("")


def _rewrite(text: str, over: threading.Event) -> None:
    start = time.perf_counter()
    while not over.wait(REFRESH):
        with _drawing, _may_be_lost():
            _is_shown.set()
            _overwrite(f"{text} ... {duration(time.perf_counter() - start)}")


def _overwrite(line: str) -> None:
    """By a line of the terminal's width: notebooks ignore the escape sequence that would clear it."""
    width = shutil.get_terminal_size().columns - 1
    sys.stdout.write(f"\r{line[:width]:{width}}\r")
    sys.stdout.flush()


def _rewrites_lines() -> bool:
    """Whether standard output is a terminal, or a notebook, which says that it is none."""
    return (sys.stdout is not None and sys.stdout.isatty()) or type(sys.stdout).__module__ == "ipykernel.iostream"


def is_first_process() -> bool:
    """By the launcher's variable, because there may be no process group yet."""
    return os.environ.get("RANK", "0") == "0"


class Phases:
    """Seconds of each phase of a step: `with phases("generate"): ...`.

    Long phases of the `first` step leave a line: it compiles kernels and fills caches.
    """

    def __init__(self, *, first: bool = False) -> None:
        self.seconds: dict[str, float] = {}
        self.first, self.start = first, time.perf_counter()

    def so_far(self) -> float:
        """Seconds of the step, those between its phases as well: waiting for other ranks, waking the engine."""
        return time.perf_counter() - self.start

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        _leave_ended_reader()
        start, doing = time.perf_counter(), PHASES[name]
        if self.first:
            # On a GPU, the first backward pass waits for the compiler.
            doing = f"first step: {doing}{' (compiles kernels)' * (name == 'train' and torch.cuda.is_available())}"
        try:
            with progress(doing) if self.first else live(doing):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
