"""Reward functions by name."""

import json
import sys

import pytest

from fused_grpo.errors import InputError
from fused_grpo.trainer.rewards import builtin_rewards, load_reward
from fused_grpo.trainer.rewards.reward_call import names_a_function


@pytest.mark.parametrize(
    "name", ["fused_grpo.trainer.rewards.builtin_rewards:format_reward", f"{builtin_rewards.__name__}.text_of"]
)
def test_a_function_of_a_module_is_found_by_its_name(name):
    assert load_reward(name) is getattr(builtin_rewards, name.replace(":", ".").rpartition(".")[2])


def test_a_function_of_a_file_is_found_and_takes_no_module_s_place(tmp_path):
    (tmp_path / "json.py").write_text("def length(completions):\n    return [len(c) for c in completions]\n")
    assert load_reward(f"{tmp_path / 'json.py'}:length")(["ab"]) == [2]
    assert sys.modules["json"] is json


@pytest.mark.parametrize("name", ["len", "builtins:nothing", "no.such:thing", "missing.py:f", "builtins:__name__"])
def test_a_reward_function_that_is_not_there_is_refused(name):
    with pytest.raises(InputError, match=f"got reward function '{name}'"):
        load_reward(name)


@pytest.mark.parametrize(
    ("name", "is_function"),
    [
        ("builtins:len", True),
        ("json.dumps", True),
        ("mine.py:f", True),
        ("gpt2", False),
        ("some/reward-model", False),
        ("no_such_module.f", False),
        ("reward-2.5", False),
    ],
)
def test_names_of_functions_are_told_from_names_of_models(name, is_function):
    assert names_a_function(name) is is_function


def test_a_directory_is_a_model_whatever_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.dumps").mkdir()
    assert not names_a_function("json.dumps")
