"""Relative paths of a run mean what they meant when the trainer was made, wherever the script goes after that."""

import json

import pytest
from small_runs import trainer_in
from transformers import AutoModelForCausalLM

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer.engines.server import server_engine
from fused_grpo.trainer.engines.server.server_engine import VLLMServerAdapterEngine

SAVES = {"output_dir": "run", "max_steps": 1, "save_strategy": "steps", "save_steps": 1}
CALLS = {
    "save_state": lambda trainer: trainer.save_state(),
    "save_metrics": lambda trainer: trainer.save_metrics("train", {"reward": 1.0}),
    "create_model_card": lambda trainer: trainer.create_model_card(),
    "save_checkpoint": lambda trainer: trainer.save_checkpoint(),
    "save_model": lambda trainer: trainer.save_model(),
    "train": lambda trainer: trainer.train(),
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def elsewhere(here, monkeypatch):
    """Goes to another folder when it is called."""
    (folder := here / "elsewhere").mkdir()
    yield lambda: monkeypatch.chdir(folder)
    assert not any(folder.iterdir())


@pytest.mark.parametrize("name", CALLS)
def test_what_a_script_saves_is_in_the_output_dir(here, elsewhere, name):
    trainer = trainer_in(here, **SAVES)
    elsewhere()
    CALLS[name](trainer)
    assert any((here / "run").iterdir())


def test_what_transformers_writes_has_the_state_and_all_metrics(here, elsewhere):
    trainer = trainer_in(here, **SAVES)
    elsewhere()
    trainer.train()
    trainer.save_state()
    trainer.save_metrics("train", {"reward": 1.0})
    trainer.save_metrics("eval", {"eval_reward": 2.0})
    assert json.loads((here / "run" / "trainer_state.json").read_text())["global_step"] == 1
    assert json.loads((here / "run" / "all_results.json").read_text()) == {"reward": 1.0, "eval_reward": 2.0}


@pytest.mark.parametrize("name", ["save_state", "save_metrics", "save_model"])
def test_another_output_dir_that_a_script_sets_is_written_to(here, name):
    trainer = trainer_in(here, **SAVES)
    trainer.args.output_dir = "other"
    CALLS[name](trainer)
    assert any((here / "other").iterdir())
    assert not (here / "run").exists()


@pytest.mark.parametrize("place", [None, "run", "other"])
def test_a_model_is_saved_where_a_script_for_trl_looks_for_it(here, place):
    trainer = trainer_in(here, **SAVES)
    trainer.train()
    assert trainer.save_model(place).resolve() == here / (place or "run")
    loaded = AutoModelForCausalLM.from_pretrained(here / (place or "run")).state_dict()
    assert all(value.equal(loaded[name]) for name, value in trainer.model.state_dict().items())
    trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_model_in_the_way_of_its_run_stays(here, elsewhere, overwrite):
    trainer_in(here, **SAVES).train()
    again = trainer_in(here, "run/checkpoint-1", **SAVES, overwrite_output_dir=overwrite)
    elsewhere()
    with pytest.raises(CheckpointError, match=r"got .*run/checkpoint-1 as a model, of a run in"):
        again.train()
    assert (here / "run" / "checkpoint-1" / "model.safetensors").is_file()


def test_servers_are_told_where_weights_are(here, monkeypatch):
    """They run in other folders."""
    monkeypatch.setattr(server_engine, "ServedAdapter", lambda model: None)
    monkeypatch.setattr(server_engine.VLLMServerEngine, "__init__", lambda *args, **kwargs: None)
    monkeypatch.setattr(server_engine, "base_model", lambda model: model)
    assert VLLMServerAdapterEngine(None, None, weights_directory="shared")._directory == str(here / "shared")
    assert VLLMServerAdapterEngine(None, None)._directory is None
