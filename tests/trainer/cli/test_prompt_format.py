"""`--prompt-format`: text becomes a user's message where the tokenizer has a chat template, and the banner shows it."""

import json
import shutil

import pytest
from datasets import Dataset, IterableDataset

from fused_grpo.errors import DataError, InputError
from fused_grpo.trainer.cli.main import main
from fused_grpo.trainer.cli.options import TrainOptions
from fused_grpo.trainer.cli.train import in_format
from fused_grpo.trainer.data.datasets import as_conversations, check_dataset
from fused_grpo.trainer.data.prompts import rendered

TEMPLATE = (
    "{% for message in messages %}{{ 'a' if message['role'] == 'system' else 'b' }}{{ message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}cc{% endif %}"
)
USER = {"role": "user", "content": "1+2="}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys, make_model, tokenizer):
    """A function that runs `fused-grpo train` on two data sets and a model with a chat template, or without."""
    monkeypatch.chdir(tmp_path)
    for name, prompt in (("rows", "1+2="), ("held", "3+4=")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": prompt, "answer": "3"}) + "\n")
    (tmp_path / "mine.py").write_text(
        "def seen(prompts, completions, **columns):\n"
        "    with open('seen', 'a') as file:\n"
        "        print(repr((prompts[0], type(completions[0]))), file=file)\n"
        "    return [float(n % 2) for n in range(len(completions))]\n"
    )

    def run(*arguments: str, template: str | None = TEMPLATE) -> str:
        shutil.rmtree("model", ignore_errors=True)
        make_model().save_pretrained(tmp_path / "model")
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / "model")
        sizes = "--use-vllm False --max-steps 1 --max-completion-length 2 --save-strategy no --num-generations 2"
        sizes += " --per-device-train-batch-size 2 --overwrite-output-dir --eval-dataset held.jsonl"
        given = ["--model", "model", "--dataset", "rows.jsonl", "--reward-funcs", "mine.py:seen", *sizes.split()]
        main(["train", *given, *arguments])
        return " ".join(word for word in capsys.readouterr().out.split() if word != "│")

    return run


def seen(tmp_path) -> set[str]:
    return set((tmp_path / "seen").read_text().splitlines())


def test_text_is_a_message_where_the_tokenizer_has_a_template(run, tmp_path):
    shown = run()
    assert shown.count("conversations in the model's chat template") == 1
    assert shown.count("b1+2=cc") == 1  # as the tokens are, once
    held_out = {"role": "user", "content": "3+4="}
    assert seen(tmp_path) == {repr(([prompt], list)) for prompt in (USER, held_out)}


def test_text_stays_text_where_it_is_asked_for_or_there_is_no_template(run, tmp_path):
    shown = run("--prompt-format", "plain")
    assert "plain text: the model's chat template is not used" in shown
    assert "first prompt 1+2=" in shown
    shown = run(template=None)
    assert "first prompt" not in shown
    assert "chat template" not in shown
    assert seen(tmp_path) == {repr((prompt, str)) for prompt in ("1+2=", "3+4=")}


def test_a_dry_run_shows_the_same_prompt(run, tmp_path):
    shown = run("--dry-run", "--system-prompt", "9")
    assert "conversations in the model's chat template a9b1+2=cc" in shown
    assert not (tmp_path / "seen").exists()


def test_a_conversation_without_a_template_is_refused(run):
    with pytest.raises(SystemExit, match="a tokenizer without a chat template"):
        run("--prompt-format", "chat", template=None)


def test_a_system_message_is_no_part_of_plain_text():
    with pytest.raises(InputError, match="got prompt_format='plain' with system_prompt='Add'"):
        TrainOptions(prompt_format="plain", system_prompt="Add")


@pytest.mark.parametrize(("text", "roles"), [("Add.", ["system", "user"]), ("", ["user"]), (None, ["user"])])
def test_a_system_prompt_is_the_first_message(tokenizer, text, roles):
    tokenizer.chat_template = TEMPLATE if text is None else None  # a system prompt asks for a conversation by itself
    (row,) = in_format([{"prompt": "1+2="}], TrainOptions(system_prompt=text), tokenizer)
    assert [message["role"] for message in row["prompt"]] == roles
    assert row["prompt"][-1] == USER


class Endless:
    def __iter__(self):
        while True:
            yield {"prompt": "1+2="}


def test_a_stream_stays_one_and_starts_again():
    rows = as_conversations(Endless())
    assert [next(iter(rows))["prompt"] for _ in range(2)] == [[USER], [USER]]
    assert check_dataset(rows, name="train_dataset") is rows
    stream = as_conversations(IterableDataset.from_generator(lambda: iter([{"prompt": "1+2="}])))
    assert isinstance(stream, IterableDataset)
    assert [row["prompt"] for row in stream] == [[USER]]


@pytest.mark.parametrize("given", [{"train": [{"prompt": "1"}]}, 7, "rows", [7], [{"question": "1"}], iter([])])
def test_what_is_no_dataset_is_refused_as_before(given):
    with pytest.raises(DataError) as before:
        check_dataset(given, name="train_dataset")
    with pytest.raises(DataError) as after:
        check_dataset(as_conversations(given), name="train_dataset")
    assert str(after.value) == str(before.value)


def test_conversations_stay_as_they_are_and_columns_stay():
    rows = as_conversations(Dataset.from_list([{"prompt": "1+2=", "answer": 3}]), "Add.")
    assert rows[0]["answer"] == 3
    assert as_conversations(rows, "Twice.")[0]["prompt"] == rows[0]["prompt"]


def test_a_prompt_is_shown_with_special_tokens(tokenizer):
    tokenizer.chat_template = "<eos>{{ messages[0]['content'] }}"
    assert rendered({"prompt": [USER]}, tokenizer) == "<eos>1+2="
