"""docs/from-trl.md: its table is the one that the code gives, and has every field of TRL's."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path

import pytest

from fused_grpo.trainer.config.trl_fields import DIFFERENT, MISSING

pytest.importorskip("trl", reason="TRL is not installed")
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def trl_table():
    spec = importlib.util.spec_from_file_location("trl_table", ROOT / "scripts" / "trl_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def trl_names():
    from trl import GRPOConfig

    return {entry.name for entry in dataclasses.fields(GRPOConfig)}


def test_every_field_of_trl_is_here_or_explained(trl_names):
    from fused_grpo.trainer.config.grpo_config import GRPOConfig, own_fields

    ours = {entry.name for entry in own_fields(GRPOConfig)}
    assert trl_names - ours == MISSING.keys()
    assert trl_names & ours >= DIFFERENT.keys()


def test_the_committed_table_is_current(trl_table):
    assert trl_table.main(["--check"]) == 0, "run: python scripts/trl_table.py"


def test_the_table_has_every_field_of_trl_once_and_says_why_one_is_missing(trl_table, trl_names):
    rows = re.findall(r"^\| `(\w+)` \| .* \| (.+) \|$", trl_table.PAGE.read_text(), flags=re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(trl_names)
    for name, here in rows:
        assert here.startswith("not here: ") is (name in MISSING)
        assert name not in MISSING or here.endswith(MISSING[name].why)
        assert name not in DIFFERENT or here == DIFFERENT[name]


def test_a_default_that_is_not_trls_is_never_called_the_same(trl_table):
    from trl import GRPOConfig as TRLConfig

    from fused_grpo.trainer.config.grpo_config import GRPOConfig

    theirs = {entry.name: entry for entry in dataclasses.fields(TRLConfig)}
    for entry in dataclasses.fields(GRPOConfig):
        if entry.name in theirs and trl_table.shown(entry) != trl_table.shown(theirs[entry.name]):
            assert "| same |" not in trl_table.row(theirs[entry.name], entry)


def test_a_page_with_an_old_table_is_found_out(trl_table, monkeypatch, tmp_path):
    old = trl_table.PAGE.read_text().replace("| `beta` |", "| `beta2` |")
    monkeypatch.setattr(trl_table, "PAGE", tmp_path / "page.md")
    trl_table.PAGE.write_text(old)
    assert trl_table.main(["--check"]) == 1
    assert trl_table.main([]) == 0
    assert trl_table.main(["--check"]) == 0
    assert "`beta2`" not in trl_table.PAGE.read_text()
