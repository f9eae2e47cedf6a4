"""What scripts do with a trainer after `train`: under transformers' names, with TRL's arguments."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerState

from fused_grpo.errors import CheckpointError, UnavailableError

EVAL_ROWS = [{"prompt": "1+1="}, {"prompt": "2+2="}]


class Hub:
    """What the trainer asks of huggingface_hub.HfApi."""

    calls: list[tuple[str, Any]]

    def __init__(self, **options: Any) -> None:
        self.calls.append(("login", options["token"]))

    def create_repo(self, name: str, **options: Any) -> SimpleNamespace:
        self.repositories.append(options["private"])
        return SimpleNamespace(repo_id=f"me/{name}")

    def upload_folder(self, *, folder_path: Any, **options: Any) -> str:
        self.calls.append(((folder_path / "README.md").read_text(), options))
        return "the commit"


def front_matter(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---\n")[1])


def test_a_model_goes_to_the_hub_with_its_card_and_nothing_of_the_data(make_trainer, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    for kept in ("calls", "repositories"):
        monkeypatch.setattr(Hub, kept, [], raising=False)
    monkeypatch.setenv("HF_TOKEN", "of a test")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    trainer = make_trainer(max_steps=1, push_to_hub=True, hub_private_repo=True)
    trainer.train()
    assert trainer.hub_model_id == "me/run"
    assert len(Hub.calls) == 2
    commit = trainer.push_to_hub("mine", token="secret", revision="dev", dataset_name="me/sums", tags="maths")
    _, (login, token), (card, options) = Hub.calls[-3:]
    assert (commit, login, token) == ("the commit", "login", "secret")
    assert options == {"repo_id": "me/run", "commit_message": "mine", "revision": "dev", "run_as_future": False}
    assert front_matter(card)["datasets"] == ["me/sums"]
    assert front_matter(card)["tags"] == ["grpo", "fused-grpo", "reinforcement-learning", "maths"]
    assert "for 1 optimizer steps on `digit_reward`" in card
    trainer.push_to_hub(private=False)
    assert Hub.repositories == [True, True, False]


def test_a_run_whose_upload_fails_has_its_report_and_its_model(make_trainer, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HF_TOKEN", "of a test")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", refuse)
    with pytest.raises(UnavailableError, match=r"fix: hf auth login, then hf upload run .*/run/final"):
        make_trainer(max_steps=1, push_to_hub=True).train()
    assert {"final", "report.html", "reward.svg"} <= {path.name for path in (tmp_path / "run").iterdir()}
    assert "report: " in capsys.readouterr().out


def test_a_script_of_transformers_finds_what_it_expects_after_training(make_trainer):
    trainer = make_trainer(max_steps=2, eval_dataset=EVAL_ROWS, beta=0.1, epsilon_high=0.3)
    result = trainer.train()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    trainer.create_model_card(model_name="sums")
    trainer.save_model(trainer.args.output_dir)
    run = trainer.output_dir
    assert json.loads((run / "train_results.json").read_text())["train_loss"] == result.training_loss
    assert TrainerState.load_from_json(str(run / "trainer_state.json")).log_history == trainer.state.log_history
    assert (run / "README.md").read_text().count("# sums") == 1
    assert trainer.is_world_process_zero()
    assert trainer.is_local_process_zero()
    assert trainer.reward_func_names == ["digit_reward"]
    assert trainer.reward_processing_classes == [None]
    assert (trainer.num_generations, trainer.beta, trainer.epsilon_high) == (4, 0.1, 0.3)
    assert trainer.ref_model.config is not None
    assert trainer.optimizer.param_groups[0]["lr"] == trainer.lr_scheduler.get_last_lr()[0]


def test_a_trainer_evaluates_after_training(make_trainer):
    trainer = make_trainer(max_steps=1, eval_dataset=EVAL_ROWS)
    after = trainer.train().eval_after
    assert trainer.engine.closed
    trainer._make_engine = lambda: type(trainer.engine)(trainer.model, trainer.processing_class)
    again = trainer.evaluate()
    assert (trainer.engine.closed, trainer.engine.weight_version) == (False, 1)
    assert {name: again[f"eval_{name}"] for name in after} == after
    trainer.end()
    trainer.end()
    assert trainer.engine.closed


def refuse(*_: Any, **__: Any) -> None:
    raise FileNotFoundError(2, "no such file")  # as where a vocabulary that is copied has gone


BESIDE = ["config", "generation_config", "tokenizer"]


@pytest.mark.parametrize(
    ("part", "named"),
    [*((part, True) for part in BESIDE), *((part, False) for part in [*BESIDE, "model card", "foreign file"])],
)
def test_the_weights_stay_where_anything_beside_them_cannot_be_saved(make_trainer, tmp_path, monkeypatch, part, named):
    trainer = make_trainer(max_steps=1)
    config, generation, weights = trainer.model.config, trainer.model.generation_config, trainer.model.state_dict
    kept = tmp_path / "run" / "final-rescued-1"
    if part == "tokenizer":
        monkeypatch.setattr(trainer.processing_class, "save_pretrained", refuse)
    elif part in ("config", "generation_config"):
        {"config": config, "generation_config": generation}[part].temperature = 0.5
    elif part == "model card":
        monkeypatch.setattr("fused_grpo.trainer.transformers_face.write_model_card", lambda *_: 1 / 0)
    else:
        file = tmp_path / "run" / "final" / "model.gguf"
        monkeypatch.setattr(trainer.events, "log_closing", lambda output: touch(file) or {})
    if named:
        kept = tmp_path / "mine"
        kept.mkdir()
        (kept / "model.safetensors").write_bytes(b"of an earlier save")
    with pytest.raises(CheckpointError, match=rf"weights are in {kept}"):
        trainer.save_model(kept) if named else trainer.train()
    saved = load_file(kept / "model.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in weights().items() if name in saved)
    assert saved.keys() | {"lm_head.weight"} >= weights().keys()
    if part == "foreign file":
        assert (tmp_path / "run" / "final" / "model.gguf").read_text() == "mine"
        assert AutoModelForCausalLM.from_pretrained(kept).config.vocab_size == config.vocab_size


def touch(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("mine")
