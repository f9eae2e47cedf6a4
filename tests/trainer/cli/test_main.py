"""The command line: options, their sources, and errors without a traceback."""

import json
import os
import shlex
import threading
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from fused_grpo.errors import DataError, InputError, UnsupportedError
from fused_grpo.trainer.cli.main import main
from fused_grpo.trainer.cli.options import (
    SECTIONS,
    TrainOptions,
    find_config,
    parse_train_options,
    read_yaml,
)
from fused_grpo.trainer.cli.train import load_prompts
from fused_grpo.trainer.config.grpo_config import MAPPINGS, GRPOConfig, own_fields
from fused_grpo.trainer.config.trl_fields import MISSING, field_docstrings
from fused_grpo.trainer.logging.run_log import RunLog
from fused_grpo.trainer.tasks.named import _named_value


def test_without_a_model_the_demo_recipe_is_the_default_and_options_win():
    options = parse_train_options(["--seed", "7", "--max_steps", "3"])
    assert (options.seed, options.max_steps, options.num_generations) == (7, 3, 8)
    assert options.output_dir == "runs/demo"
    assert options.learning_rate == 1e-3


@pytest.mark.parametrize("arguments", [["--task", "calculator"], ["--task=calculator"], ["--config", "calculator"]])
def test_a_built_in_task_has_the_options_of_its_recipe(arguments):
    options = parse_train_options([*arguments, "--seed", "7"])
    assert (options.max_completion_length, options.max_tool_calling_iterations) == (32, 1)
    assert (options.output_dir, options.learning_rate, options.seed) == ("runs/calculator", 1e-3, 7)
    assert parse_train_options([*arguments, "--max-completion-length", "40"]).max_completion_length == 40


def test_with_a_model_the_defaults_are_those_of_the_config():
    options = parse_train_options(["--model", "somewhere", "--dataset=data.jsonl", "--reward-funcs", "m:f", "n:g"])
    assert (options.learning_rate, options.output_dir) == (1e-6, "runs/grpo")
    assert options.reward_funcs == ["m:f", "n:g"]


def test_an_option_of_evaluations_may_be_spelt_like_the_others():
    options = parse_train_options(["--model", "m", "--eval-num-generations", "4"])
    assert options.num_generations_eval == 4


def test_a_yaml_file_is_below_the_command_line(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("learning_rate: 5e-1\nmax_steps: 9\nshuffle_dataset: false\nbf16: false\nepsilon_high: null\n")
    options = parse_train_options(["--model", "m", "--config", str(file), "--max-steps", "4"])
    assert (options.learning_rate, options.max_steps) == (0.5, 4)
    assert (options.shuffle_dataset, options.bf16, options.epsilon_high) == (False, False, None)


@pytest.mark.parametrize("content", ["learning_rate: fast", "max_steps: 2.5", "bf16: perhaps"])
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


def test_of_an_option_given_twice_the_last_one_counts():
    """As scripts rely on that pass their own arguments behind others."""
    options = parse_train_options(["--max-steps", "3", "--bf16", "--max_steps=4", "--no-bf16"])
    assert (options.max_steps, options.bf16) == (4, False)


def test_a_name_in_json_is_given_once():
    with pytest.raises(InputError, match="'a' is there twice"):
        GRPOConfig(generation_kwargs='{"a": 1, "b": {"a": 1}, "a": 2}')


def test_no_option_is_empty_text():
    """A path that is empty is the folder in which the process happens to be."""
    for name, kind in get_type_hints(TrainOptions).items():
        if name in MISSING or name == "system_prompt" or not ({str, list[str]} & {kind, *get_args(kind)}):
            continue
        for value in [""] if str in (kind, *get_args(kind)) else [["a", ""]]:
            with pytest.raises(InputError, match=f"got {name}=.*want .*"):
                TrainOptions(**{name: value})


def test_options_may_come_through_a_pipe(tmp_path):
    os.mkfifo(pipe := tmp_path / "run")
    threading.Thread(target=pipe.write_text, args=("seed: 7",), daemon=True).start()
    assert read_yaml(pipe) == {"seed": 7}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("lerning_rate: 1", "'lerning_rate'"),
        ("- 1", "want a mapping"),
        ("seed: [", "is not YAML"),
        ("seed: 1\nseed: 2", "got seed 2 times in .*want it once; fix: "),
        ("generation_kwargs: {a: [{b: 1, c: 2, b: 3}]}", "got b 2 times in "),
        ("generation_kwargs: &a {b: [*a], c: 1, c: 2}", "got c 2 times in "),
        ("[" * 20_000, "is not YAML"),
        ("config: other.yaml", "got unknown option.* 'config'"),
        ("max_steps:", "got max_steps without a value in .*; fix: leave it out"),
        ("output_dir: ~", "got output_dir without a value"),
        (None, "that exists"),
    ],
)
def test_a_yaml_file_that_cannot_be_used_is_refused(tmp_path, content, message):
    file = tmp_path / "run.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InputError, match=message):
        read_yaml(file)


def test_yaml_has_its_own_words_for_no_and_for_nothing(tmp_path):
    """no and off are False there, and a value that is left out or ~ is None."""
    types, file = get_type_hints(TrainOptions), tmp_path / "run.yaml"
    words = {"score_centering": "off"}
    for name, kind in types.items():
        choices = {word for one in (kind, *get_args(kind)) for word in get_args(one)} & {"no", "off"}
        words |= dict(zip([name], choices, strict=False))
    assert len(words) == 6
    for name, word in words.items():
        for text in ("no", "off", "false", f'"{word}"'):
            file.write_text(f"{name}: {text}\n")
            assert read_yaml(file) == {name: word}
    lists = [name for name, kind in types.items() if kind == list[str] and name not in MISSING]
    file.write_text("".join(f"{name}: no\n" for name in words) + "".join(f"{name}: null\n" for name in lists))
    options = parse_train_options(["--config", str(file)])
    assert {name: getattr(options, name) for name in [*words, *lists]} == words | {name: [] for name in lists}
    file.write_text("bf16: off\nrun_name: null\n")
    assert read_yaml(file) == {"bf16": False, "run_name": None}


@pytest.mark.parametrize("text", ["1e-7", "1E-07", "+1.e-7", ".1e-6", "0.0000001"])
def test_every_spelling_of_a_number_is_one_in_yaml(tmp_path, text):
    (tmp_path / "run.yaml").write_text(f"lr_scheduler_kwargs: {{min_lr: {text}, of: [{text}]}}\nrun_name: {text}\n")
    content = read_yaml(tmp_path / "run.yaml")
    assert content == {"lr_scheduler_kwargs": {"min_lr": 1e-7, "of": [1e-7]}, "run_name": text}
    assert _named_value(f"probability={text}") == ("probability", 1e-7)
    (tmp_path / "words.yaml").write_text("chat_template_kwargs: {a: 1e, b: e-7, c: 1e-7x, d: 1e7.5, e: 0x1e-7}\n")
    words = read_yaml(tmp_path / "words.yaml")["chat_template_kwargs"]
    assert list(words.values()) == ["1e", "e-7", "1e-7x", "1e7.5", "0x1e-7"]


@pytest.mark.parametrize("text", ["no", "Yes", "010", "1.10", "2023_01", "0x1F", "12:30:45", "2024-01-01", "1e3"])
def test_what_is_text_stays_as_it_is_written_in_yaml(tmp_path, text):
    """The Norwegian half of a dataset is "no", and not "False"."""
    file = tmp_path / "run.yaml"
    names = ("run_name", "dataset_config", "dataset_split", "prompt_column", "system_prompt", "hub_model_id")
    lists = ("report_to", "lora_target_modules", "vllm_server_base_url")
    file.write_text("".join(f"{name}: {text}\n" for name in names) + "".join(f"{name}: [{text}]\n" for name in lists))
    assert read_yaml(file) == dict.fromkeys(names, text) | {name: [text] for name in lists}
    options = parse_train_options(["--config", str(file)])
    assert {getattr(options, name) for name in names} == {text}
    file.write_text("seed: 1_0\nbf16: no\nresume_from_checkpoint: yes\nscale_rewards: off\nrun_name: ~\n")
    assert list(read_yaml(file).values()) == [10, False, True, False, None]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fly"], "InputError: got the command 'fly'"),
        (["recipes", "demo"], "InputError: got recipes with demo, want it alone"),
        (["train", "--model", "m"], "InputError: got --model without --dataset and --reward-funcs, want all three, or"),
        (["train", "--model", "m", "--teacher-model", "t"], "InputError: got a teacher_model with distillation_coef=0"),
        (
            ["train", "--model", "m", "--teacher-model", "t", "--distillation-coef", "1"],
            "InputError: got --model without --dataset, want",
        ),
        (["train", "--dataset", "d.jsonl"], "InputError: got --dataset without --model and --reward-funcs, want all"),
        (["train", "--task", "reasoning_gym:a"], "InputError: got --task reasoning_gym:a without --model, want one to"),
        (
            ["train", "--task", "reasoning_gym:a", "--model", "m", "--dataset", "d"],
            "InputError: got --task reasoning_gym:a and --dataset d, want one of them",
        ),
        (
            ["train", "--eval-dataset", "held_out.jsonl"],
            "InputError: got the built-in task arithmetic and --eval-dataset held_out.jsonl, want one of them",
        ),
        (
            ["train", "--task", "sums", "--model", "m"],
            "InputError: got --task sums, want arithmetic, calc",
        ),
        (["train", "--task-options", "a=1"], "InputError: got --task-options a=1 without --task"),
        (["train", "--tools", "m:f"], "InputError: got --tools or --environment-factory without --model"),
        (["train", "--environment-factory", "m:F"], "InputError: got --tools or --environment-factory without --model"),
        (["train", "--task", "arithmetic", "--task-options", "a=1"], "InputError: got --task-options a=1 for arithm"),
        *(
            (
                ["train", "--model", "m", "--task", "reasoning_gym:a", "--task-options", *options],
                f"InputError: {message}",
            )
            for options, message in (
                (
                    ["heldout_size=9"],
                    "got --task-options heldout_size=..., want options of the generator alone; fix: --ev",
                ),
                (
                    ["read_answer=last"],
                    "got --task-options read_answer=..., want options of the generator alone; fix: re",
                ),
                (["a=1", "a=2"], "got --task-options a=1 a=2, want each name once; fix"),
            )
        ),
        (["tasks", "sums"], "InputError: got the task 'sums', which has no options"),
        (["train", "--num-generations", "7"], "InputError: got an effective batch of 512"),
    ],
)
def test_errors_end_the_command_with_their_message(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert str(exit.value).startswith(f"fused-grpo: {message}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("source", ["command line", "file"])
def test_an_option_out_of_range_is_refused_in_one_line(source, tmp_path):
    (tmp_path / "run.yaml").write_text("epsilon: -1\n")
    where = ["--epsilon", "-1"] if source == "command line" else ["--config", str(tmp_path / "run.yaml")]
    with pytest.raises(SystemExit) as exit:
        main(["train", *where])
    assert str(exit.value).startswith("fused-grpo: InputError: got epsilon=-1.0, want a finite value >= 0")


def test_a_mapping_is_json_on_the_command_line_and_either_in_yaml(tmp_path):
    value, file = {"a": [1, None], "b": {"c": True}}, tmp_path / "run.yaml"
    given = [text for name in MAPPINGS for text in (f"--{name.replace('_', '-')}", json.dumps(value))]
    sources = [["--model", "m", *given], ["--model", "m", "--config", str(file)]]
    for written in (dict.fromkeys(MAPPINGS, value), dict.fromkeys(MAPPINGS, json.dumps(value))):
        file.write_text(json.dumps(written))  # which is YAML, too
        for arguments in sources:
            options = parse_train_options(arguments)
            assert all(getattr(options, name) == value for name in MAPPINGS)
    options = parse_train_options([*sources[1], "--generation-kwargs", "None"])
    assert options.generation_kwargs is None


def test_a_mapping_that_is_none_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        parse_train_options(["--model", "m", "--generation-kwargs", "[1]"])
    assert "want a JSON object" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], None),
        (["--resume"], True),
        (["--resume-from-checkpoint", "True"], True),
        (["--resume-from-checkpoint", "runs/a/checkpoint-5"], "runs/a/checkpoint-5"),
        (["--resume", "--resume-from-checkpoint", "there"], "there"),
    ],
)
def test_a_run_is_resumed_by_a_flag_or_from_a_path(arguments, expected):
    assert parse_train_options(["--model", "m", *arguments]).trainer_args().resume_from_checkpoint == expected


def test_an_option_of_trl_that_is_missing_is_refused_with_its_reason(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: m\nfp16: false\ntop_k: 5\n")
    assert parse_train_options(["--config", str(file)]).top_k == 5
    file.write_text("model: m\nfp16: true\n")
    with pytest.raises(UnsupportedError, match=r"got fp16=True, .*bf16 or fp32"):
        parse_train_options(["--config", str(file)])
    with pytest.raises(UnsupportedError, match=r"got --vllm-group-port, .*shared memory"):
        parse_train_options(["--model", "m", "--vllm-group-port=5"])


def test_a_misspelt_option_is_answered_with_the_right_one(tmp_path):
    (tmp_path / "run.yaml").write_text("lerning_rate: 1\n")
    with pytest.raises(InputError, match="did you mean 'learning_rate'"):
        read_yaml(tmp_path / "run.yaml")


def test_a_recipe_is_found_by_its_name_unless_a_file_has_it(tmp_path, monkeypatch):
    assert find_config("demo").name == "demo.yaml"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").write_text("seed: 5\n")
    assert parse_train_options(["--model", "m", "--config", "demo"]).seed == 5
    (tmp_path / "gsm8k").mkdir()  # of the dataset
    assert find_config("gsm8k").is_file()
    with pytest.raises(InputError, match="or one of these recipes: calculator, demo, gsm8k, gsm8k-1gpu"):
        parse_train_options(["--config", "no-such-thing"])


def test_help_shows_every_option_with_its_docstring_in_sections(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for name, text in field_docstrings(TrainOptions).items():
        assert f"--{name.replace('_', '-')}" in shown
        assert text in shown
    for title in SECTIONS.values():
        assert f"{title} options" in shown


def test_every_field_has_a_docstring_and_every_section_a_first_field():
    names = {field.name for field in own_fields(TrainOptions)}
    assert names == field_docstrings(TrainOptions).keys()
    assert SECTIONS.keys() <= names
    assert field_docstrings(TrainOptions)["epsilon"] == field_docstrings(GRPOConfig)["epsilon"]


def test_a_dataset_may_be_a_function_and_its_failure_is_a_data_error(tmp_path):
    (tmp_path / "mine.py").write_text("def rows(split):\n    return [{'prompt': split}] if split == 'a' else 1 / 0\n")
    options = TrainOptions(model="m", dataset=f"{tmp_path / 'mine.py'}:rows", dataset_split="a")
    assert load_prompts(options, held_out=False) == [{"prompt": "a"}]
    options.dataset_split = "b"
    with pytest.raises(DataError, match="raised ZeroDivisionError"):
        load_prompts(options, held_out=False)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--bf16 --use-vllm", {"bf16": True, "use_vllm": True}),
        ("--no-bf16 --no_use_vllm --max-steps 3", {"bf16": False, "use_vllm": False, "max_steps": 3}),
        ("--bf16 true --use-vllm=False --tf32 none", {"bf16": True, "use_vllm": False, "tf32": None}),
        (
            "--gradient_checkpointing False --disable_dropout True",
            {"gradient_checkpointing": False, "disable_dropout": True},
        ),
        ("--no-gradient-checkpointing --disable-dropout", {"gradient_checkpointing": False, "disable_dropout": True}),
        ("--dry-run False --use-peft --run-name True", {"dry_run": False, "use_peft": True, "run_name": "True"}),
        ("--generate-ahead --bf16", {"generate_ahead": True, "bf16": True}),
        ("--generate_ahead 4", {"generate_ahead": 4}),
        ("--generate-ahead=2 --no-bf16", {"generate_ahead": 2, "bf16": False}),
        ("--generate-ahead true --max-steps 3", {"generate_ahead": True, "max_steps": 3}),
        ("--no-generate-ahead", {"generate_ahead": False}),
    ],
)
def test_what_is_true_or_false_needs_no_value_and_may_have_one(arguments, expected):
    options = parse_train_options(["--model", "m", *arguments.split()])
    assert {name: getattr(options, name) for name in expected} == expected


@pytest.mark.parametrize(
    "argument", ["--bf16=maybe", "--no-bf16=True", "--no-model", "--shuffle-dataset=2", "--dry-run=2"]
)
def test_other_values_of_flags_are_refused(argument, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse_train_options(["--model", "m", argument])
    assert "--" in capsys.readouterr().err


def test_a_report_is_written_again_from_the_logs(tmp_path, capsys):
    RunLog(tmp_path).log_metrics({"step": 1, "reward": 0.5})
    main(["report", str(tmp_path)])
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert "training reward 0.500" in (tmp_path / "report.html").read_text()
    with pytest.raises(SystemExit, match="CheckpointError"):
        main(["report", str(tmp_path / "nowhere")])
    for arguments, error in (
        ([], "want one directory of a run"),
        (["x" * 5000], "File name too long.*; fix: its path"),
    ):
        with pytest.raises(SystemExit, match=error):
            main(["report", *arguments])


def test_lora_options_become_a_peft_config():
    assert TrainOptions().peft_config() is None
    config = parse_train_options(["--model", "m", "--use-peft", "--lora-r", "4"]).peft_config()
    assert (config.r, config.lora_alpha, config.target_modules) == (4, 32, "all-linear")


def test_the_command_of_a_run_gives_its_model_data_and_adapter_again():
    arguments = ["--config", "smollm2", "--use-peft", "--lora-r", "4", "--task-options", "min_terms=2", "max_digits=1"]
    options = parse_train_options([*arguments, "--seed", "7"])
    program, command, *again = shlex.split(options.command())
    assert (program, command) == ("fused-grpo", "train")
    repeated = parse_train_options(again)
    for entry in own_fields(TrainOptions):
        if entry.name not in {field.name for field in own_fields(GRPOConfig)} | {"config"}:
            assert getattr(repeated, entry.name) == getattr(options, entry.name), entry.name
    assert "--seed" not in again  # run.json has it, as all options of the trainer


def test_recipes_are_listed_with_what_they_are(capsys):
    main(["recipes"])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[0] == "gsm8k-1gpu" and "one GPU" in line for line in lines)
    assert all(Path(line).is_file() for line in lines if line.endswith(".yaml"))


def test_env_reports_versions_and_implementations(capsys):
    main(["env"])
    shown = capsys.readouterr().out
    assert "torch" in shown
    assert "impl torch" in shown


def test_a_pipe_that_is_not_standard_output_ends_no_command_in_silence(monkeypatch):
    def broken(arguments):
        raise BrokenPipeError("of a process that has ended")

    monkeypatch.setattr("fused_grpo.trainer.cli.main.run", broken)
    with pytest.raises(BrokenPipeError, match="of a process"):
        main(["env"])
