"""The command line: options, their sources, and errors without a traceback."""

from __future__ import annotations

import json

import pytest

from fused_grpo.errors import DataError, InputError
from fused_grpo.trainer.cli import load_function, main, parse_train_options, read_yaml
from fused_grpo.trainer.data import load_rows


def test_without_a_model_the_demo_recipe_is_the_default_and_options_win():
    options = parse_train_options(["--seed", "7", "--max_steps", "3"])
    assert (options.seed, options.max_steps, options.num_generations) == (7, 3, 8)
    assert options.output_dir == "runs/demo"
    assert options.learning_rate == 1e-3


def test_with_a_model_the_defaults_are_those_of_the_config():
    options = parse_train_options(["--model", "somewhere", "--dataset=data.jsonl", "--reward-funcs", "m:f", "n:g"])
    assert (options.learning_rate, options.output_dir) == (1e-6, "runs/grpo")
    assert options.reward_funcs == ["m:f", "n:g"]


def test_a_yaml_file_is_below_the_command_line(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("learning_rate: 5e-1\nmax_steps: 9\nshuffle_dataset: false\nbf16: false\nepsilon_high: null\n")
    options = parse_train_options(["--model", "m", "--config", str(file), "--max-steps", "4"])
    assert (options.learning_rate, options.max_steps) == (0.5, 4)
    assert (options.shuffle_dataset, options.bf16, options.epsilon_high) == (False, False, None)


@pytest.mark.parametrize("content", ["learning_rate: fast", "max_steps: 2.5", "bf16: perhaps", "epsilon: -1"])
def test_yaml_values_are_checked_like_arguments(tmp_path, content, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(content)
    with pytest.raises(SystemExit, match="2"):
        parse_train_options(["--model", "m", "--config", str(file)])
    assert content.partition(":")[0].replace("_", "-") in capsys.readouterr().err


def test_a_yaml_file_that_names_a_model_is_no_demo(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: somewhere\nreward_funcs: m:f\nscale_rewards: none\n")
    options = parse_train_options(["--config", str(file)])
    assert (options.learning_rate, options.output_dir) == (1e-6, "runs/grpo")
    assert (options.reward_funcs, options.scale_rewards) == (["m:f"], "none")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("lerning_rate: 1", "'lerning_rate'"),
        ("- 1", "want a mapping"),
        ("seed: [", "is not YAML"),
        (None, "that exists"),
    ],
)
def test_a_yaml_file_that_cannot_be_used_is_refused(tmp_path, content, message):
    file = tmp_path / "run.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InputError, match=message):
        read_yaml(file)


@pytest.mark.parametrize("form", ["{}.py:length", "module"])
def test_reward_functions_are_found_by_path_and_by_module(tmp_path, form):
    if form == "module":
        assert load_function("builtins:len") is len
        return
    (tmp_path / "mine.py").write_text("def length(completions, **_):\n    return [len(c) for c in completions]\n")
    assert load_function(f"{tmp_path / 'mine.py'}:length")(["ab"]) == [2]


@pytest.mark.parametrize("name", ["len", "builtins:nothing", "no.such:thing", "missing.py:f", "builtins:__name__"])
def test_a_reward_function_that_is_not_there_is_refused(name):
    with pytest.raises(InputError, match=f"got reward function '{name}'"):
        load_function(name)


def test_rows_come_from_a_local_file(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": n + 1}) + "\n" for n in range(3)))
    assert [row["answer"] for row in load_rows(str(file), split="train")] == [1, 2, 3]
    with pytest.raises(DataError, match="no such file"):
        load_rows(str(tmp_path / "other.jsonl"), split="train")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fly"], "InputError: got the command 'fly'"),
        (["train", "--model", "m"], "InputError: got --model without --dataset"),
        (["train", "--num-generations", "7"], "InputError: got an effective batch of 512"),
    ],
)
def test_errors_end_the_command_with_their_message(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert str(exit.value).startswith(f"fused-grpo: {message}")
    assert list(tmp_path.iterdir()) == []


def test_an_option_out_of_range_is_refused_where_it_is_parsed(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--epsilon", "-1"])
    assert "got epsilon=-1.0, want 0 <= epsilon <= 1" in " ".join(capsys.readouterr().err.split())


def test_help_shows_every_option_with_its_docstring(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for expected in ("--num-generations", "Completions per prompt, the size of a group", "--reward-funcs"):
        assert expected in shown


def test_env_reports_versions_and_implementations(capsys):
    main(["env"])
    shown = capsys.readouterr().out
    assert "torch" in shown
    assert "impl torch" in shown
