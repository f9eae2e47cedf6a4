"""Episodes whose calls the tokenizer's response template reads, in a form that no family has."""

import inspect
import json
import re
from pathlib import Path

import pytest
from talkers import END, TEMPLATE, talking_tokenizer
from transformers import PreTrainedTokenizerFast

from fused_grpo.errors import UnsupportedError
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.episodes.conversation import Template

HERMES = TEMPLATE[TEMPLATE.index("<tool_call>") : TEMPLATE.index("</tool_call>") + len("</tool_call>")]
LINES = (
    "[CALL {{ call.function.name }}]{% for name, value in call.function.arguments.items() %}{{ name }}={{ value }}\n"
    "{% endfor %}[/CALL]"
)
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\[CALL (?P<name>\w+)\]",
            "close": "[/CALL]",
            "repeats": True,
            "content": "kv-lines",
            "content_args": {"kv_sep": "="},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": END, "content": "text"},
    },
}
CALL = "[CALL repeat]word=7\ntimes=3\n[/CALL]"


def repeat(word: str, times: int) -> str:
    """Repeat a word.

    Args:
        word: The word.
        times: How often.
    """
    return word * times


def parameters() -> list[str]:
    """What the installed transformers reads a response with."""
    parse = getattr(PreTrainedTokenizerFast, "parse_response", None)
    return [] if parse is None else [*inspect.signature(parse).parameters]


@pytest.fixture
def tokenizer():
    return talking_tokenizer(TEMPLATE.replace(HERMES, LINES))


@pytest.fixture
def templated(tokenizer):
    if "tools" not in parameters():
        pytest.skip("transformers types no arguments by a response template")
    tokenizer.response_template = RESPONSE
    return tokenizer


def records(trainer) -> list:
    return [json.loads(line) for line in Path(trainer.args.output_dir, "rollouts.jsonl").read_text().splitlines()]


def asked(arguments: dict, **more: str) -> dict:
    """The message of a call."""
    call = {"type": "function", "function": {"name": "repeat", "arguments": arguments}}
    return {"role": "assistant", "content": "Well.", "tool_calls": [call], **more}


@pytest.mark.parametrize("begun", ["", "<think>"])
def test_the_template_reads_calls_with_typed_arguments(make_trainer, templated, begun):
    """And what the model thought, which the prompt of each turn may have begun."""
    templated.chat_template = templated.chat_template.removesuffix("{% endif %}") + begun + "{% endif %}"
    rest = "<think>".removeprefix(begun)

    def say(read: str, member: int) -> str:
        answers = re.findall(r"<answer>(.*?)</answer>", read)
        if answers:
            return f"{rest}so</think>It is {answers[-1]}."
        return f"{rest}hm</think>{('Well.' + CALL, 'No idea.')[member % 2]}"

    trainer = make_trainer(say, tools=[repeat], max_steps=1)
    trainer.train()
    call, plain, *_ = records(trainer)
    assert call["messages"] == [
        asked({"word": "7", "times": 3}, reasoning_content="hm"),
        {"role": "tool", "name": "repeat", "content": "777"},
        {"role": "assistant", "reasoning_content": "so", "content": "It is 777."},
    ]
    assert plain["messages"] == [{"role": "assistant", "reasoning_content": "hm", "content": "No idea."}]
    sample = trainer.scored.samples[0]
    assert templated.decode(sample.completion_ids) == (
        f"{rest}hm</think>Well.{CALL}{END}\n<|im_start|>user<answer>777</answer>{END}\n"
        f"<|im_start|>assistant\n{begun}{rest}so</think>It is 777.{END}"
    )
    own = templated.decode(sample.own(sample.completion_ids))
    assert own == f"{rest}hm</think>Well.{CALL}{END}{rest}so</think>It is 777.{END}"


def test_values_stay_text_where_transformers_types_none(templated):
    """As before 5.15, where no tools are taken."""
    parse = templated.parse_response
    templated.parse_response = lambda response, schema=None, *, prefix=None: parse(response, schema, prefix=prefix)
    template = Template(templated, None, stop_ids=[templated.eos_token_id])
    prompt = template.encode([{"role": "user", "content": "7?"}], [repeat])
    message = template.reply(templated(f"Well.{CALL}{END}")["input_ids"], prompt, [repeat])
    assert message == asked({"word": "7", "times": "3"})


def test_a_response_schema_reads_a_turn_without_its_prompt(make_trainer, tokenizer):
    """As before 5.13, where neither prompt nor tools are taken; this stands for its parser."""

    def parse_response(response, schema=None):
        text = tokenizer.decode(response)
        match = re.search(r"\[CALL (\w+)\](.*)\[/CALL\]", text, re.DOTALL)
        if match is None:
            return {"role": "assistant", "content": text}
        arguments = dict(line.split("=") for line in match[2].split())
        if "times" in arguments:
            arguments["times"] = int(arguments["times"])
        call = {"type": "function", "function": {"name": match[1], "arguments": arguments}}
        return {"role": "assistant", "content": text[: match.start()], "tool_calls": [call]}

    tokenizer.response_schema, tokenizer.parse_response = {"type": "object"}, parse_response
    say = lambda read, _: "It is 777." if "<answer>777<" in read else f"Well.{CALL}"  # noqa: E731
    trainer = make_trainer(say, tools=[repeat], max_steps=1)
    trainer.train()
    for record in records(trainer):
        assert record["messages"] == [
            asked({"word": "7", "times": 3}),
            {"role": "tool", "name": "repeat", "content": "777"},
            {"role": "assistant", "content": "It is 777."},
        ]


def test_a_schema_that_transformers_does_not_read_is_left_to_the_family(make_trainer, caplog):
    """As after 5.14, where loading drops it; set by hand, it would read nothing."""
    tokenizer = talking_tokenizer()
    tokenizer.response_schema = {"type": "object"}

    def parse_response(response, **options):
        raise AttributeError("This tokenizer does not have a `response_template` for parsing chat responses!")

    tokenizer.parse_response = parse_response
    said = tokenizer('<tool_call>{"name": "repeat", "arguments": {"times": 3}}</tool_call>')["input_ids"]
    warn_once.cache_clear()
    (one,) = Template(tokenizer, None, stop_ids=[tokenizer.eos_token_id]).reply(said, [], [])["tool_calls"]
    assert one["function"] == {"name": "repeat", "arguments": {"times": 3}}
    assert "with a response_schema, which this version of transformers does not read; fix:" in caplog.text


def test_a_response_template_that_reads_no_call_is_refused(make_trainer, templated):
    fields = {name: field for name, field in RESPONSE["fields"].items() if name != "tool_calls"}
    templated.response_template = {**RESPONSE, "fields": fields}
    with pytest.raises(UnsupportedError, match=r"got the chat template's tool call '\[CALL .* which is read as none"):
        make_trainer(lambda *_: CALL, tools=[repeat])
