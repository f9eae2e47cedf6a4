"""Tasks of reasoning-gym: rows, reward, errors; three of them trained by one command each."""

import functools
import json
import logging
import os
import subprocess
import sys
import time
from unittest import mock

import pytest
import torch
from datasets import Dataset

from fused_grpo.errors import DataError, InputError
from fused_grpo.trainer.cli.main import main
from fused_grpo.trainer.rewards import Rewards
from fused_grpo.trainer.tasks import reasoning_gym as room
from fused_grpo.trainer.tasks import reasoning_gym_task
from fused_grpo.trainer.tasks.entries import from_text, tagged_answer
from fused_grpo.trainer.tasks.named import named_task

reasoning_gym = pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (fused-grpo[tasks])")

SMALL = {"min_digits": 1, "max_digits": 1, "max_terms": 2}


@pytest.fixture(scope="module", autouse=True)
def one_process_makes_all_entries():
    """Reasoning-gym takes a second to import, and each task would have a process of its own."""
    with mock.patch.object(room, "IsolatedFunction", functools.cache(room.IsolatedFunction)):
        yield


@pytest.fixture(scope="module")
def sums():
    return reasoning_gym_task("chain_sum", size=40, heldout_size=10)


def score(task, row, *completions):
    answers, entries = ([row[name]] * len(completions) for name in ("answer", "entry"))
    return task.reward(completions=completions, answer=answers, entry=entries)


def test_rows_are_those_of_the_generator_and_survive_arrow(sums):
    made = reasoning_gym.create_dataset("chain_sum", seed=0, size=40)
    assert [row["prompt"] for row in sums.train] == [entry["question"] for entry in made]
    assert from_text(sums.train[3]["entry"]) == made[3]
    assert {0.0 <= row["difficulty"] <= 1.0 for row in [*sums.train, *sums.heldout]} == {True}
    rows = Dataset.from_list(sums.train)
    assert rows.to_list() == sums.train
    assert score(sums, rows[3], rows[3]["answer"]) == [1.0]


def test_train_and_held_out_share_no_question():
    task = reasoning_gym_task("chain_sum", size=150, heldout_size=60, **SMALL)  # of 210 such sums
    train, heldout = ({row["prompt"] for row in rows} for rows in (task.train, task.heldout))
    assert train.isdisjoint(heldout)
    assert (len(train), len(heldout)) == (len(task.train), len(task.heldout))  # each once
    assert 0 < len(task.train) < 150
    other = reasoning_gym_task("chain_sum", size=3, heldout_size=60, **SMALL)
    assert other.heldout == task.heldout  # whatever the number of rows to train on


def test_where_all_questions_are_held_out_it_is_said():
    with pytest.raises(DataError, match=r"no question of coin_flip to train on: all of 2 .* fix: fewer held-out"):
        reasoning_gym_task("coin_flip", size=2, heldout_size=200, min_trials=3, max_trials=3)


ROWS = """
import json, reasoning_gym
from fused_grpo.trainer.tasks import reasoning_gym_task
task = reasoning_gym_task("word_ladder", size=8, heldout_size=0)
own = reasoning_gym.create_dataset("word_ladder", seed=0, size=8)
print(json.dumps([[row["answer"] for row in task.train], [entry["answer"] for entry in own]]))
"""


def test_rows_do_not_depend_on_the_process():
    """`word_ladder` goes through sets of strings. A fork would have the hash seed of the interpreter it came from."""
    seeds = [{**os.environ, "PYTHONHASHSEED": seed} for seed in "12"]
    outputs = [subprocess.run([sys.executable, "-c", ROWS], env=env, capture_output=True).stdout for env in seeds]
    (first, own), (second, other) = map(json.loads, outputs)
    assert first == second
    assert own != other  # without a process of a fixed seed


def test_the_reward_is_the_verifiers(sums):
    row = sums.train[0]
    right = row["answer"]
    texts = [right, f"It is {right}.", f"<answer>{right}.0</answer>", f"<answer>1{right}</answer>", "", "nothing"]
    partly = len(right) / (len(right) + 1)
    assert score(sums, row, *texts) == pytest.approx([1.0, 1.0, 1.0, partly, 0.0, 0.0])
    messages = [{"role": "assistant", "content": right}]
    assert score(sums, row, messages) == [1.0]
    assert Rewards([sums.reward]).names == ["chain_sum"]
    strict = reasoning_gym_task("chain_sum", size=1, heldout_size=0, read_answer=tagged_answer)
    assert score(strict, row, right, f"<answer>{right}</answer>") == [0.0, 1.0]


HOSTILE = [
    "<answer>[__import__('os')._exit(1)]</answer>",
    "<answer>[exit()]</answer>",
    "<answer>[__import__('os').kill(__import__('os').getppid(), 9) if False else 1/0]</answer>",
    "<answer>[" + "(" * 5000 + "</answer>",
    "<answer>['\ud800']</answer>",
]


def test_what_a_model_writes_cannot_end_the_run(caplog):
    """The verifier of spiral_matrix evaluates answers in brackets."""
    task = reasoning_gym_task("spiral_matrix", size=1, heldout_size=0)
    row = task.train[0]
    with caplog.at_level(logging.WARNING):
        assert score(task, row, *HOSTILE, row["answer"]) == [0.0] * len(HOSTILE) + [1.0]
    assert "its reward is 0.0" in caplog.text  # of the process that has ended


def test_an_answer_that_takes_for_ever_is_worth_nothing(limited):
    limited(room.SCORER, 1.0)
    task = reasoning_gym_task("countdown", size=1, heldout_size=0)
    begun = time.monotonic()
    assert score(task, task.train[0], "<answer>9**9**9**9</answer>", "1") == [0.0, pytest.approx(0.0, abs=0.05)]
    assert time.monotonic() - begun > 1


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chain_sun", {}, "want one of the .* generators .*did you mean chain_sum"),
        ("chain_sum", {"min_term": 2}, "the option 'min_term' .* want one of min_terms, .*mean 'min_terms'"),
        ("chain_sum", {"min_terms": 5, "max_terms": 2}, "min_terms=5, max_terms=2 .*max_terms must be >= min_terms"),
        ("chain_sum", {"min_terms": "two"}, "min_terms='two' for chain_sum, which it refuses"),
        ("chain_sum", {"size": 0}, "size=0, want a whole number of at least 1"),
        ("chain_sum", {"seed": -1}, "seed=-1, want a whole number"),
    ],
)
def test_a_mistake_is_answered_with_what_would_be_right(name, options, message):
    with pytest.raises(InputError, match=f"(?s)^got .*{message}"):
        reasoning_gym_task(name, **options)


def test_options_of_the_command_line_have_types(capsys):
    options = ["min_terms=3", "max_terms=3", "allow_negation=true", "seed=5"]
    task = named_task("reasoning_gym:chain_sum", options, limit=4, eval_limit=2)
    direct = {"min_terms": 3, "max_terms": 3, "allow_negation": True, "seed": 5, "size": 4, "heldout_size": 2}
    assert task.train == reasoning_gym_task("chain_sum", **direct).train
    for wrong in ("min_terms", "=3", "size=4", "min_terms=[1"):
        with pytest.raises(InputError, match=r"^got --task-options .*, w"):
            named_task("reasoning_gym:chain_sum", [wrong], limit=1, eval_limit=1)
    main(["tasks", "reasoning_gym:chain_sum"])
    assert capsys.readouterr().out.splitlines()[:2] == ["min_terms=2", "max_terms=6"]
    main(["tasks"])
    assert "reasoning_gym:spell_backward" in capsys.readouterr().out.split()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a small model of printable characters, one token each."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    tokens = ["<pad>", "<eos>", *map(chr, range(32, 127)), "\n"]
    backend = Tokenizer(models.WordLevel({token: n for n, token in enumerate(tokens)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    folder = tmp_path_factory.mktemp("model")
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=len(tokens),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


RUN = "--use-vllm False --max-steps 2 --max-completion-length 4 --save-strategy no --num-generations 4 --limit 6"
RUN += " --per-device-train-batch-size 8 --eval-limit 3 --reward-funcs length=2"


@pytest.mark.parametrize("task", ["chain_sum", "spell_backward", "count_bits"])
def test_a_task_is_trained_by_one_command(task, model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["train", "--model", str(model), "--task", f"reasoning_gym:{task}", *RUN.split()]
    main([*command, "--dry-run"])
    assert "6 prompts" in capsys.readouterr().out
    main(command)
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1].startswith("held-out reward: ")
    steps = [json.loads(line) for line in (tmp_path / "runs/grpo/metrics.jsonl").read_text().splitlines()]
    assert {name for name in steps[1] if name.endswith("/mean")} >= {
        f"rewards/{task}/mean",
        "rewards/length_reward/mean",
    }
