"""What a chat template adds behind a turn, and what calls a reply has."""

import pytest
from talkers import END, TEMPLATE, call, talking_tokenizer

from fused_grpo.errors import DataError, UnsupportedError
from fused_grpo.trainer.episodes.conversation import Template

QUESTION = [{"role": "user", "content": "3 * 4?"}]
# How other families write a call, in the place of Hermes' form.
HERMES = TEMPLATE[TEMPLATE.index("<tool_call>") : TEMPLATE.index("{% endfor %}<|im_end|>\n{% endif %}\n{%- endfor %}")]
LLAMA = '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}'
TAGGED = (
    "<tool_call>\n<function={{ call.function.name }}>{% for key, value in call.function.arguments.items() %}\n"
    "<parameter={{ key }}>\n{{ value }}\n</parameter>{% endfor %}\n</function>\n</tool_call>"
)


def answer(text, name="multiply"):
    return {"role": "tool", "name": name, "content": text}


def made(template=TEMPLATE, **options):
    tokenizer = talking_tokenizer(template)
    return tokenizer, Template(tokenizer, options, stop_ids=[tokenizer.eos_token_id])


@pytest.mark.parametrize("answers", [[answer("12")], [answer("12"), answer("no", "other")], [answer(f"a{END}b")]])
def test_ids_only_grow_by_what_the_template_writes_behind_a_turn(answers):
    tokenizer, template = made()
    prompt = template.encode(QUESTION, [])
    said = tokenizer(call("multiply", a=3, b=4) + END)["input_ids"]
    ids = prompt + said + template.added(answers)
    contents = "".join(f"<answer>{one['content']}</answer>" for one in answers)
    assert tokenizer.decode(ids) == (
        f"<|im_start|>user\n3 * 4?{END}\n<|im_start|>assistant\n{call('multiply', a=3, b=4)}{END}\n"
        f"<|im_start|>user{contents}{END}\n<|im_start|>assistant\n"
    )
    # A turn that a stop string has ended lacks the token that ends turns.
    assert template.added(answers, after=said[-2]) == [tokenizer.eos_token_id, *template.added(answers)]
    # And so for the turn after it, which ends elsewhere.
    more = template.added([answer("9")])
    assert tokenizer.decode(more) == f"\n<|im_start|>user<answer>9</answer>{END}\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("said", "content", "calls"),
    [
        (call("f", a=1), "", [("f", {"a": 1})]),
        (f"Let me see. {call('f', a=1)}\n{call('g')}", "Let me see.", [("f", {"a": 1}), ("g", {})]),
        ("It is 12.", "It is 12.", []),
        (call("f", a="</tool_call><tool_call>") + call("g"), "", [("f", {"a": "</tool_call><tool_call>"}), ("g", {})]),
        (f'{call("f", a=1)}<tool_call>{{"name": "g"', "", [("f", {"a": 1})]),
        (f'{call("f", a=1)}<tool_call>{{"name": "g"}} or so</tool_call>', None, []),
        ('<tool_call>\n{"name": "f", "arguments": "{\\"a\\": 1}"}\n</tool_call>', "", [("f", {"a": 1})]),
        ('<tool_call>\n{"name": "f"}\n</tool_call>', "", [("f", {})]),
        # As in TRL, what cannot be read is text.
        ('<tool_call>\n{"arguments": {"a": 3}}\n</tool_call>', None, []),
        ("<tool_call>\n{name: f}\n</tool_call>", None, []),
        ('<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>', None, []),
        ('<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>', None, []),
        ("<tool_call>\n[1]\n</tool_call>", None, []),
        ('<tool_call>\n{"name": "f", "arguments": {"a": NaN}}\n</tool_call>', None, []),
        ('<tool_call>\n{"name": "\\ud800", "arguments": {}}\n</tool_call>', None, []),
        ('<tool_call>\n{"name": "f", "arguments": ' + '{"a": ' * 9999 + "1" + "}" * 9999 + "}\n</tool_call>", None, []),
        ('<tool_call>\n{"name": "f", "arguments": ' + '{"a": ' * 600 + "1" + "}" * 600 + "}\n</tool_call>", None, []),
        ("<tool_call>" * 20_000, None, []),  # at once, not in the square of it
        ('<tool_call>{"name": "f"', None, []),
        ("", "", []),
    ],
)
def test_calls_of_a_reply(said, content, calls):
    tokenizer, template = made()
    message = template.reply(tokenizer(said + END)["input_ids"], [], [])
    assert message["content"] == (said if content is None else content)
    assert [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", [])] == calls
    assert all(one["type"] == "function" for one in message.get("tool_calls", []))


def test_thoughts_are_apart_from_the_reply():
    tokenizer, template = made()
    for said in ("<think>hm</think>\n\n12", "hm</think>\n\n12"):  # the prompt may have begun the thought
        message = template.reply(tokenizer(said + END)["input_ids"], [], [])
        assert message == {"role": "assistant", "content": "12", "reasoning_content": "hm"}
    inside = f"<think>{call('f')}</think>{call('g')}"
    (only,) = template.reply(tokenizer(inside + END)["input_ids"], [], [])["tool_calls"]
    assert only["function"]["name"] == "g"


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (LLAMA, '{"name": "f", "parameters": {"a": 1, "b": "x"}}'),
        (LLAMA, '<|python_tag|>{"name": "f", "parameters": {"a": 1, "b": "x"}}; {"name": "g", "parameters": {}}'),
        (
            TAGGED,
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n</parameter>\n</function>",
        ),
    ],
)
def test_calls_of_other_families(form, said):
    tokenizer, template = made(TEMPLATE.replace(HERMES, form))
    first, *_ = template.reply(tokenizer(said + END)["input_ids"], [], [])["tool_calls"]
    assert first["function"] == {"name": "f", "arguments": {"a": 1, "b": "x"}}
    assert "tool_calls" not in template.reply(tokenizer("12" + END)["input_ids"], [], [])


def test_a_value_is_text_where_the_tool_wants_text():
    def find(code: str, count: int) -> str:
        """Find.

        Args:
            code: What.
            count: How many.
        """
        return code * count

    tokenizer, template = made(TEMPLATE.replace(HERMES, TAGGED))
    for code, count, read in (("90210", "2", 2), ("a</parameter></function>", "True", True), ("None", "None", None)):
        said = f"<tool_call>\n<function=find><parameter=code>\n{code}\n</parameter><parameter=count>{count}</parameter>"
        said += "</function>\n</tool_call>"
        (only,) = template.reply(tokenizer(said + END)["input_ids"], [], [find])["tool_calls"]
        assert only["function"]["arguments"] == {"code": code, "count": read}
        assert type(only["function"]["arguments"]["count"]) is type(read)


def test_schemas_of_tools_are_in_the_prompt():
    def search(query: str) -> str:
        """Search.

        Args:
            query: What for.
        """
        return query

    tokenizer, template = made()
    assert '"name": "search"' in tokenizer.decode(template.encode(QUESTION, [search]))


@pytest.mark.parametrize(
    ("template", "error", "text"),
    [
        (None, DataError, "a tokenizer without a chat template"),
        (
            "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}",
            UnsupportedError,
            "the name of a call, its",
        ),
        (TEMPLATE.replace("<answer>{{ message.content }}</answer>", ""), UnsupportedError, "leaves out the answer"),
        ("{{ raise_exception('no roles') }}", UnsupportedError, "TemplateError: no roles"),
        (TEMPLATE.replace("</tool_call>", "[/CALL]"), UnsupportedError, "which is read as none"),
        (
            TEMPLATE.replace("<tool_call>", "[CALL]"),
            UnsupportedError,
            "cannot read, and a tokenizer without",
        ),
        (TEMPLATE.replace("<|im_end|>", "</s>"), UnsupportedError, "with none of the tokens"),
    ],
)
def test_a_template_that_cannot_carry_tools_is_refused(template, error, text):
    with pytest.raises(error, match=text):
        made(template)
