"""The first run of a user: their own columns, a reward by name, a plan before anything slow, errors that name flags."""

import json
import os
import re
import sys
import time

import pytest

from fused_grpo.errors import DataError, InputError
from fused_grpo.trainer.cli.main import main
from fused_grpo.trainer.cli.options import RECIPES, TrainOptions, check_combination, read_yaml
from fused_grpo.trainer.cli.train import load_prompts
from fused_grpo.trainer.engines import engine_choice
from fused_grpo.trainer.logging import console

QUESTIONS = [{"question": f"{n}+{n}=", "answer": f"I add.\n#### {2 * n}"} for n in range(10, 16)]


@pytest.fixture
def questions(tmp_path, monkeypatch, make_model, tokenizer):
    """A folder with a model and a data set, as the working directory."""
    make_model().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def options_of(**given) -> TrainOptions:
    return TrainOptions(**{"model": "model", "dataset": "questions.jsonl", **given})


def test_the_first_command_works_as_typed_and_shows_its_plan_first(questions, monkeypatch, capsys):
    shown_before = []

    class SlowEngine(engine_choice.TransformersEngine):
        def __init__(self, *args, **options):
            time.sleep(0.3)
            shown_before.append(capsys.readouterr().out)
            super().__init__(*args, **options)

    monkeypatch.setattr(engine_choice, "TransformersEngine", SlowEngine)
    monkeypatch.setattr(console, "SLOW", 0.1)
    command = "train --model model --dataset questions.jsonl --prompt-column question --answer-column answer"
    quick = "--use-vllm False --max-steps 2 --max-completion-length 4 --save-strategy no"
    main([*command.split(), "--reward-funcs", "accuracy", *quick.split()])
    (before,) = shown_before
    for text in (
        "accuracy",
        "model (",
        "parameters)",
        "6 prompts",
        "transformers",
        "8 sequences = 1 prompt x 8 completions",
    ):
        assert text in before
    assert "2 optimizer steps" in before
    assert re.search(r"memory +about \d", before)
    assert before.rstrip().endswith("starting the engine: transformers ...")
    command = json.loads((questions / "runs" / "grpo" / "run.json").read_text())["command"]
    assert "--model=model" in command
    assert "--reward-funcs accuracy" in command
    assert "--reward-funcs accuracy" in (questions / "runs" / "grpo" / "report.html").read_text()
    after = capsys.readouterr().out
    assert re.search(r"^starting the engine: transformers: 0\.\ds$", after, re.MULTILINE)
    assert "╭" not in after
    assert after.count("report: runs/grpo/report.html") == after.count("model: runs/grpo/final") == 1
    steps = [json.loads(line) for line in (questions / "runs" / "grpo" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert "rewards/accuracy/mean" in steps[0]


def test_columns_get_the_names_that_model_and_rewards_read(questions):
    asked = {"prompt_column": "question", "answer_column": "answer"}
    rows = load_prompts(options_of(**asked, reward_funcs=["accuracy"], limit=2), held_out=False)
    assert list(rows) == [{"prompt": row["question"], "answer": row["answer"]} for row in QUESTIONS[:2]]
    (row, *_) = load_prompts(options_of(**asked, reward_funcs=["accuracy_reward"], limit=99), held_out=False)
    assert row == {"prompt": QUESTIONS[0]["question"]} | dict.fromkeys(("answer", "solution"), QUESTIONS[0]["answer"])
    (questions / "mine.py").write_text("def rows(split):\n    return [{'prompt': 'old', 'q': split, 'a': 1}]\n")
    options = TrainOptions(model="m", dataset="mine.py:rows", prompt_column="q", answer_column="a", eval_limit=1)
    options.eval_dataset = options.dataset
    assert load_prompts(options, held_out=False) == [{"prompt": "train", "answer": 1}]
    assert load_prompts(options, held_out=True) == [{"prompt": "test", "answer": 1}]


@pytest.mark.parametrize(
    "names",
    [["accuracy", "accuracy_reward"], ["cosine=64"], ["cosine=64", "mine.py:reads_answer"], ["accuracy_reward"]],
)
@pytest.mark.parametrize("source", ["questions.jsonl", "mine.py:rows"])
def test_all_rewards_get_the_answer_under_the_name_they_read(questions, names, source):
    (questions / "mine.py").write_text(f"def rows(split):\n    return {QUESTIONS!r}\n")
    options = options_of(prompt_column="question", answer_column="answer", reward_funcs=names, dataset=source)
    rows = load_prompts(options, held_out=False)
    assert [(row["answer"], row["solution"]) for row in rows] == [(row["answer"], row["answer"]) for row in QUESTIONS]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"with the columns 'question', 'answer', want 'prompt'; fix: --prompt-column"),
        ({"prompt_column": "question", "answer_column": "truth"}, r"want 'truth'; fix: --answer-column"),
        ({"prompt_column": "question", "reward_funcs": ["accuracy_reward"]}, r"'solution'.*; fix: --answer-column"),
        ({"prompt_column": "question", "reward_funcs": ["cosine=64"]}, r"'solution'.*; fix: --answer-column"),
    ],
)
def test_data_with_other_columns_is_refused_with_the_flags(questions, given, message):
    with pytest.raises(DataError, match=message):
        load_prompts(options_of(**given), held_out=False)


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ({"task": "arithmetic", "dataset": "d.jsonl"}, "leave one out"),
        ({"task": "arithmetic", "model": "m", "dataset": "d.jsonl"}, "leave one out"),
        ({"eval_dataset": "d.jsonl"}, "leave one out, or add --model"),
    ],
)
def test_a_task_with_rows_beside_it_is_refused_with_a_fix_that_works(given, fix):
    with pytest.raises(InputError, match=f"a task has rows of its own; fix: {fix}$"):
        check_combination(TrainOptions(**given))


def test_held_out_prompts_that_cannot_be_loaded_can_be_left_out():
    with pytest.raises(DataError, match=r"\(--eval-dataset; None leaves it out\)"):
        load_prompts(TrainOptions(model="m", dataset="d", eval_dataset="nowhere.jsonl"), held_out=True)


def test_a_limit_below_one_is_refused():
    with pytest.raises(InputError, match="got limit=0"):
        TrainOptions(limit=0)


def test_help_has_the_defaults_of_a_real_run_and_names_those_of_the_demo(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    assert all(len(line) <= 80 for line in shown.splitlines())
    shown = " ".join(re.sub("[│╭╰─]", " ", shown).split())
    real, demo = TrainOptions(), read_yaml(RECIPES / "demo.yaml")
    assert "Peak learning rate. (default: 1e-06; demo: 0.001)" in shown
    for name, value in demo.items():
        default = re.search(rf"--{name.replace('_', '-')}[ ,].*?\(default: (.*?)\)", shown)[1]
        differs = value != getattr(real, name)
        assert default == f"{getattr(real, name)}" + differs * f"; demo: {value}"


def test_rewards_are_listed_with_their_columns(capsys):
    main(["rewards"])
    shown = capsys.readouterr().out
    assert all(len(line) <= 80 for line in shown.splitlines())
    for text in ("accuracy ", "accuracy_reward", "length=TOKENS", "overlong=MAX,CACHE", "reads the column 'answer'"):
        assert text in shown


def test_a_reader_that_leaves_early_ends_the_command_quietly(monkeypatch, capfd):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        with pytest.raises(SystemExit) as exit:
            main(["--help"])
        monkeypatch.undo()
    assert exit.value.code == 141
    assert capfd.readouterr().err == ""
