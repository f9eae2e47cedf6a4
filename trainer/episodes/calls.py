"""Calls of tools in a turn of the model, in the form of its family. A response template of the tokenizer comes first.

A reader takes the text of a turn and its tools, and returns what is said beside the calls, and the calls. It raises
where what stands in the place of a call cannot be read: then the turn is text, as in TRL.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from fused_grpo.trainer.data.prompts import schema_of

Call = dict[str, Any]
Reader = Callable[[str, Sequence[Any]], tuple[str, list[Any]]]
_DEEPEST = 50  # levels of a call's arguments
_BEGIN, _END = re.compile(r"<tool_call>\s*"), re.compile(r"\s*</tool_call>")
_LLAMA = re.compile(r'\{"name":\s*"[^"]*",\s*"parameters":')  # any other object may be an answer
_PYTHON = {"True": True, "False": False, "None": None}  # as templates write them that join arguments as text
_TRUTHS = {"true": True, "1": True, "false": False, "0": False}
_KEY = re.compile(r"([{,]\s*)([^\s\"{}\[\],:]+)\s*:")  # without quotes


@dataclass(frozen=True)
class Family:
    """How a template writes the call of `{name}`, who reads such calls, what a thought begins and ends with, and which
    keys of a message have it."""

    form: str  # a pattern
    read: Reader
    thought: tuple[str, str] = ("<think>", "</think>")
    keys: tuple[str, ...] = ("reasoning_content",)

    def message(self, text: str, tools: Sequence[Any], *, before: str = "") -> dict[str, Any]:
        """A turn as a message, as TRL has it; raises what the reader raises. `before`: what the prompt begins it with.

        A thought ends with the first mark of its end. Without one that has begun, such a mark is text, as in a call.
        """
        begin, end = self.thought
        is_begun = before.rfind(begin.strip()) > before.rfind(end) or text.lstrip().startswith(begin)
        thought, is_over, rest = text.partition(end) if is_begun else ("", "", text)
        if is_begun and not is_over:  # what it only thinks of is not called
            return {"role": "assistant", "content": text}
        said, calls = self.read(rest.lstrip("\n"), tools)
        message: dict[str, Any] = {"role": "assistant", "content": said.strip()}
        if thought := thought.strip().removeprefix(begin.strip()).strip():
            message |= dict.fromkeys(self.keys, thought)
        return message | ({"tool_calls": [checked_call(one, tools) for one in calls]} if calls else {})


def family_of(text: str, name: str) -> Family | None:
    """The family whose form the call of `name` has in a rendered conversation."""
    return next((family for family in _FAMILIES if re.search(family.form.replace("{name}", name), text)), None)


def checked_call(function: Mapping[str, Any], tools: Sequence[Any] = ()) -> Call:
    """A call as TRL passes it on; TypeError for one without a name. Arguments that are no object are the tool's error.

    Texts are what the schemas of `tools` want in their place: "7" is 7 for an integer. With a response template
    transformers does that.
    """
    arguments = function.get("arguments", function.get("parameters"))
    arguments = {} if arguments is None else _value_by_types(arguments, ["object"])
    if tools and isinstance(arguments, dict):
        types = _types_of(function["name"], tools)
        arguments = {key: _value_by_types(value, types.get(key, ())) for key, value in arguments.items()}
    # ValueError for numbers that JSON does not have, or characters that UTF-8 does not.
    json.dumps([function["name"], arguments], ensure_ascii=False, allow_nan=False).encode()
    if not isinstance(function["name"], str) or _depth(arguments) > _DEEPEST:
        raise TypeError("a tool call without a name, or nested too deeply")
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _depth(value: Any, most: int = _DEEPEST + 1) -> int:
    """Levels of lists and dicts, `most` at most."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max((_depth(entry, most - 1) for entry in inner), default=0) if most else 0


def _json_calls(text: str, _: Any) -> tuple[str, list[Any]]:
    calls, decoder, begun = list[Any](), json.JSONDecoder(), _BEGIN.search(text)
    last = text.rfind("</tool_call>")  # behind it nothing is decoded: an error there counts all lines before it
    while begun is not None and begun.end() <= last:
        call, stop = None, begun.end()
        if text.startswith("{", stop):
            with suppress(ValueError):  # decoded, because an argument may hold the end of a call
                call, stop = decoder.raw_decode(text, stop)
        begun = _BEGIN.search(text, stop)
        if call is not None and _END.match(text, stop):
            calls.append(call)
        elif text.find("</tool_call>", stop, len(text) if begun is None else begun.start()) >= 0:
            raise ValueError("what stands there is no JSON")  # without an end it is half a call, which is none
    return text.partition("<tool_call>")[0] if calls else text, calls


def _marked(begin: str, *ends: str, read: Callable[[str, Sequence[Any]], Sequence[Any]]) -> Reader:
    """A reader of what stands between marks; nothing behind the first call is said."""

    def calls_in(text: str, tools: Sequence[Any]) -> tuple[str, list[Any]]:
        calls = [call for part in _between(text, begin, *ends) for call in read(part, tools)]
        return text.partition(begin)[0].rstrip().removesuffix("<tool_call>") if calls else text, calls

    return calls_in


def _between(text: str, begin: str, *ends: str) -> list[str]:
    """What stands between a beginning and the last end before the next one; a beginning without an end is none."""
    parts = [(part, max(map(part.rfind, ends))) for part in text.split(begin)[1:]]
    return [part[:end] for part, end in parts if end >= 0]


def _tagged(part: str, tools: Sequence[Any]) -> list[Call]:
    name, _, body = part.partition(">")
    pairs = (one.partition(">")[::2] for one in _between(body, "<parameter=", "</parameter>"))
    return [_call_from_texts(name, {key: text.removeprefix("\n").removesuffix("\n") for key, text in pairs}, tools)]


def _glm(part: str, tools: Sequence[Any]) -> list[Call]:
    name, *pairs = part.split("<arg_key>")
    values = (pair.partition("</arg_key>") for pair in pairs)
    texts = {key: "".join(_between(value, "<arg_value>", "</arg_value>")) for key, _, value in values}
    return [_call_from_texts(name.strip(), texts, tools)]


def _call_from_texts(name: str, texts: Mapping[str, str], tools: Sequence[Any]) -> Call:
    """A call whose values are text where the tool's schema allows it, else JSON or text."""
    types = _types_of(name, tools)
    values = {key: text if "string" in types.get(key, ()) else _value(text) for key, text in texts.items()}
    return {"name": name, "arguments": values}


def _value(text: str) -> Any:
    with suppress(ValueError):
        value = _PYTHON[text] if text in _PYTHON else json.loads(text)
        json.dumps(value, allow_nan=False)  # ValueError for numbers that JSON does not have
        return value
    return text


def _value_by_types(value: Any, types: Sequence[str]) -> Any:
    """What a text stands for in the first of these types of JSON that it has: "0" is no truth to Python."""
    for kind in types if isinstance(value, str) else ():
        with suppress(ValueError, KeyError):  # the latter of "string", or of what is no truth
            return _READERS[kind](value)
    return value


def _integer(text: str) -> int:
    """As JSON Schema has it, 3.0 too, which transformers takes from 5.24 on."""
    if (number := _number(text)) == int(number):
        return int(number)
    raise ValueError(text)


def _number(text: str) -> int | float:
    with suppress(ValueError):
        return int(text)  # exact, however long
    if math.isfinite(number := float(text)):
        return number
    raise ValueError(text)


def _json_of_kind(text: str, kind: type) -> Any:
    if isinstance(value := _value(text), kind):
        return value
    raise ValueError(text)


_READERS: Mapping[str, Callable[[str], Any]] = {
    "integer": _integer,
    "number": _number,
    "boolean": lambda text: _TRUTHS[text.strip().lower()],
    "null": lambda text: {"null": None, "None": None}[text.strip()],
    "array": partial(_json_of_kind, kind=list),
    "object": partial(_json_of_kind, kind=dict),
}


def _types_of(name: str, tools: Sequence[Any]) -> dict[str, list[str]]:
    """The types of JSON that each argument of the tool of this name may have."""
    schemas = [schema_of(tool)["function"]["parameters"] for tool in tools if tool.__name__ == name]
    return {key: _types(one) for schema in schemas for key, one in schema["properties"].items()}


def _types(schema: Mapping[str, Any]) -> list[str]:
    declared = schema.get("type", [])
    types = [declared] if isinstance(declared, str) else list(declared)
    types += [kind for choice in schema.get("anyOf", ()) for kind in _types(choice)]
    return types + ["null"] * bool(schema.get("nullable"))


def _llama_calls(text: str, _: Any) -> tuple[str, list[Any]]:
    """All of the turn, or its end; several are apart by semicolons."""
    text = text.removeprefix("<|python_tag|>").strip()
    if (begun := _LLAMA.search(text)) is None:
        return text, []
    decoder, calls, place = json.JSONDecoder(), list[Any](), begun.start()
    while place < len(text):
        call, end = decoder.raw_decode(text, place)
        calls.append(call)
        place = next((at for at in range(end, len(text)) if text[at] not in "; \n"), len(text))
    return text[: begun.start()].removesuffix("<|python_tag|>"), calls


def _gemma(part: str, _: Any, *, quote: str) -> list[Call]:
    """JSON whose keys have no quotes, and whose texts have others."""
    name, brace, body = part.partition("{")
    pieces = (brace + body).split(quote)
    pieces[::2] = [_KEY.sub(r'\1"\2":', piece) for piece in pieces[::2]]
    pieces[1::2] = map(json.dumps, pieces[1::2])
    return [{"name": name.strip(), "arguments": json.loads("".join(pieces))}]


def _harmony_calls(text: str, _: Any) -> tuple[str, list[Any]]:
    """The last message goes to a function, or to the user."""
    header, _, body = text.rpartition("<|start|>")[2].partition("<|message|>")
    _, is_call, name = header.partition("to=functions.")
    if not is_call:
        return text.rpartition("<|message|>")[2], []
    return "", [{"name": re.split(r"[\s<]", name, maxsplit=1)[0], "arguments": json.loads(body)}]


_FAMILIES = (
    # Qwen3-Coder, Qwen3.5, Nemotron 3
    Family("<function={name}>", _marked("<function=", "</function>", "</tool_call>", read=_tagged)),
    Family(r"<tool_call>\s*\{", _json_calls),  # Hermes, Qwen2.5, Qwen3, SmolLM
    Family(r"<tool_call>\s*{name}\s*<arg_key>", _marked("<tool_call>", "</tool_call>", read=_glm)),  # GLM-4.5
    Family(r'\{"name": "{name}", "parameters": ', _llama_calls),  # Llama 3
    Family(  # Gemma 4
        r"<\|tool_call>call:{name}\{",
        _marked("<|tool_call>call:", "<tool_call|>", read=partial(_gemma, quote='<|"|>')),
        thought=("<|channel>thought\n", "<channel|>"),
    ),
    Family(  # FunctionGemma
        r"<start_function_call>call:{name}\{",
        _marked("<start_function_call>call:", "<end_function_call>", read=partial(_gemma, quote="<escape>")),
    ),
    # gpt-oss
    Family(
        r"to=functions\.{name}<",
        _harmony_calls,
        thought=("<|channel|>analysis<|message|>", "<|end|>"),
        keys=("reasoning_content", "thinking"),  # the latter is the name of its template
    ),
)
