"""Errors against fp64: the published ones, and the measurement of a small problem."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fused_grpo.bench import accuracy, pages, raw_file, stale_rollouts
from fused_grpo.bench.heads import peers
from fused_grpo.bench.heads.work import Work
from fused_grpo.errors import DataError

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"


def test_published_logprobs_are_within_1e_5_with_all_peers_of_a_cpu():
    raw = DOCS / re.search(r"figures: accuracy from (\S+) ", (DOCS / "accuracy.md").read_text())[1]
    for problem in json.loads(raw.read_text())["problems"]:
        rows = {row["name"]: row for row in problem["results"]}
        measured = {name for name, row in rows.items() if "missing" not in row}
        assert {"full logits", "TRL", "TRL, cast_lm_head_to_fp32"} <= measured
        assert any(name.startswith("Liger") for name in measured)
        assert rows.keys() - measured <= {"CCE", "CCE, exact", "verl", "quack"}
        assert rows["fused-grpo"]["logprobs"]["max"] <= 1e-5
        assert rows["fused-grpo"]["hidden"]["relative"] <= 1.001 * problem["rounding"]["hidden"]["relative"]


def test_a_missing_peer_has_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl.kernels", None)
    trl = peers.named("TRL")
    assert trl.logprobs is None
    assert trl.missing.endswith("fix: pip install trl==1.16.0")
    row = {"name": trl.name, "version": None, "setting": trl.setting, "missing": trl.missing}
    assert pages.error_cells(row)[0] == "not measured"
    assert "pip install trl==1.16.0" in pages.setting_line(row)


def test_accuracy_stops_at_a_wrong_implementation_of_a_small_problem():
    work = Work(kind="logprobs", head="tiny", tokens=64, dtype="bfloat16")
    rows = [peers.named("fused-grpo"), accuracy.frozen(), accuracy.full_fp32(), accuracy.liger_grpo()]
    measured = accuracy.measure_one(work, 0, [*rows, peers.named("CCE")])
    ours, frozen, fp32, liger, cce = measured["results"]
    assert ours["logprobs"]["max"] <= 1e-5 <= liger["logprobs"]["max"] <= 0.15
    assert ours["hidden"]["worst_row"] <= 0.005 < fp32["hidden"]["worst_row"]
    assert frozen["weight"] is None
    assert cce["missing"] == "has kernels for GPUs only"
    assert 10 < measured["tokens_above_99_percent"] < 40
    text = pages.accuracy_table({**work.described(), **measured})
    assert text.startswith("## N=64 in 8 sequences, D=128, V=3001, bfloat16")
    wrong = replace(rows[0], logprobs=lambda hidden, weight, targets, work: hidden.sum(-1).float())
    with pytest.raises(AssertionError, match="from fused-grpo"):
        accuracy.measure_one(work, 0, [wrong])


def test_a_raw_file_of_a_machine_without_one_yet_can_be_written(tmp_path, monkeypatch):
    """Measurements take up to two hours, and write at the end."""
    monkeypatch.setattr(raw_file, "ROOT", tmp_path)
    path, content = raw_file.raw_file("any", "python -m any", steps=3)
    raw_file.write(path, content | {"runs": [1.5]})
    written = json.loads(path.read_text())
    assert path.match(f"bench/results/cpu-*-cores/any-{written['date']}.json")
    assert written.keys() == {"made_by", "date", "commit", "environment", "steps", "runs"}


@pytest.mark.parametrize("name", ["commit", "environment", "steps"])
def test_stale_rollouts_of_other_code_are_not_gone_on_with(tmp_path, monkeypatch, name):
    path, here = tmp_path / "stale.json", {"commit": 1, "environment": 1, "steps": 1, "runs": []}
    raw_file.write(path, here | {name: 2})
    monkeypatch.setattr(stale_rollouts, "raw_file", lambda *_, **__: (path, here))
    with pytest.raises(DataError, match=f"got .*stale.json of another {name}, want one run.*; fix: move it away"):
        stale_rollouts.main(["--seeds", "0"])
