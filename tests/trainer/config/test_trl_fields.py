"""docs/from-trl.md: its tables are those that the code gives, and have every field of TRL's."""

import dataclasses
import importlib.util
import inspect
import re
from pathlib import Path

import pytest
from transformers import Trainer
from trl_differences import DIFFERENT

from fused_grpo.errors import InputError, UnsupportedError
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.config.trl_fields import FORMER, MISSING, TRAINER_ARGUMENTS
from fused_grpo.trainer.config.trl_names import HOOKS, REASONS

pytest.importorskip("trl", reason="TRL is not installed")
ROOT = Path(__file__).parents[3]
# What model cards and telemetry say, and what a reward function logs.
NOT_OF_A_RUN = {"_name", "_paper", "_tag_names", "_template_file", "_send_telemetry", "_log_metric"}
NOT_OF_A_RUN |= {"_log_completion_extra"}


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


def names_in(text: str) -> list[str]:
    return re.findall(r"`(\w+)`", text)


def first_column(table: str) -> str:
    return "\n".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))


def test_the_tables_have_every_field_of_trl_once(trl_table, trl_names):
    by_section = trl_table.options().partition("| without an effect")[0].splitlines()
    same = "\n".join(line.split("|")[2] for line in by_section if line.startswith("| "))
    differs = re.findall(r"^\| `(\w+)`, by default", trl_table.differences(), re.MULTILINE)
    without_effect = names_in(first_column(trl_table.options()))
    assert sorted([*names_in(same), *differs, *without_effect]) == sorted(trl_names)
    assert sorted(without_effect) == sorted(MISSING)
    assert {*differs} >= DIFFERENT.keys()


def test_a_missing_field_has_its_reason_and_whether_it_is_refused(trl_table):
    rows = [line.strip("| ").split(" | ") for line in trl_table.options().splitlines() if line.startswith("| `")]
    for names, values, why in rows:
        for name in names_in(names):
            assert MISSING[name].why == why
            assert MISSING[name].accepts(1) is (values == "change nothing")


def test_a_default_that_is_not_trls_is_never_called_the_same(trl_table):
    from trl import GRPOConfig as TRLConfig

    from fused_grpo.trainer.config.grpo_config import GRPOConfig

    trl_options = {entry.name: entry for entry in dataclasses.fields(TRLConfig)}
    for entry in dataclasses.fields(GRPOConfig):
        if entry.name in trl_options and trl_table.shown(entry) != trl_table.shown(trl_options[entry.name]):
            assert trl_table.difference(trl_options[entry.name], entry)


def test_every_reason_is_of_a_name_that_trl_has(trl_table):
    public = {name for name in REASONS if not name.startswith("_")}
    assert public <= trl_table.public(trl_table.trl_trainer())


def test_every_method_of_trl_is_a_hook_or_has_its_reason(trl_table):
    kinds = [kind for kind in trl_table.trl_trainer().__mro__ if kind.__module__.startswith("trl.")]
    named = {name for kind in kinds for name in vars(kind) if not name.startswith("__")} - vars(Trainer).keys()
    assert named - HOOKS - NOT_OF_A_RUN <= REASONS.keys()


def test_a_page_with_an_old_table_is_found_out(trl_table, monkeypatch, tmp_path):
    current = trl_table.page_with(trl_table.PAGE.read_text())
    monkeypatch.setattr(trl_table, "PAGE", tmp_path / "page.md")
    trl_table.PAGE.write_text(current.replace("`beta`", "`beta2`"))
    assert trl_table.main(["--check"]) == 1
    assert trl_table.main([]) == 0
    assert trl_table.main(["--check"]) == 0
    assert trl_table.PAGE.read_text() == current
    assert current.count("\n") <= 250


HUB = {"hub_token": "hf_abc", "hub_revision": "v2", "hub_strategy": "checkpoint", "hub_always_push": True}


@pytest.mark.parametrize("name", HUB)
def test_what_says_how_to_upload_is_refused_where_a_run_uploads(name, caplog):
    assert HUB.keys() == {name for name, missing in MISSING.items() if missing.others == "refused with push_to_hub"}
    warn_once.cache_clear()
    assert vars(GRPOConfig(**{name: HUB[name]}))[name] == HUB[name]
    assert f"got {name}=" in caplog.text
    with pytest.raises(UnsupportedError, match=f"got {name}=.*: push_to_hub uploads the final model, once") as caught:
        GRPOConfig(push_to_hub=True, **{name: HUB[name]})
    assert "hf_abc" not in caplog.text + str(caught.value)


def test_an_upload_at_the_end_is_what_there_is():
    assert GRPOConfig(push_to_hub=True, hub_strategy="end").hub_strategy == "end"


def test_a_former_or_misspelled_name_is_refused_with_the_one_to_write():
    names = {entry.name for entry in dataclasses.fields(GRPOConfig)}
    assert not names & FORMER.keys()
    for name, instead in FORMER.items():
        with pytest.raises(TypeError, match=rf"'{name}' of GRPOConfig; fix: {name}: {re.escape(instead)}$"):
            GRPOConfig(**{name: 1})
    with pytest.raises(InputError, match=r"'beta_', 'lr' of GRPOConfig; fix: beta_: did you mean 'beta'\?; lr: see"):
        GRPOConfig(beta_=0.1, lr=1e-6)


def test_what_belongs_to_the_other_of_trainer_and_options_is_said_so():
    arguments, options = inspect.signature(GRPOTrainer).parameters, inspect.signature(GRPOConfig).parameters
    assert TRAINER_ARGUMENTS.keys() == set(arguments)
    assert not arguments.keys() & options.keys()
    for name in arguments:
        with pytest.raises(
            InputError, match=rf"'{name}' of GRPOConfig; fix: {name}: it is an argument of GRPOTrainer$"
        ):
            GRPOConfig(**{name: None})
    for name in options:
        with pytest.raises(InputError, match=rf"of GRPOTrainer; fix: {name}: .*GRPOConfig\({name}=\.\.\.\)$"):
            GRPOTrainer(**{name: None})
    with pytest.raises(InputError, match=r"tokenizer: processing_class; tool: did you mean 'tools'\?; data: see help"):
        GRPOTrainer("model", tokenizer=None, tool=[], data=[])


def test_what_replaces_a_former_name_is_an_option():
    names = {entry.name for entry in dataclasses.fields(GRPOConfig)}
    first = {re.split(r"[ ,=]", instead)[0] for instead in FORMER.values()} - {"leave", "the"}
    assert first <= names - MISSING.keys()
