"""The benchmarks' own machinery: figures that get published are those measured, and nobody is left out unsaid."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def bench(monkeypatch):
    """Import a module of bench/, which is no package."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    return importlib.import_module


@pytest.fixture
def accuracy() -> tuple[str, Path]:
    """The committed page, and the raw file it names."""
    page = (ROOT / "docs" / "accuracy.md").read_text()
    return page, ROOT / re.search(r"Made by bench/accuracy.py from (\S+);", page)[1]


def test_the_accuracy_page_says_what_its_raw_file_says(bench, accuracy):
    page, raw = accuracy
    assert page == bench("accuracy_page").render(raw), "fix: python bench/accuracy.py --render " + str(raw)


def test_published_logprobs_are_within_1e_5_and_no_peer_is_missing(accuracy):
    for problem in json.loads(accuracy[1].read_text())["problems"]:
        rows = {row["name"]: row for row in problem["results"]}
        assert {"full logits", "TRL", "Liger"} <= set(rows)
        assert not [row["missing"] for row in rows.values() if "missing" in row]
        assert rows["fused-grpo"]["logprobs"]["max"] <= 1e-5
        assert rows["fused-grpo"]["hidden"]["relative"] <= 1.001 * problem["rounding"]["hidden"]["relative"]


def test_a_missing_peer_is_named_with_the_command_that_installs_it(bench, accuracy, monkeypatch):
    monkeypatch.setitem(sys.modules, "trl.kernels", None)
    trl = bench("peers").trl()
    assert trl.run is None
    assert trl.missing.endswith("fix: pip install trl==1.16.0")
    row = {"name": trl.name, "version": None, "setting": trl.setting, "missing": trl.missing}
    page = bench("accuracy_page")
    assert "not installed" in page.line(row["name"], row)
    assert "pip install trl==1.16.0" in page.setting(row)


def test_contenders_take_turns_and_each_round_starts_with_the_next(bench):
    ran: list[str] = []

    def pedantic(target, *, setup, rounds):
        for _ in range(rounds):
            setup()
            target()

    stand_in = SimpleNamespace(pedantic=pedantic, stats=SimpleNamespace(stats=SimpleNamespace(data=[1.0] * 2)))
    contenders = {name: (lambda name=name: ran.append(name)) for name in ("gemms", "ours", "trl")}
    seconds = bench("turns").take_turns(stand_in, contenders, timed="ours", rounds=2)
    assert ran == ["gemms", "ours", "trl", "ours", "trl", "gemms"]
    assert {name: len(values) for name, values in seconds.items()} == {"gemms": 2, "ours": 2, "trl": 2}


def test_a_spread_is_relative_to_the_median(bench):
    assert bench("turns").summary({"ours": [1.0, 2.0, 5.0]}) == {
        "median_seconds": {"ours": 2.0},
        "spread": {"ours": 2.0},
    }
