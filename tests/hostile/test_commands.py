"""What the command and its files are given: options that nothing reads, files that end the process, templates."""

import json
import re

import pytest
from small_runs import ROWS, model_of, trainer_in

from fused_grpo.trainer.cli.main import main
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.recipes.arithmetic import build_tokenizer

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if enable_thinking %}={% endif %}"
CONVERSATIONS = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]


@pytest.fixture
def dry_run(tmp_path, monkeypatch):
    """Runs `fused-grpo train --dry-run` in a folder with a model, rows and rewards."""
    monkeypatch.chdir(tmp_path)
    model_of().save_pretrained("model")
    build_tokenizer().save_pretrained("model")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "rewards.py").write_text("def reward(completions, **columns):\n    return [0.0] * len(completions)\n")
    warn_once.cache_clear()
    usual = {"--model": "model", "--dataset": "rows.jsonl", "--reward-funcs": "rewards.py:reward", "--output-dir": "o"}

    def run(**options: str) -> None:
        given = usual | {f"--{name.replace('_', '-')}": value for name, value in options.items()}
        main(["train", "--dry-run", "--no-use-vllm", *(word for option in given.items() for word in option)])

    return run


LEAVES = [
    "import sys; sys.exit(0)",
    "exit()",
    "raise SystemExit('bye')",
    "import argparse; argparse.ArgumentParser().error('x')",
]


@pytest.mark.parametrize("source", LEAVES)
@pytest.mark.parametrize("option", ["reward_funcs", "dataset", "tools", "environment_factory"])
def test_a_file_that_ends_the_process_is_no_success(dry_run, tmp_path, option, source):
    (tmp_path / "leaves.py").write_text(f"{source}\ndef thing(*given, **columns):\n    return []\n")
    with pytest.raises(SystemExit) as ended:
        dry_run(**{option: "leaves.py:thing"})
    assert "leaves.py:thing', which cannot be loaded: it exits with" in str(ended.value)


REFUSED = {
    "one column for both": ({"answer_column": "prompt"}, "got 'prompt' as --prompt-column and --answer-column"),
    "an address": ({"dataset": "https://example.com/x.jsonl"}, "got the dataset https.*want a file, a hub id"),
    "no such module": ({"dataset": "nowhere:rows"}, "got dataset 'nowhere:rows', which cannot be loaded"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_data_that_cannot_be_is_named(dry_run, name):
    options, message = REFUSED[name]
    with pytest.raises(SystemExit) as ended:
        dry_run(**options)
    assert re.search(message, str(ended.value))


UNREAD = {
    "a rank": ({"lora_r": "4"}, "got lora_r=4 without --use-peft"),
    "several": ({"lora_alpha": "8", "lora_target_modules": "q_proj"}, "lora_alpha=8, lora_target_modules=.'q_proj'."),
    "a limit": ({"eval_limit": "2"}, "got eval_limit=2 without --eval-dataset"),
}


@pytest.mark.parametrize("name", UNREAD)
def test_options_of_something_else_are_said(dry_run, caplog, name):
    options, message = UNREAD[name]
    dry_run(**options)
    assert re.search(message, caplog.text)


def test_options_that_are_read_are_not_said(dry_run, caplog):
    dry_run(lora_r="4", use_peft="True", eval_dataset="rows.jsonl", eval_limit="2")
    assert "nothing reads it" not in caplog.text


def chat_tokenizer(template: str):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("given", "is_said"),
    [
        ({"enable_thinkin": True}, True),
        ({"enable_thinking": True}, False),
        ({"enable_thinking": True, "reasoning_effort": "low"}, True),
        ({"truncation": False, "tools": None}, False),
        ({"chat_template": "{{ mine }}1", "mine": 2}, False),
        ({"chat_template": "{{ messages[0].content }}", "enable_thinking": True}, True),
    ],
)
def test_a_variable_that_the_template_does_not_have_is_said(tmp_path, caplog, given, is_said):
    warn_once.cache_clear()
    trainer_in(tmp_path, rows=CONVERSATIONS, processing_class=chat_tokenizer(TEMPLATE), chat_template_kwargs=given)
    assert ("which the chat template does not read" in caplog.text) is is_said


@pytest.mark.parametrize(
    ("template", "is_said"),
    [
        (TEMPLATE, False),
        ("{{ '1+1=' }}", True),
        ("{{ messages[0].text }}=", True),
        ("{{ messages[0].content[1:] }}", True),
    ],
)
def test_prompts_that_a_model_cannot_tell_apart_are_said(tmp_path, caplog, template, is_said):
    warn_once.cache_clear()
    trainer_in(tmp_path, rows=CONVERSATIONS, processing_class=chat_tokenizer(template))
    assert ("differ and have the same tokens" in caplog.text) is is_said


def ending(tokenizer):
    """It puts an end of sequence behind every text."""
    from tokenizers import processors

    template = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", tokenizer.eos_token_id)])
    tokenizer.backend_tokenizer.post_processor = template
    return tokenizer


ENDS = {
    "a tokenizer's": (lambda: (ROWS, ending(build_tokenizer())), True),
    "a template's": (lambda: (CONVERSATIONS, chat_tokenizer("{{ messages[0].content + eos_token }}")), True),
    "of the user's turn": (lambda: (CONVERSATIONS, chat_tokenizer("{{ messages[0].content + eos_token }}=")), False),
    "of one prompt": (lambda: ([{"prompt": "1+1=<eos>"}, *({"prompt": row["prompt"]} for row in ROWS)], None), False),
}


@pytest.mark.parametrize("name", ENDS)
def test_prompts_that_have_ended_already_are_said(tmp_path, caplog, name):
    warn_once.cache_clear()
    make, is_said = ENDS[name]
    rows, tokenizer = make()
    trainer_in(tmp_path, rows=rows, processing_class=tokenizer or build_tokenizer())
    assert ("that end with the end-of-sequence token" in caplog.text) is is_said
