"""A conversation as token ids that only grow: what was sampled is what is trained on, and nothing is tokenised anew.

    prompt ids    the template's rendering of the prompt, with the tools' schemas
    + sampled     the ids of the model's turn, as the engine returned them
    + added       what the template writes behind that turn for the tools' answers, up to the next turn's first token
    + sampled ...

`added` is read off a rendering of a dummy conversation with these answers: everything behind the token that ends the
dummy's call. A template may write earlier turns differently once there are later ones (Qwen3 drops what was thought):
that does not matter here, since no earlier turn is ever rendered again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema

from fused_grpo.errors import DataError, UnsupportedError
from fused_grpo.trainer.data.prompts import encode_prompts, has_chat_template

Message = dict[str, Any]
_DEEPEST = 50  # levels of a call's arguments
_BEGIN, _END = re.compile(r"<tool_call>\s*"), re.compile(r"\s*</tool_call>")
_PYTHON = {"True": True, "False": False, "None": None}  # as templates write them that join arguments as text
_MARK = "b9d4f5c2"  # in the dummy's call, and nowhere else
_CALL, _ANSWER = f"tool_{_MARK}", f"answer_{_MARK}"


class Template:
    """The chat template of a run with tools.

    Args:
        options: `chat_template_kwargs` of the run.
        stop_ids: the tokens that end a turn.

    Raises:
        DataError: no template.
        UnsupportedError: one that leaves out calls or answers of tools, or whose calls are not read back.
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any] | None, *, stop_ids: Sequence[int]) -> None:
        self._tokenizer, self._options, self._stops = tokenizer, dict(options or {}), set(stop_ids)
        text = self._checked_text()
        self._has_own_parser = any(getattr(tokenizer, name, None) for name in ("response_template", "response_schema"))
        self._calls_in = next((parse for is_of, parse in _FAMILIES if re.search(is_of, text)), None)
        if self._calls_in is None and not self._has_own_parser:
            raise UnsupportedError(
                "got a chat template whose tool calls this trainer cannot read, and a tokenizer without a response "
                "template, want one of the two; fix: tokenizer.response_template = ... (transformers, "
                "'response parsing')"
            )
        self._check_reply(self.added([_answer()]))

    def encode(self, prompt: Sequence[Message], tools: Sequence[Any]) -> list[int]:
        """Token ids of a prompt, with the schemas of the tools; DataError as `encode_prompts`."""
        options = self._options | ({"tools": list(tools)} if tools else {})
        (ids,) = encode_prompts([{"prompt": list(prompt)}], self._tokenizer, chat_template_kwargs=options)
        return ids

    def added(self, answers: Sequence[Message], *, after: int | None = None) -> list[int]:
        """The ids that the template writes for these messages of tools behind the model's turn.

        Args:
            after: the last token of that turn. Where it does not end turns (a stop string did), the one that does comes
                first. None: it does.
        """
        ids: list[int] = self._rendered([*_dummy(answers[0]["name"]), *answers], tokenize=True)
        mark = self._tokenizer.decode(ids).find(_MARK)
        # The stops before the dummy's call end other turns; the one behind it ends the call.
        stops = (place + 1 for place, token in enumerate(ids) if token in self._stops)
        before = next((end for end in stops if len(self._tokenizer.decode(ids[:end])) > mark), None)
        if before is None:
            raise UnsupportedError(
                f"got a chat template that ends the turn of a tool call with none of the tokens {sorted(self._stops)}, "
                "want one that the model stops at; fix: the eos_token_id of the model's generation_config"
            )
        return ids[before if after is None or after in self._stops else before - 1 :]

    def reply(self, ids: Sequence[int], prefix: Sequence[int], tools: Sequence[Any]) -> Message:
        """The model's turn as a message, with its `tool_calls`; with its whole text as content where it cannot be read.

        As TRL: {"type": "function", "function": {"name": str, "arguments": dict}} for each call.
        """
        ids = list(ids)
        try:
            return self._parsed(ids, prefix, tools) if self._has_own_parser else self._by_family(ids, tools)
        except Exception:  # of the response template, which is a program, or of what the model wrote
            text = ""
            with suppress(Exception):  # of ids that are none, which the check of completions names
                text = self._tokenizer.decode(ids, skip_special_tokens=True)
            return {"role": "assistant", "content": text}

    def _parsed(self, ids: list[int], prefix: Sequence[int], tools: Sequence[Any]) -> Message:
        options: dict[str, Any] = {}
        if getattr(self._tokenizer, "response_template", None):
            options = {"prefix": list(prefix), "tools": list(tools)}
        try:
            message = self._tokenizer.parse_response(ids, **options)
        except TypeError:  # transformers before 5.15 types no arguments by the tools' schemas
            options.pop("tools", None)
            message = self._tokenizer.parse_response(ids, **options)
        content = str(message.get("content") or "").removesuffix(self._tokenizer.eos_token or "")
        calls = [_call(call.get("function", call)) for call in message.get("tool_calls") or ()]
        return {"role": "assistant", **message, "content": content, **({"tool_calls": calls} if calls else {})}

    def _by_family(self, ids: list[int], tools: Sequence[Any]) -> Message:
        assert self._calls_in is not None
        last = len(ids) - (1 if ids and ids[-1] in self._stops else 0)
        # Special tokens too: a family may mark its calls with one.
        text = self._tokenizer.decode(ids[:last], skip_special_tokens=False)
        thought, end, rest = text.partition("</think>")
        text, calls = self._calls_in(rest.lstrip("\n") if end else text, tools)
        message: Message = {"role": "assistant", "content": text.strip() if calls else text}
        # The prompt may have begun the thought.
        if end and (thought := thought.removeprefix("<think>").strip()):
            message["reasoning_content"] = thought
        return message | ({"tool_calls": list(map(_call, calls))} if calls else {})

    def _rendered(self, messages: list[Message], **options: Any) -> Any:
        options = {**self._options, "tokenize": False, "add_generation_prompt": True, "return_dict": False, **options}
        try:
            return self._tokenizer.apply_chat_template(messages, **options)
        except TypeError:  # a template that joins arguments as text (DeepSeek-V3)
            for message in messages:
                for call in message.get("tool_calls", ()):
                    call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
            return self._tokenizer.apply_chat_template(messages, **options)

    def _check_reply(self, added: list[int]) -> None:
        """UnsupportedError unless the dummy's call, as the template writes it, is read as one."""
        user, call = _dummy(_CALL)
        prefix: list[int] = self._rendered([user], tokenize=True)
        whole: list[int] = self._rendered([user, call, _answer()], tokenize=True)
        if whole[: len(prefix)] != prefix:  # it begins the model's turn with what it leaves out of earlier ones
            return
        turn = whole[len(prefix) : len(whole) - len(added)]
        calls = self.reply(turn, prefix, ()).get("tool_calls", [])
        if [one["function"]["name"] for one in calls] != [_CALL]:
            raise UnsupportedError(
                f"got the chat template's tool call {self._tokenizer.decode(turn)[:500]!r}, which is read as none, "
                "want a parser that reads it; fix: tokenizer.response_template = ..."
            )

    def _checked_text(self) -> str:
        """A dummy conversation with a call and its answer; UnsupportedError where the template leaves one out."""
        if not has_chat_template(self._tokenizer, self._options):
            raise DataError(
                "got tools and a tokenizer without a chat template, want one that shows them to the model; fix: the "
                "tokenizer of a chat model, or tokenizer.chat_template = ..."
            )
        try:
            text: str = self._rendered([*_dummy(_CALL), _answer()])
            missing = [what for what, mark in _SHOWN.items() if mark not in text]
        except Exception as error:  # of the template, which is a program
            missing = [f"the conversation ({type(error).__name__}: {error})"]
        if missing:
            raise UnsupportedError(
                f"got tools and a chat template that does not support tool calling: it leaves out {', '.join(missing)} "
                "of user -> assistant with tool_calls -> tool; fix: a model that was trained to call tools, or "
                "tokenizer.chat_template = ..."
            )
        return text


_SHOWN = {"the name of a call": _CALL, "its arguments": f"argument_{_MARK}", "the answer": _ANSWER}


def _answer() -> Message:
    return {"role": "tool", "name": _CALL, "content": _ANSWER}


def _dummy(name: str) -> list[Message]:
    arguments = {f"argument_{_MARK}": "1"}
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


def _call(function: Mapping[str, Any]) -> Message:
    """A call as TRL passes it on; TypeError for one without a name, or whose arguments are no object."""
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    arguments = {} if arguments is None else arguments
    # ValueError for numbers that JSON does not have, or characters that UTF-8 does not.
    json.dumps([function["name"], arguments], ensure_ascii=False, allow_nan=False).encode()
    if not isinstance(function["name"], str) or not isinstance(arguments, dict) or _depth(arguments) > _DEEPEST:
        raise TypeError("a tool call without a name, or with arguments that are no object, or nested too deeply")
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _depth(value: Any, most: int = _DEEPEST + 1) -> int:
    """Levels of lists and dicts, `most` at most."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max((_depth(entry, most - 1) for entry in inner), default=0) if most else 0


def _json_calls(text: str, _: Any) -> tuple[str, list[Any]]:
    """Hermes, Qwen2.5, Qwen3, SmolLM: {"name": ..., "arguments": ...} between <tool_call> and </tool_call>."""
    calls, decoder, begun = list[Any](), json.JSONDecoder(), _BEGIN.search(text)
    while begun is not None:
        call, stop = None, begun.end()
        if text.startswith("{", stop):
            with suppress(ValueError):  # decoded, because an argument may hold the end of a call
                call, stop = decoder.raw_decode(text, stop)
        begun = _BEGIN.search(text, stop)
        if call is not None and _END.match(text, stop):
            calls.append(call)
        elif _END.search(text, stop, len(text) if begun is None else begun.start()):
            raise ValueError("what stands there is no JSON")  # without an end it is half a call, which is none
    return text.partition("<tool_call>")[0] if calls else text, calls


def _tagged_calls(text: str, tools: Sequence[Any]) -> tuple[str, list[Any]]:
    """Qwen3-Coder, Qwen3.5: <function=name><parameter=key>value</parameter></function>.

    A value is text where the tool's schema says so, else JSON or text.
    """
    calls = []
    for part in _between(text, "<function=", "</function>"):
        name, _, body = part.partition(">")
        texts = _text_parameters(tools, name)
        pairs = (one.partition(">")[::2] for one in _between(body, "<parameter=", "</parameter>"))
        values = {key: value.removeprefix("\n").removesuffix("\n") for key, value in pairs}
        values = {key: value if key in texts else _value(value) for key, value in values.items()}
        calls.append({"name": name, "arguments": values})
    return text.partition("<tool_call>")[0] if calls else text, calls


def _between(text: str, begin: str, end: str) -> list[str]:
    """What stands between a beginning and the last end before the next one; a beginning without an end is none."""
    return [part.rpartition(end)[0] for part in text.split(begin)[1:] if end in part]


def _text_parameters(tools: Sequence[Any], name: str) -> set[str]:
    schemas = [get_json_schema(tool)["function"]["parameters"] for tool in tools if tool.__name__ == name]
    return {key for schema in schemas for key, one in schema["properties"].items() if one.get("type") == "string"}


def _value(text: str) -> Any:
    if text in _PYTHON:
        return _PYTHON[text]
    try:
        return json.loads(text)
    except ValueError:
        return text


def _llama_calls(text: str, _: Any) -> tuple[str, list[Any]]:
    """Llama 3: a turn that is {"name": ..., "parameters": {...}}, several apart by semicolons."""
    body = text.removeprefix("<|python_tag|>").strip()
    if not body.startswith('{"name"'):
        return text, []
    decoder, calls = json.JSONDecoder(), list[Any]()
    while body:
        call, end = decoder.raw_decode(body)
        calls.append(call)
        body = body[end:].lstrip("; \n")
    return "", calls


# How a template writes the dummy's call, and who reads such calls.
_FAMILIES: tuple[tuple[str, Callable[[str, Sequence[Any]], tuple[str, list[Any]]]], ...] = (
    (rf"<function={_CALL}>", _tagged_calls),
    (r"<tool_call>\s*\{", _json_calls),
    (rf'\{{"name": "{_CALL}", "parameters": ', _llama_calls),
)
