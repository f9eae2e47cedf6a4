"""The model card: what the hub reads, what a person reads, and nothing private; and the upload."""

import re
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
import yaml

from fused_grpo.errors import InputError, UnavailableError
from fused_grpo.trainer.config.derived_options import fill_loader_options
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.logging.model_card import CardFacts, is_hub_id, model_card, push_to_hub, write_model_card
from fused_grpo.trainer.logging.run_output import Results

FACTS = {
    "name": "me/sums",
    "rewards": ["accuracy", "format"],
    "steps": 120,
    "results": Results({"reward": 0.75, "kl": 0.01}, {"reward": 0.31}, {"reward": 0.6789}),
    "base_model": "Qwen/Qwen2.5-1.5B",
    "dataset": "openai/gsm8k",
}


def front_matter(card):
    return yaml.safe_load(card.split("---\n")[1])


def test_a_card_says_what_was_done_with_which_numbers():
    card = model_card(CardFacts(**FACTS), GRPOConfig(output_dir="/home/me/x", learning_rate=3e-6))
    assert front_matter(card) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["grpo", "fused-grpo", "reinforcement-learning"],
        "base_model": "Qwen/Qwen2.5-1.5B",
        "datasets": ["openai/gsm8k"],
    }
    assert "for 120 optimizer steps on `accuracy`, `format`" in card
    assert "| held-out reward | 0.310 | 0.679 |" in card
    assert "learning_rate: 3.0e-06" in card
    assert "torch 2." in card
    assert "/home" not in card


def test_a_local_model_and_dataset_are_not_called_repositories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "models" / "base").mkdir(parents=True)
    for name in ("models/base", "./base", "/a/b", "~/base", "a/b/c", "module:rows", "rows.jsonl", None):
        assert not is_hub_id(name)
    assert is_hub_id("gpt2")
    card = model_card(CardFacts(**FACTS | {"base_model": "models/base", "dataset": "rows.jsonl"}), GRPOConfig())
    assert not {"base_model", "datasets"} & front_matter(card).keys()
    assert "models/base" not in card


def test_secrets_among_the_options_do_not_get_into_a_card():
    card = model_card(CardFacts(**FACTS), GRPOConfig(model_init_kwargs={"token": "hf_" + "a" * 30}))
    assert "hf_aaa" not in card


def test_objects_and_long_values_are_named_and_not_printed():
    options = {"model_init_kwargs": {"config": SimpleNamespace()}, "generation_kwargs": {"bad_words": ["w"] * 200}}
    args = GRPOConfig(**options, chat_template_kwargs={"tools": [len]}, lr_scheduler_kwargs={"num_cycles": 2})
    fill_loader_options(args, stream=False)  # an object, in an option that has no effect here
    (options,) = re.findall("```yaml\n(.*?)```", model_card(CardFacts(**FACTS), args), re.DOTALL)
    named = "model_init_kwargs, generation_kwargs, chat_template_kwargs"
    assert options == f"lr_scheduler_kwargs:\n  num_cycles: 2\n# and {named}, which have no short text\n"


def test_dtypes_and_paths_are_readable(tmp_path):
    args = GRPOConfig(model_init_kwargs={"dtype": torch.bfloat16, "cache_dir": tmp_path})
    card = model_card(CardFacts(**FACTS), args)
    assert "  dtype: torch.bfloat16\n" in card
    assert f"  cache_dir: {tmp_path}\n" in card


def test_an_adapters_card_loads_it_with_peft_and_has_no_empty_table():
    facts = FACTS | {"adapter": True, "results": Results()}
    card = model_card(CardFacts(**facts), GRPOConfig())
    assert front_matter(card)["library_name"] == "peft"
    assert "AutoPeftModelForCausalLM" in card
    assert "## Results" not in card


def test_the_code_of_a_card_loads_the_model(tmp_path, make_model, tokenizer):
    make_model().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    card = write_model_card(tmp_path, CardFacts(**FACTS | {"name": str(tmp_path)}), GRPOConfig()).read_text()
    scope = {}
    exec(card.split("```python\n")[1].split("```")[0], scope)
    assert scope["model"].num_parameters() == make_model().num_parameters()
    assert scope["tokenizer"].eos_token == tokenizer.eos_token


class Hub:
    """What push_to_hub asks of huggingface_hub.HfApi."""

    def __init__(self, error=None):
        self.calls, self.error = [], error

    def create_repo(self, name, **options):
        self.calls.append(("create", name, options))
        return SimpleNamespace(repo_id=f"me/{name}")

    def upload_folder(self, **options):
        if self.error is not None:
            raise self.error
        self.calls.append(("upload", options["repo_id"], options["folder_path"]))
        return "https://huggingface.co/me/sums"


def test_the_directory_is_uploaded_under_the_name_of_the_run(tmp_path, monkeypatch):
    hub, final = Hub(), tmp_path / "sums" / "final"
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda **_: hub)
    final.mkdir(parents=True)
    assert push_to_hub(final, private=True) == ("me/sums", "https://huggingface.co/me/sums")
    assert hub.calls == [("create", "sums", {"private": True, "exist_ok": True}), ("upload", "me/sums", final)]


def test_an_upload_that_fails_says_how_to_repeat_it(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda **_: Hub(OSError("no route")))
    with pytest.raises(UnavailableError, match=r"got OSError .*no route; fix: hf auth login, then hf upload mine"):
        push_to_hub(tmp_path, "mine")


@pytest.mark.parametrize(
    "given", [{"dataset_name": ["a", "b"]}, {"dataset_name": Path("a")}, {"model_name": 5}, {"tags": 5}, {"tags": [5]}]
)
def test_what_is_no_text_is_refused_of_a_card(make_trainer, given):
    with pytest.raises(InputError, match=r"got model_name=.*, dataset_name=.*, tags=.*, want text, or .*; fix: "):
        make_trainer().create_model_card(**given)
