"""Progress: plain lines in a file, one live line on a terminal or in a notebook, nothing for what is quick or on other
processes."""

import io
import re
import time
from contextlib import redirect_stdout, suppress

import huggingface_hub.utils as hub_bars
import pytest
import transformers.utils.logging as transformers_bars
from screen import screen

from fused_grpo.trainer.logging import console as module
from fused_grpo.trainer.logging.console import Console, Phases, live, progress, without_bars


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Notebook(io.StringIO):
    """As far as it is recognised."""


Notebook.__module__ = "ipykernel.iostream"


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


@pytest.mark.parametrize("out", [Terminal, Notebook])
def test_a_terminal_gets_one_live_line_that_others_replace(monkeypatch, out):
    monkeypatch.setenv("COLUMNS", "20")
    with redirect_stdout(out()) as out, live("evaluating with a long name"):
        time.sleep(0.05)
        with progress("inside"):
            time.sleep(0.06)
        assert screen(out.getvalue()) == ["inside: 0.1s", ""]
        time.sleep(0.05)
        assert screen(out.getvalue()) == ["inside: 0.1s", "evaluating with a l"]
        Console(3).note("a note")
        time.sleep(0.05)
    assert screen(out.getvalue()) == ["inside: 0.1s", "a note", ""]
    assert not module._line.locked()


def test_a_line_is_whole_however_often_the_live_one_is_drawn(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr(module, "REFRESH", 1e-6)
    clear = module.clear_line

    def slowly() -> None:
        clear()
        time.sleep(0.002)

    monkeypatch.setattr(module, "clear_line", slowly)
    with redirect_stdout(Terminal()) as out, live("a live line of a long name"):
        for _ in range(20):
            Console(3).note("a note")
    assert screen(out.getvalue()) == ["a note"] * 20 + [""]


def test_a_notebook_gets_no_width_from_where_its_server_runs(monkeypatch):
    """And a setting that asks for colours, as Jupyter's does, makes it no terminal."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with redirect_stdout(Notebook()) as out:
        Console(3).warn("word " * 22)
    assert screen(out.getvalue()) == ["warning: " + "word " * 21 + "word", ""]


@pytest.mark.parametrize("enable", [transformers_bars.enable_progress_bar, transformers_bars.disable_progress_bar])
@pytest.mark.parametrize("enable_hub", [hub_bars.enable_progress_bars, hub_bars.disable_progress_bars])
def test_bars_are_off_meanwhile_and_as_they_were_afterwards(enable, enable_hub):
    were = transformers_bars.is_progress_bar_enabled()
    try:
        enable()
        enable_hub()
        before = bars()
        with without_bars():
            assert transformers_bars.is_progress_bar_enabled() is False
        assert bars() == before
    finally:
        (transformers_bars.enable_progress_bar if were else transformers_bars.disable_progress_bar)()


def bars() -> tuple[bool, bool]:
    return transformers_bars.is_progress_bar_enabled(), hub_bars.are_progress_bars_disabled()


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
