"""The benchmarks' own machinery: figures that get published are those measured, and nobody is left out unsaid."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fused_grpo.bench import accuracy, accuracy_page, peers, turns
from fused_grpo.bench.work import Work

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def published() -> tuple[str, Path]:
    """The committed page, and the raw file it names."""
    page = (ROOT / "docs" / "accuracy.md").read_text()
    return page, ROOT / re.search(r"Made by bench/accuracy.py from (\S+);", page)[1]


def test_the_accuracy_page_says_what_its_raw_file_says(published):
    page, raw = published
    assert page == accuracy_page.render(raw), "fix: python bench/accuracy.py --render " + str(raw)


def test_published_logprobs_are_within_1e_5_and_no_peer_of_a_cpu_is_missing(published):
    for problem in json.loads(published[1].read_text())["problems"]:
        rows = {row["name"]: row for row in problem["results"]}
        measured = {name for name, row in rows.items() if "missing" not in row}
        assert {"full logits", "TRL", "TRL, cast_lm_head_to_fp32"} <= measured
        assert any(name.startswith("Liger") for name in measured)
        assert rows.keys() - measured <= {"CCE", "CCE, exact", "verl", "quack"}
        assert rows["fused-grpo"]["logprobs"]["max"] <= 1e-5
        assert rows["fused-grpo"]["hidden"]["relative"] <= 1.001 * problem["rounding"]["hidden"]["relative"]


def test_a_missing_peer_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl.kernels", None)
    trl = peers.named("TRL")
    assert trl.logprobs is None
    assert trl.missing.endswith("fix: pip install trl==1.16.0")
    row = {"name": trl.name, "version": None, "setting": trl.setting, "missing": trl.missing}
    assert "not measured" in accuracy_page.line(row["name"], row)
    assert "pip install trl==1.16.0" in accuracy_page.setting(row)


def test_contenders_take_turns_and_each_round_starts_with_the_next():
    ran: list[str] = []
    contenders = {name: (lambda name=name: ran.append(name)) for name in ("gemms", "ours", "trl")}
    seconds = turns.take_turns(contenders, rounds=2)
    assert ran == ["gemms", "ours", "trl", "ours", "trl", "gemms"]
    assert {name: len(values) for name, values in seconds.items()} == {"gemms": 2, "ours": 2, "trl": 2}


def test_a_quotient_is_of_medians():
    assert turns.quotient({"trl": [1.0, 6.0, 50.0], "ours": [1.0, 2.0, 5.0]}, "trl", "ours") == 3.0


def test_accuracy_measures_a_small_problem_and_stops_at_a_wrong_contender():
    work = Work(kind="logprobs", head="tiny", tokens=64, dtype="bfloat16")
    rows = [peers.named("fused-grpo"), accuracy.frozen(), accuracy.full_fp32(), accuracy.liger_grpo()]
    found = accuracy.measure_one(work, 0, [*rows, peers.named("CCE")])
    ours, frozen, fp32, liger, cce = found["results"]
    assert ours["logprobs"]["max"] <= 1e-5 <= liger["logprobs"]["max"] <= 0.15
    assert ours["hidden"]["worst_row"] <= 0.005 < fp32["hidden"]["worst_row"]
    assert frozen["weight"] is None
    assert cce["missing"] == "has kernels for GPUs alone"
    assert 10 < found["tokens_above_99_percent"] < 40
    text = accuracy_page.table({**work.described(), **found})
    assert text.startswith("## N=64 in 8 sequences, D=128, V=3001, bfloat16")
    wrong = replace(rows[0], logprobs=lambda hidden, weight, targets, work: hidden.sum(-1).float())
    with pytest.raises(AssertionError, match="from fused-grpo"):
        accuracy.measure_one(work, 0, [wrong])
