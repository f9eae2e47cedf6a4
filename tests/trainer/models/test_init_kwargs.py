"""Options of `from_pretrained` with which there is no model to train are errors before anything is loaded."""

from functools import partial

import pytest
from small_runs import model_of, trainer_in
from transformers import Qwen2Config

from fused_grpo.errors import DataError, InputError
from fused_grpo.trainer import GRPOTrainer
from fused_grpo.trainer.models.loading import check_init_kwargs
from fused_grpo.trainer.recipes.arithmetic import build_tokenizer

REFUSED = {
    "a pair": ({"output_loading_info": True}, "got output_loading_info in {}, want a model without"),
    "a path twice": ({"pretrained_model_name_or_path": "x"}, "got 'pretrained_model_name_or_path' in {}, which is set"),
    "a class": ({"cls": 1}, "got 'cls' in {}, which is set here"),
    "options left over": ({"return_unused_kwargs": False}, "got 'return_unused_kwargs' in {}, which is set here"),
    "weights": ({"state_dict": {}}, "got 'state_dict' in {}, which is set here"),
    "a config's path": ({"config": "x"}, "got config='x' in {}, want a PreTrainedConfig; fix: AutoConfig"),
    "no weights": ({"device_map": "meta"}, "got device_map='meta' in {}, want weights"),
    "weights on a disk": (
        {"device_map": {"": "cpu", "lm_head": "disk"}},
        "got device_map=.*disk.* in {}, want",
    ),
}
TAKEN = [{}, None, {"output_loading_info": False, "config": Qwen2Config()}, {"device_map": "auto"}]
TAKEN += [{"device_map": {"": 0}}]


@pytest.fixture
def folder(tmp_path):
    model_of().save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.parametrize("option", ["model_init_kwargs", "teacher_model_init_kwargs"])
@pytest.mark.parametrize("name", REFUSED)
def test_options_that_return_no_model_are_refused(folder, tmp_path, name, option):
    given, message = REFUSED[name]
    with pytest.raises(InputError, match=message.format(option)):
        trainer_in(tmp_path, folder, **{option: given})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("given", TAKEN)
def test_other_options_are_taken(given):
    check_init_kwargs("model_init_kwargs", given)


def test_a_run_loads_with_options_that_say_what_is_the_default(folder, tmp_path):
    given = {"output_loading_info": False, "device_map": None, "config": model_of().config}
    assert trainer_in(tmp_path, folder, model_init_kwargs=given).train().steps == 2


def test_attention_without_its_package_is_refused_each_time(folder, tmp_path):
    for _ in range(2):  # transformers says it once
        with pytest.raises(DataError, match=r"(?i)flash.?att"):
            trainer_in(tmp_path, folder, model_init_kwargs={"attn_implementation": "flash_attention_2"}).train()


def test_a_relative_folder_is_one_after_a_change_of_folder(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = trainer_in(tmp_path, "model")
    monkeypatch.chdir("/")
    assert trainer.model_path == folder


def test_a_run_begins_with_the_config_that_its_model_will_have(folder, tmp_path):
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    given = {"rope_parameters": scaled, "max_position_embeddings": 64, "dtype": "float32"}
    trainer = trainer_in(tmp_path, folder, model_init_kwargs=given, max_completion_length=6)
    assert trainer.start.limit.tokens == 4 * 64 - 6
    assert trainer.start.config.to_dict() == trainer.model.config.to_dict()
    with pytest.raises(InputError, match=r"could not be saved after the run \(.*num_hidden_layers"):
        trainer_in(tmp_path, folder, model_init_kwargs={"num_hidden_layers": 1})


def test_prompts_have_room_in_the_teacher_too(folder, tmp_path):
    given = model_of(max_position_embeddings=24)
    given.save_pretrained(tmp_path / "teacher")
    for teacher, most in (("self", 64), (given, 24), (tmp_path / "teacher", 24), (model_of(), 64)):
        kind = partial(GRPOTrainer, teacher_model=teacher)
        policy = model_of(max_position_embeddings=64)
        options = {"distillation_coef": 1.0, "max_completion_length": 8, "overwrite_output_dir": True}
        assert trainer_in(tmp_path, policy, kind=kind, **options).start.limit.tokens == most - 8
