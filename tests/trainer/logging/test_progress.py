"""Progress: plain lines in a file, one live line on a terminal, nothing for what is quick or on other processes."""

import io
import re
import time
from contextlib import redirect_stdout, suppress

import pytest

from fused_grpo.trainer.logging import console as module
from fused_grpo.trainer.logging.console import CLEAR, Console, Phases, live, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(module, "SLOW", 0.05)
    monkeypatch.setattr(module, "REFRESH", 0.02)


def test_a_file_gets_a_line_at_the_start_and_the_end_of_what_is_slow():
    with redirect_stdout(io.StringIO()) as out:
        with progress("loading\x1b it"):
            time.sleep(0.1)
        with progress("quick"):
            pass
        with live("never in a file"):
            time.sleep(0.06)
    assert re.fullmatch(r"loading\\x1b it \.\.\.\nloading\\x1b it: 0\.\ds\n", out.getvalue())


def test_what_fails_has_no_end():
    with redirect_stdout(io.StringIO()) as out, suppress(ValueError), progress("starting"):
        time.sleep(0.1)
        raise ValueError
    assert out.getvalue() == "starting ...\n"


def test_a_terminal_gets_one_live_line_that_others_replace(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    with redirect_stdout(Terminal()) as out, live("evaluating with a long name"):
        time.sleep(0.05)
        with progress("inside"):
            time.sleep(0.06)
        Console(3).note("a note")
    shown = out.getvalue()
    assert f"{CLEAR}evaluating with a l\r" in shown
    assert f"{CLEAR}inside: 0.1s\n" in shown
    assert re.search(r"\x1b\[2K(\x1b\[33m)?a note", shown)
    assert shown.endswith(CLEAR)
    assert not module._line.locked()


def test_other_processes_show_nothing(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with redirect_stdout(Terminal()) as out, progress("loading"), live("more"):
        time.sleep(0.06)
    assert out.getvalue() == ""


def test_the_first_step_leaves_lines():
    for first in (True, False):
        with redirect_stdout(io.StringIO()) as out, Phases(first=first)("generate"):
            time.sleep(0.1)
        line = r"first step: sampling"
        assert re.fullmatch(rf"{line} \.\.\.\n{line}: 0\.\ds\n" if first else "", out.getvalue())
