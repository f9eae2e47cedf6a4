"""The chat templates of the families themselves, as TRL keeps them."""

import json
import re
import time

import pytest
from talkers import END, talking_tokenizer

from fused_grpo.errors import UnsupportedError
from fused_grpo.trainer.episodes.calls import family_of
from fused_grpo.trainer.episodes.conversation import Template

trl = pytest.importorskip("trl.chat_template_utils", reason="TRL is not installed")
TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in trl._CHAT_TEMPLATES_DIR.glob("*.jinja")}
# What ends a turn, by the beginning of a template's name.
ENDS = {
    "cohere": ["<|END_OF_TURN_TOKEN|>"],
    "deepseek": ["<｜end▁of▁sentence｜>"],
    "gemma4": ["<turn|>", "<|tool_response>"],
    "glm4moe": ["<|user|>", "<|observation|>"],
    "gptoss": ["<|call|>", "<|return|>"],
    "llama3": ["<|eot_id|>"],
    "": [END],
}
SPECIAL = re.compile(r"<\|[\"a-z_]+\|>|<\|[a-z_]+>|<[a-z_]+\|>")  # one token each, as in the family's vocabulary
# Those whose calls TRL reads, but LFM2.
READ = ("gemma4", "glm4moe", "gptoss", "llama3_1", "llama3_2", "nemotron", "qwen")
CALLS = {"text": 'it\'s "so"', "number": 3, "share": 0.5, "flag": True}
NESTED = {"rows": [1, "a"], "table": {"key": "value"}}


def look(text: str, number: int, share: float, flag: bool, rows: list, table: dict) -> str:
    """Look.

    Args:
        text: Text.
        number: A number.
        share: Another one.
        flag: Whether.
        rows: Rows.
        table: A table.
    """
    return text


def of_family(name):
    """(its tokenizer, the tokens that end its turns)"""
    text = TEMPLATES[name]
    ends = next(ends for begin, ends in ENDS.items() if name.startswith(begin))
    tokenizer = talking_tokenizer(text)
    tokenizer.add_tokens(sorted({*SPECIAL.findall(text), *ends}), special_tokens=True)
    return tokenizer, tokenizer.convert_tokens_to_ids(ends)


def is_read(name):
    return name.startswith(READ) and trl.supports_tool_calling(talking_tokenizer(TEMPLATES[name]))


# The same without rendering all of them while tests are collected.
CALLING = sorted(name for name, text in TEMPLATES.items() if name.startswith(READ) and "tool_calls" in text)


def test_the_templates_that_name_calls_are_those_that_render_them():
    assert sorted(filter(is_read, TEMPLATES)) == CALLING


def conversation(arguments):
    tool = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    return [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "", "tool_calls": [tool]},
        {"role": "tool", "name": "look", "content": "There."},
    ]


def rendered(tokenizer, messages, **options):
    options = {"tokenize": True, "return_dict": False, "add_generation_prompt": True, "tools": [look], **options}
    return tokenizer.apply_chat_template(messages, **options)


AS_TEXT = {key: value if isinstance(value, str) else json.dumps(value) for key, value in (CALLS | NESTED).items()}


@pytest.mark.parametrize("name", CALLING)
@pytest.mark.parametrize(
    ("arguments", "read"),
    [(CALLS, CALLS), (CALLS | NESTED,) * 2, (AS_TEXT, CALLS | NESTED)],
    ids=["flat", "nested", "text"],
)
def test_calls_are_read_back_as_they_were_written(name, arguments, read):
    """Or, where a text is what the schema wants in another type, as that."""
    tokenizer, stops = of_family(name)
    template = Template(tokenizer, {}, stop_ids=stops)
    user, said, answer = conversation(arguments)
    prompt, whole = template.encode([user], [look]), rendered(tokenizer, [user, said, answer])
    added = template.added([answer])
    assert whole[len(whole) - len(added) :] == added
    assert "There." in tokenizer.decode(added)
    assert "Where?" not in tokenizer.decode(added)
    begun = next(
        (place for place, pair in enumerate(zip(prompt, whole, strict=False)) if len(set(pair)) > 1), len(prompt)
    )
    turn = whole[begun : len(whole) - len(added)]
    assert turn[-1] in stops
    (tool_call,) = template.reply(turn, prompt, [look])["tool_calls"]
    assert tool_call == {"type": "function", "function": {"name": "look", "arguments": read}}


def test_what_gpt_oss_says_about_a_function_calls_none():
    tokenizer, stops = of_family("gptoss")
    template = Template(tokenizer, {}, stop_ids=stops)
    thought = "<|channel|>analysis<|message|>to=functions.delete<|end|><|start|>assistant"
    more = "<|channel|>commentary<|message|>I use to=functions.delete<|end|><|start|>assistant"
    called = '<|channel|>commentary to=functions.read <|constrain|>json<|message|>{"path": "a"}<|call|>'
    reply = template.reply(tokenizer(thought + more + called)["input_ids"], [], [])
    (tool_call,) = reply["tool_calls"]
    assert tool_call["function"] == {"name": "read", "arguments": {"path": "a"}}
    assert reply["reasoning_content"] == "to=functions.delete"
    final = "<|channel|>final<|message|>Use to=functions.delete.<|return|>"
    reply = template.reply(tokenizer(thought + final)["input_ids"], [], [])
    assert (reply["content"], "tool_calls" in reply) == ("Use to=functions.delete.", False)


CALL = '{"name": "look", "%s": {"text": "x", "number": "3"}}'
HERMES = f"<tool_call>\n{CALL % 'arguments'}\n</tool_call>"
SAID = {
    "gptoss": ["<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|> Hi<|return|>"],
    "llama3_1": [
        *(CALL % "parameters", f"So: {CALL % 'parameters'}", "It is {}.", '{"name": "Bob"} is one.', " no\n"),
        *('{"name": "Bob"}', '{"name": "Bob", "age": 3}'),
    ],
    "qwen3": [HERMES, f"So:\n{HERMES}", "<think>hm</think>\n\n no\n", " no\n", "<tool_call>{look}</tool_call>"],
}
MESSAGES = [(name, said) for name, listed in SAID.items() for said in listed]


@pytest.mark.parametrize(("name", "said"), MESSAGES)
def test_a_turn_is_the_message_that_trls_reward_functions_get(name, said):
    tokenizer, stops = of_family(name)
    ids = tokenizer(said if name == "gptoss" else said + tokenizer.decode(stops[0]))["input_ids"]
    template = Template(tokenizer, {}, stop_ids=stops)
    prompt = template.encode([{"role": "user", "content": "Where?"}], [look])
    ours = template.reply(ids, prompt, [look])
    trl_message = trl.parse_response(trl.add_response_schema(tokenizer), ids, prefix=prompt, tools=[look])
    assert ("tool_calls" in ours) is ("tool_calls" in trl_message)
    assert {key: ours[key] for key in trl_message} == trl_message


def kinds(
    whole: int, number: float, truth: bool, maybe: int | None, either: int | str, many: list, pairs: dict, text: str
) -> str:
    """Take some of each kind.

    Args:
        whole: One.
        number: One.
        truth: One.
        maybe: One.
        either: One.
        many: Some.
        pairs: Some.
        text: One.
    """
    return text


@pytest.mark.parametrize(
    "said",
    ["7", " 7 ", "007", "+7", "1_000", ".5", "-2.5", "nan", "true", "TRUE", "0", "null", "[1]", '{"a": 1}', "", "x"],
)
def test_a_text_is_of_the_kind_that_trl_reads_it_as(said):
    tokenizer, stops = of_family("qwen3")
    call = json.dumps({"name": "kinds", "arguments": dict.fromkeys(kinds.__annotations__.keys() - {"return"}, said)})
    ids = tokenizer(f"<tool_call>\n{call}\n</tool_call>{tokenizer.decode(stops[0])}")["input_ids"]
    ours = Template(tokenizer, {}, stop_ids=stops).reply(ids, [], [kinds])
    trl_message = trl.parse_response(trl.add_response_schema(tokenizer), ids, prefix=[], tools=[kinds])
    assert repr(ours["tool_calls"]) == repr(trl_message["tool_calls"])  # 1 is not True


@pytest.mark.parametrize(
    ("said", "read"),
    [("-2.", -2), (" 3.0 ", 3), ("3e2", 300), ("1e18", 10**18), ("2.5", "2.5"), ("inf", "inf"), ("1e400", "1e400")],
)
def test_a_whole_number_that_is_written_as_a_float_is_an_integer(said, read):
    """As transformers reads it from 5.24 on."""
    tokenizer, stops = of_family("qwen3")
    call = json.dumps({"name": "kinds", "arguments": {"whole": said, "maybe": said, "text": said}})
    ids = tokenizer(f"<tool_call>\n{call}\n</tool_call>{tokenizer.decode(stops[0])}")["input_ids"]
    (tool_call,) = Template(tokenizer, {}, stop_ids=stops).reply(ids, [], [kinds])["tool_calls"]
    assert repr(tool_call["function"]["arguments"]) == repr({"whole": read, "maybe": read, "text": said})


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("name", ["glm4moe", "gptoss", "llama3_1", "qwen3"])
def test_a_thought_that_another_begins_is_not_the_models(name, role):
    tokenizer, stops = of_family(name)
    template, (user, said, answer) = Template(tokenizer, {}, stop_ids=stops), conversation(CALLS)
    begin, end = template._family.thought
    other = {"user": user, "tool": answer}[role]
    other["content"] = f"Behind {begin} you think."
    added = template.added([answer])
    prompt, whole = rendered(tokenizer, [user]), rendered(tokenizer, [user, said, answer])
    turn = whole[len(prompt) : len(whole) - len(added)]
    prefix = prompt if role == "user" else whole
    turn = tokenizer(tokenizer.decode(turn).split(end)[-1])["input_ids"]  # without the empty thought of GLM
    assert "tool_calls" in template.reply(turn, prefix, [look])


LOOPS = ["<tool_call>", "<|tool_call>call:f{", "<function=", "<arg_key>", "to=functions.", "{,", '<|"|>', "<|message|>"]
LOOPS = [text * 5_000 for text in LOOPS] + ['<tool_call>{"name": "f",' + "\n" * 200_000]


@pytest.mark.parametrize("name", ["gemma4_v5", "glm4moe", "gptoss", "llama3_1", "qwen3", "qwen3_6"])
def test_a_turn_that_says_one_thing_again_and_again_is_read_at_once(name):
    """And not in the square of its length, which the last loop took half a minute for."""
    tokenizer, stops = of_family(name)
    template, said = Template(tokenizer, {}, stop_ids=stops), [tokenizer(text)["input_ids"] for text in LOOPS]
    start = time.thread_time()  # not of what else the machine does
    assert not any("tool_calls" in template.reply(ids, [], [look]) for ids in said)
    assert time.thread_time() - start < 20


@pytest.mark.parametrize(
    ("form", "said", "calls"),
    [
        ('<tool_call>{"name": "f"', '<tool_call>{"name": "f": {"a": "', 0),
        ('{"name": "f", "parameters": {}}', "; ", 80_000),
    ],
)
def test_many_calls_are_read_in_time_of_their_number(form, said, calls):
    start = time.thread_time()
    _, parsed = family_of(form, "f").read((form + said) * 80_000, [])
    assert len(parsed) == calls
    assert time.thread_time() - start < 3


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_any_other_template_is_refused_with_a_fix(name):
    tokenizer, stops = of_family(name)
    if is_read(name):
        Template(tokenizer, {}, stop_ids=stops)
    else:
        with pytest.raises(UnsupportedError, match="fix: "):
            Template(tokenizer, {}, stop_ids=stops)
