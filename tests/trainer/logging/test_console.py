"""The console: lines that fit, an estimate without the first step, and model output that cannot touch the terminal."""

import errno
import io
import math
import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from fused_grpo.errors import elide_middle, visible
from fused_grpo.trainer.cli.main import main
from fused_grpo.trainer.common.formatting import duration, short_number
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.logging import console as console_module
from fused_grpo.trainer.logging.console import COLUMNS, Console, best_and_worst, live, progress, sparkline

# Of which time/reward/digits is a part.
PHASES = {"time/generate": 6.0, "time/reward": 1.0, "time/reward/digits": 0.5, "time/train": 2.5, "time/sync": 0.5}
FULL = {
    "reward": 0.512,
    "reward_std": 0.24,
    "completions/mean_length": 143.0,
    "kl": 0.0012,
    "entropy": 0.83,
    "clip_ratio/region_mean": 0.0123,
    "learning_rate": 1e-6,
    "grad_norm": 0.42,
    "completion_tokens": 31000.0,
    "step_time": 10.0,
}
HOSTILE = "<script>alert(1)</script>[bold]x[/bold] \x1b[31m\x1b]0;owned\x07 \u202egnp \x9b2J [/nothing]"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    return Terminal()


def lines_of(*records: dict[str, float], total: int = 200, phases: dict[str, float] = PHASES) -> list[str]:
    out = io.StringIO()
    console = Console(total, file=out)
    for step, record in enumerate(records, start=1):
        console.step(step, record | phases)
    return out.getvalue().splitlines()


def test_a_full_step_line_fits_120_columns_and_says_everything() -> None:
    header, line = lines_of(FULL, total=1000)
    assert len(line) == len(header) <= 120
    for text in ("1/1000", "0.512", "±0.240", "143", "0.001", "0.830", "1.2%", "1e-6", "0.420", "10.0s", "3.10k"):
        assert text in line
    assert "60  10  25   5" in line
    assert header.index("%gen") + len("%gen") == line.index(" 60") + len(" 60")


def test_what_a_run_does_not_measure_takes_no_room() -> None:
    header, line = lines_of({"reward": 0.5, "step_time": 2.0}, phases={})
    assert header.split() == ["step", "reward", "trend", "time", "ETA"]
    assert line.split()[:2] == ["1/200", "0.500"]


def test_the_share_of_clipped_tokens_is_that_of_the_loss() -> None:
    for name in ("clip_ratio/region_mean", "cispo_clip_ratio"):
        assert "25.0%" in lines_of({"reward": 0.5, "step_time": 2.0, name: 0.25}, phases={})[1]


def test_a_metric_that_goes_missing_or_mad_leaves_its_column_in_place() -> None:
    header, first, second = lines_of(FULL, FULL | {"kl": math.nan, "reward": math.nan})
    assert len(first) == len(second) == len(header)
    assert second.split()[1] == "-"


def test_the_first_step_without_a_sync_still_gets_a_sync_column() -> None:
    out = io.StringIO()
    console = Console(9, file=out)
    console.step(1, FULL | {"time/generate": 3.0, "time/train": 1.0})
    console.step(2, FULL | {"time/sync": 1.0, "time/generate": 2.0, "time/train": 1.0})
    assert " 75   0  25   0" in out.getvalue()
    assert " 50   0  25  25" in out.getvalue()


def test_the_estimate_ignores_the_first_step() -> None:
    slow, fast = FULL | {"step_time": 500.0}, FULL | {"step_time": 2.0}
    _, first, second, third = lines_of(slow, fast, fast | {"step_time": 4.0}, total=23)
    assert first.split()[-1] == "-"
    assert second.split()[-1] == "42.0s"
    assert third.split()[-1] == "1m00s"


def test_a_narrow_terminal_gets_fewer_columns_and_no_wrapped_lines(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    console = Console(200, file=terminal)
    console.step(1, FULL | PHASES)
    header, line = (visible(text, keep="\x1b") for text in terminal.getvalue().splitlines())
    assert "reward" in header
    assert "ETA" in header
    assert "lr" not in header.split()
    assert len(line.replace("\x1b[1m", "").replace("\x1b[0m", "")) <= 60


def test_a_terminal_gets_colour_and_a_file_does_not(terminal: Terminal) -> None:
    Console(5, file=terminal).step(1, FULL | PHASES)
    assert "\x1b[" in terminal.getvalue()
    assert "\x1b" not in "".join(lines_of(FULL))


def test_hostile_completions_cannot_reach_the_terminal(terminal: Terminal) -> None:
    terminal_free = io.StringIO()
    rows = [{"prompt": HOSTILE, "completion": HOSTILE, "reward": 1.0, "finish_reason": "length"}]
    console = Console(5, file=terminal_free)
    console.completions(3, rows, limit=4)
    console.note(HOSTILE)
    console.banner({"model [red]": HOSTILE})
    shown = terminal_free.getvalue()
    assert not set(shown) & set("\x1b\x07\x9b\u202e")
    assert "[bold]x[/bold]" in shown
    assert r"\x1b]0;owned\x07" in shown
    Console(5, file=terminal).completions(3, rows, limit=4)
    assert "\x1b]0" not in terminal.getvalue()


def test_completions_keep_to_the_limit_and_show_both_ends_of_long_ones() -> None:
    out = io.StringIO()
    rows = [{"prompt": "p", "completion": "START" + "x" * 5000 + "END", "reward": 0.5, "finish_reason": "length"}]
    Console(5, file=out).completions(3, rows * 9, limit=2)
    shown = out.getvalue()
    assert "step 3: 2 of 9 completions" in shown
    assert "adv." in shown
    assert shown.count("START") == shown.count("END") == 2
    assert shown.count("cut at the length limit") == 2
    assert len(shown) < 4000


def test_the_table_has_the_best_and_the_worst_of_different_prompts() -> None:
    rows = [
        {"prompt": str(prompt), "completion": "", "reward": reward}
        for prompt, rewards in enumerate([(1.0, 1.0, 0.0), (0.9, 0.2, 0.1), (0.8, 0.3, None)])
        for reward in rewards
    ]
    chosen = [(row["prompt"], row["reward"]) for row in best_and_worst(rows, 4)]
    assert chosen == [("0", 1.0), ("1", 0.9), ("1", 0.1), ("0", 0.0)]
    assert [row["reward"] for row in best_and_worst(rows[:3], 5)] == [1.0, 1.0, 0.0]
    assert best_and_worst(rows, 0) == best_and_worst([{"reward": None}], 4) == []


def test_a_narrow_terminal_gets_no_table(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    row = {"prompt": "what?", "completion": "one\ntwo", "reward": 1.0, "advantage": 0.7, "finish_reason": "length"}
    Console(5, file=terminal).completions(1, [row])
    shown = terminal.getvalue()
    assert "reward 1.00, advantage +0.700" in shown
    assert "┃" not in shown
    assert "cut at the length limit" in shown


def test_a_completion_of_a_thousand_lines_takes_a_dozen() -> None:
    out = io.StringIO()
    messages = [{"role": "assistant", "content": "FIRST" + "\n" * 300 + "LAST"}]
    prompt = [{"role": "user", "content": "hello"}]
    Console(5, file=out).completions(1, [{"prompt": prompt, "completion": messages, "reward": 1.0}])
    assert "user: hello" in out.getvalue()
    assert "assistant" not in out.getvalue()
    assert "lines…]" in out.getvalue()
    assert out.getvalue().count("\n") < 25


def test_an_output_without_unicode_does_not_end_the_run() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    console = Console(5, file=out)
    console.banner({"model": "modèle"})
    console.step(1, FULL | PHASES)
    console.completions(1, [{"prompt": "é", "completion": "日本", "reward": 1.0}], limit=1)
    out.flush()
    assert rb"\u65e5\u672c" in raw.getvalue()


class Lost(Terminal):
    """A terminal that has been closed, a disk that is full, or a reader that has left."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def write(self, text: str) -> int:
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EPIPE])
def test_an_output_that_is_lost_ends_no_run(monkeypatch, caplog, number) -> None:
    warn_once.cache_clear()
    monkeypatch.setattr(console_module, "REFRESH", 0.01)
    monkeypatch.setattr(console_module, "SLOW", 0.0)
    monkeypatch.setattr("sys.stdout", Lost(number))
    console = Console(5)
    console.step(1, FULL | PHASES)
    console.note("n")
    console.completions(1, [{"prompt": "p", "completion": "c", "reward": 1.0}], limit=1)
    with progress("loading"), live("sampling"):
        time.sleep(0.1)
    with progress("loading", bars=True):
        time.sleep(0.1)
    assert [record.message.partition(" (")[0] for record in caplog.records] == ["standard output cannot be written"]


def test_what_a_script_has_printed_before_is_lost_with_the_rest(monkeypatch, caplog) -> None:
    warn_once.cache_clear()
    with suppress(OSError), open("/dev/full", "w") as out:
        out.write("loading")
        monkeypatch.setattr("sys.stdout", out)
        Console(5).step(1, FULL | PHASES)
        monkeypatch.undo()
    assert [record.message.partition(" (")[0] for record in caplog.records] == ["standard output cannot be written"]


def test_a_run_whose_tee_has_ended_saves_and_what_rewards_print_is_lost(monkeypatch, make_trainer, caplog) -> None:
    warn_once.cache_clear()
    reader, writer = os.pipe()
    calls = []

    def printing(completions, **columns) -> list[float]:
        if not calls:
            os.close(reader)  # before the console writes a line
        calls.append("")
        return [float(index) for index in range(len(completions))]

    def printing_too(completions, **columns) -> list[None]:
        if len(calls) > 1:
            print("scored", flush=True)
        return [None for _ in completions]

    with open(writer, "w") as out:
        monkeypatch.setattr("sys.stdout", out)
        result = make_trainer([printing, printing_too]).train()
        monkeypatch.undo()
    assert len(calls) == 3
    assert (Path(result.report).parent / "final" / "model.safetensors").exists()
    assert "the reader of standard output has ended: the run goes on without these lines" in caplog.messages


def test_a_process_without_standard_output_runs(monkeypatch, make_trainer) -> None:
    monkeypatch.setattr("sys.stdout", None)
    assert make_trainer(log_completions=True).train().steps == 3
    assert main(["rewards"]) is None


@pytest.mark.parametrize(("rows", "shown"), [(None, True), (1, True), (0, False)])
def test_the_table_of_completions_has_no_rows_where_none_are_wanted(make_trainer, capsys, rows, shown) -> None:
    make_trainer(log_completions=True, num_completions_to_print=rows, max_steps=1).train()
    assert ("completions, the best first" in capsys.readouterr().out) is shown


def test_quiet_writes_nothing() -> None:
    out = io.StringIO()
    console = Console(5, quiet=True, file=out)
    console.banner({"a": "b"})
    console.step(1, FULL | PHASES)
    console.completions(1, [{"prompt": "p", "completion": "c", "reward": 1.0}], limit=1)
    console.note("n")
    assert out.getvalue() == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.5123, "0.512"), (-1.26, "-1.26"), (12.34, "12.3"), (999.4, "999"), (999.6, "1.00k"), (8e-7, "8e-7"),
     (123456, "123k"), (2.5e6, "2.50M"), (7e9, "7.00G"), (2e12, "2.00T"), (None, "-"), (math.inf, "inf")],
)  # fmt: skip
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert short_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0s"), (59.9, "59.9s"), (59.96, "1m00s"), (3599.7, "1h00m"), (7620, "2h07m"), (86399, "1d00h"),
     (273600, "3d04h"), (None, "-"), (math.inf, "-")],
)  # fmt: skip
def test_durations_never_show_sixty_seconds_or_twenty_four_hours(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_a_sparkline_is_scaled_to_all_values_and_leaves_gaps() -> None:
    assert sparkline([0.0, None, 1.0, 1.0], (0.0, 1.0)) == "▁ ██"
    assert sparkline([0.0, None, 1.0], (-1.0, 1.0)) == "▅ █"
    assert sparkline([0.3, 0.3], (0.3, 0.3)) == "▁▁"
    assert sparkline([None], (math.inf, -math.inf)) == " "
    rewards = [-1.0, None, *[0.0] * 20, 1.0]
    assert f"{'▅' * 9}█" in lines_of(*({"reward": reward, "step_time": 2.0} for reward in rewards))[-1]


def test_a_line_looks_at_as_much_late_in_a_run_as_early() -> None:
    console = Console(3000, file=io.StringIO())
    for step in range(1, 1001):
        console.step(step, {"reward": step / 7, "step_time": 90.0 if step == 1 else 2.0})
    assert max(len(kept) for kept in vars(console).values() if hasattr(kept, "__len__")) <= len(COLUMNS)
    console._rich.file.truncate(0)
    console.step(1001, {"reward": 0.0, "step_time": 2.0})
    assert console._rich.file.getvalue().split()[-1] == duration(2.0 * (3000 - 1001))


def test_text_that_is_harmless_is_shown_as_it_is() -> None:
    assert visible("naïve 日本語\u3000x 🙂 \\n") == "naïve 日本語\u3000x 🙂 \\n"
    assert elide_middle("short", 5) == "short"
    assert elide_middle("abcdefghij", 4) == "ab […6 characters…] ij"
