"""What a chat template adds behind a turn, and what calls a reply has."""

import json

import pytest
from talkers import END, TEMPLATE, call, talking_tokenizer

from fused_grpo.errors import DataError, UnsupportedError
from fused_grpo.trainer.common.warnings import warn_once
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
        # As in TRL, arguments that are no object are for the tool's error, and what cannot be read is text.
        ('<tool_call>\n{"arguments": {"a": 3}}\n</tool_call>', None, []),
        ("<tool_call>\n{name: f}\n</tool_call>", None, []),
        *(
            (f'<tool_call>\n{{"name": "f", "arguments": {json.dumps(odd)}}}\n</tool_call>', "", [("f", odd)])
            for odd in ([1], [["a", 1]], "", "x", "[1]", 0, 1.5, False)
        ),
        ('<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>', None, []),
        ("<tool_call>\n[1]\n</tool_call>", None, []),
        ('<tool_call>\n{"name": "f", "arguments": {"a": NaN}}\n</tool_call>', None, []),
        ('<tool_call>\n{"name": "\\ud800", "arguments": {}}\n</tool_call>', None, []),
        ('<tool_call>\n{"name": "f", "arguments": ' + '{"a": ' * 9999 + "1" + "}" * 9999 + "}\n</tool_call>", None, []),
        ('<tool_call>\n{"name": "f", "arguments": ' + '{"a": ' * 600 + "1" + "}" * 600 + "}\n</tool_call>", None, []),
        ("<tool_call>" * 20_000, None, []),  # at once, not in the square of it
        (f"<think>Maybe {call('f')}", None, []),
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
    for before, said in (("", "<think>hm</think>\n\n12"), ("<think>\n", "hm</think>\n\n12")):
        prompt = tokenizer(f"<|im_start|>user\n?{END}\n<|im_start|>assistant\n{before}")["input_ids"]
        message = template.reply(tokenizer(said + END)["input_ids"], prompt, [])
        assert message == {"role": "assistant", "content": "12", "reasoning_content": "hm"}
    inside = f"<think>{call('f')}</think>{call('g')}"
    (only,) = template.reply(tokenizer(inside + END)["input_ids"], [], [])["tool_calls"]
    assert only["function"]["name"] == "g"


@pytest.mark.parametrize(("before", "said"), [("", "<think>Maybe "), ("<think>\n", "Maybe ")])
def test_a_thought_without_an_end_calls_nothing(before, said):
    tokenizer, template = made()
    prompt, said = tokenizer(f"<|im_start|>assistant\n{before}")["input_ids"], said + call("f")
    assert template.reply(tokenizer(said + END)["input_ids"], prompt, []) == {"role": "assistant", "content": said}


@pytest.mark.parametrize("before", ["", "<think>\n\n</think>\n\n"])
@pytest.mark.parametrize("thought", ["", "<think>hm</think>\n\n"])
def test_the_end_of_a_thought_in_an_argument_is_text(before, thought):
    tokenizer, template = made()
    asked = f"<|im_start|>user\nOpen with <think>{END}\n<|im_start|>assistant\n"  # the user's begins none
    said = call("f", text="write </think> first") + call("g")
    message = template.reply(tokenizer(thought + said + END)["input_ids"], tokenizer(asked + before)["input_ids"], [])
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in message["tool_calls"]]
    assert calls == [("f", {"text": "write </think> first"}), ("g", {})]
    assert message.get("reasoning_content", "") == ("hm" if thought else "")


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (LLAMA, '{"name": "f", "parameters": {"a": 1, "b": "x"}}'),
        (LLAMA, '<|python_tag|>{"name": "f", "parameters": {"a": 1, "b": "x"}}; {"name": "g", "parameters": {}}'),
        (
            TAGGED,
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n</parameter>\n</function>",
        ),
        (
            TAGGED,
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n</parameter>\n</tool_call>",
        ),
    ],
)
def test_calls_of_other_families(form, said):
    tokenizer, template = made(TEMPLATE.replace(HERMES, form))
    first, *_ = template.reply(tokenizer(said + END)["input_ids"], [], [])["tool_calls"]
    assert first["function"] == {"name": "f", "arguments": {"a": 1, "b": "x"}}
    assert "tool_calls" not in template.reply(tokenizer("12" + END)["input_ids"], [], [])


GEMMA = (
    "<|tool_call>call:{{ call.function.name }}{ {%- for key, value in call.function.arguments.items() -%}"
    '{{ key }}:<|"|>{{ value }}<|"|>{% if not loop.last %},{% endif %}{% endfor -%} }<tool_call|>'
)
FUNCTION_GEMMA = (
    GEMMA.replace("<|tool_call>", "<start_function_call>")
    .replace("<tool_call|>", "<end_function_call>")
    .replace('<|"|>', "<escape>")
)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (GEMMA, 'Sure.<|tool_call>call:f{a:<|"|>{b:"1"}, <tool_call|><|"|>,n:-1.5e3,l:[true,null,{k:1}]}<tool_call|>'),
        (
            FUNCTION_GEMMA,
            'Sure.<start_function_call>call:f{a:<escape>{b:"1"}, <tool_call|><escape>,n:-1.5e3,l:[true,null,{k:1}]}'
            "<end_function_call>",
        ),
    ],
)
def test_calls_of_gemma_have_quotes_of_their_own(form, said):
    tokenizer, template = made(TEMPLATE.replace(HERMES, form))
    message = template.reply(tokenizer(said + END)["input_ids"], [], [])
    assert message["content"] == "Sure."
    (only,) = message["tool_calls"]
    arguments = {"a": '{b:"1"}, <tool_call|>', "n": -1500.0, "l": [True, None, {"k": 1}]}
    assert only["function"] == {"name": "f", "arguments": arguments}
    broken = said.replace("l:[", "l:[[")
    assert template.reply(tokenizer(broken + END)["input_ids"], [], []) == {"role": "assistant", "content": broken}


# SmolLM3's way: the schemas under another name, no calls, and answers as users' messages.
SMOLLM = """
{%- if xml_tools %}<|im_start|>system
{% for tool in xml_tools %}{{ tool | string }}
{% endfor %}Call them in <tool_call></tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_a_template_that_writes_no_calls_has_them_as_they_were_sampled():
    def search(query: str) -> str:
        """Search.

        Args:
            query: What for.
        """
        return query

    tokenizer, template = made(SMOLLM)
    assert "'name': 'search'" in tokenizer.decode(template.encode(QUESTION, [search]))
    said = tokenizer(call("search", query="x") + END)["input_ids"]
    assert template.reply(said, [], [search])["tool_calls"][0]["function"]["arguments"] == {"query": "x"}
    added = tokenizer.decode(template.added([answer("12"), answer("no")]))
    assert added == f"\n<|im_start|>user\n12{END}\n<|im_start|>user\nno{END}\n<|im_start|>assistant\n"
    with pytest.raises(UnsupportedError, match="leaves out the name of a call"):
        made(SMOLLM.replace("<tool_call></tool_call>", "JSON"))


def test_a_template_that_shows_no_schemas_is_a_warning(caplog):
    warn_once.cache_clear()
    silent = TEMPLATE[TEMPLATE.index("{%- for message") :]
    made("{#- No tools are shown. -#}" + silent)
    assert not caplog.text
    made(silent)
    assert "does not show the tools' schemas" in caplog.text


def test_an_answer_that_the_template_does_not_take_is_named():
    refuses = "{% if 'odd' in message.content %}{{ raise_exception('no') }}{% endif %}<answer>"
    _, template = made(TEMPLATE.replace("<answer>", refuses))
    assert template.added([answer("even")])
    with pytest.raises(UnsupportedError, match="got TemplateError from the chat template for 2 answers of tools: no; "):
        template.added([answer("even"), answer("odd")])


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


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ("7", 7),
        ("+1e999", "+1e999"),
        ("NaN", "NaN"),
        ("seven", "seven"),
        ("null", None),
        ("[1]", "[1]"),
        ("true", "true"),
    ],
)
def test_a_text_is_a_number_where_the_tool_wants_one_and_it_is_one(said, read):
    def count(number: int | None, text: str, either: int | str = 1) -> str:
        """Count.

        Args:
            number: To where.
            text: Text.
            either: Any of both.
        """
        return text

    tokenizer, template = made()
    ids = tokenizer(call("count", number=said, text=said, either=said, other=said) + END)["input_ids"]
    (only,) = template.reply(ids, [], [count])["tool_calls"]
    either = said if read is None else read
    assert only["function"]["arguments"] == {"number": read, "text": said, "either": either, "other": said}


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
            TEMPLATE.replace(HERMES, "<function={{ call.function.name }}>{{ call.function.arguments }}</function>"),
            UnsupportedError,
            "which is read as none",
        ),
        (
            TEMPLATE.replace("<tool_call>", "[CALL]"),
            UnsupportedError,
            "cannot read, and a tokenizer without",
        ),
        (TEMPLATE.replace("<|im_end|>", "</s>"), UnsupportedError, "with none of the tokens"),
        (
            TEMPLATE.replace("<answer>{{", "{% if messages[loop.index0 - 1].role != 'tool' %}<answer>{{").replace(
                "}}</answer>", "}}</answer>{% endif %}"
            ),
            UnsupportedError,
            "shows one of the two answers",
        ),
    ],
)
def test_a_template_that_cannot_carry_tools_is_refused(template, error, text):
    with pytest.raises(error, match=text):
        made(template)
