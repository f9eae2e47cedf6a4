"""A conversation as token ids that only grow: what was sampled is what is trained on (docs/agents.md).

    prompt ids, + the sampled ids of a turn, + added: what the template writes behind it for the tools' answers, ...

`added` is read off a rendering of a dummy conversation with these answers: everything behind the token that ends the
dummy's call, up to the next turn's first token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from fused_grpo.errors import DataError, UnsupportedError, shown
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.data.prompts import (
    decoded,
    encode_prompts,
    has_chat_template,
    has_own_parser,
    parsed_reply,
    tool_options,
)
from fused_grpo.trainer.episodes.calls import checked_call, family_of

Message = dict[str, Any]
_MARK = "b9d4f5c2"  # in the dummy's call, and nowhere else
_CALL, _ANSWER, _ARGUMENTS = f"tool_{_MARK}", f"answer_{_MARK}", {f"argument_{_MARK}": "1"}


class Template:
    """The chat template of a run with tools, with its `chat_template_kwargs`; `stop_ids` are the tokens that end turns.

    DataError for no template, UnsupportedError for one that leaves out calls or answers, or whose calls are not read.
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any] | None, *, stop_ids: Sequence[int]) -> None:
        self._tokenizer, self._options, self._stops = tokenizer, dict(options or {}), set(stop_ids)
        self._has_own_parser = has_own_parser(tokenizer)
        text, self._dummy = self._checked_dummy()
        self._family = family_of(text, _CALL)
        if self._family is None and not self._has_own_parser:
            raise UnsupportedError(
                "got a chat template whose tool calls this trainer cannot read, and a tokenizer without a response "
                "template, want one of the two; fix: tokenizer.response_template = ... (transformers, "
                "'response parsing')"
            )
        self._role = self._role_mark()
        self._check_reply(self.added([_answer()]))
        if self._tokenizer.decode(self.added([_answer(), _answer()])).count(_ANSWER) != 2:
            raise UnsupportedError(
                "got a chat template that shows one of the two answers of a turn with two calls, want both; fix: "
                "tokenizer.chat_template = ..."
            )

    def encode(self, prompt: Sequence[Message], tools: Sequence[Any]) -> list[int]:
        """Token ids of a prompt, with the schemas of the tools; DataError as `encode_prompts`."""
        options = self._options | tool_options(tools)
        (ids,) = encode_prompts([{"prompt": list(prompt)}], self._tokenizer, chat_template_kwargs=options)
        return ids

    def added(self, answers: Sequence[Message], *, after: int | None = None) -> list[int]:
        """The ids that the template writes for these messages of tools behind the model's turn, or UnsupportedError.

        Where `after`, the last token of that turn, does not end turns (a stop string did), the one that does is first.
        """
        try:
            ids: list[int] = self._rendered([*self._dummy(answers[0]["name"]), *answers], tokenize=True)
        except Exception as error:  # of the template, which is a program
            raise UnsupportedError(
                f"got {type(error).__name__} from the chat template for {len(answers)} answers of tools: "
                f"{shown(error, 500)}; want it to write them behind the calls; fix: tokenizer.chat_template = ..."
            ) from error
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

    def reply(self, ids: Sequence[int], prefix: Sequence[int], tools: Sequence[Any] | None) -> Message:
        """The model's turn as a message, with its `tool_calls`; with its whole text as content where it cannot be read,
        and, as without episodes, where there are no tools (None) and the tokenizer has no parser of its own.

        As TRL: {"type": "function", "function": {"name": str, "arguments": dict}} for each call.
        """
        ids = list(ids)
        with suppress(Exception):  # of the response template, which is a program, or of what the model wrote
            if self._has_own_parser:
                return self._parsed(ids, prefix, tools or ())
            if tools is not None:
                return self._by_family(ids, prefix, tools)
        text = ""
        with suppress(Exception):  # of ids that are none, which the check of completions names
            (text,) = decoded(self._tokenizer, [ids])
        return {"role": "assistant", "content": text}

    def _parsed(self, ids: list[int], prefix: Sequence[int], tools: Sequence[Any]) -> Message:
        message = parsed_reply(self._tokenizer, ids, prefix, tools)
        calls = [checked_call(call.get("function", call)) for call in message.get("tool_calls") or ()]
        return message | ({"tool_calls": calls} if calls else {})

    def _by_family(self, ids: list[int], prefix: Sequence[int], tools: Sequence[Any]) -> Message:
        assert self._family is not None
        last = len(ids) - (1 if ids and ids[-1] in self._stops else 0)
        start = next((place for place in range(len(prefix), 0, -1) if prefix[place - 1] in self._stops), 0)
        # Special tokens too: a family may mark its calls, and a thought, with one.
        text, before = decoded(self._tokenizer, [ids[:last], prefix[start:]], skip_special_tokens=False)
        # A turn that ends with the beginning of the next one (GLM-4.5) has texts of others behind the last stop.
        return self._family.message(text, tools, before=before.rpartition(self._role)[2] if self._role else before)

    def _role_mark(self) -> str:
        """What the template writes before a turn of the model, up to a thought."""
        user = self._dummy(_CALL)[:1]
        mark: str = self._rendered(user).removeprefix(self._rendered(user, add_generation_prompt=False))
        return mark if self._family is None else mark.partition(self._family.thought[0].strip())[0]

    def _rendered(self, messages: list[Message], **options: Any) -> Any:
        # Without an option that lets the model continue a prompt's last message: here a whole turn is over.
        ours = {"tokenize": False, "return_dict": False, "continue_final_message": False, "add_generation_prompt": True}
        options = {**self._options, **ours, **options}
        try:
            return self._tokenizer.apply_chat_template(messages, **options)
        except TypeError:  # a template that joins arguments as text (DeepSeek-V3)
            for message in messages:
                for call in message.get("tool_calls", ()):
                    call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
            return self._tokenizer.apply_chat_template(messages, **options)

    def _check_reply(self, added: list[int]) -> None:
        """UnsupportedError unless the dummy's call, as the template writes it, is read as one."""
        user, call = self._dummy(_CALL)
        prefix: list[int] = self._rendered([user], tokenize=True)
        whole: list[int] = self._rendered([user, call, _answer()], tokenize=True)
        if whole[: len(prefix)] != prefix:  # it begins the model's turn with what it leaves out of earlier ones
            return
        turn = whole[len(prefix) : len(whole) - len(added)]
        calls = [one["function"] for one in self.reply(turn, prefix, ()).get("tool_calls", [])]
        for one in calls:  # without a schema a value may be a number
            if isinstance(one["arguments"], dict):
                one["arguments"] = {key: str(value) for key, value in one["arguments"].items()}
        if calls != [{"name": _CALL, "arguments": _ARGUMENTS}]:
            raise UnsupportedError(
                f"got the chat template's tool call {self._tokenizer.decode(turn)[:500]!r}, which is read as none, "
                "want a parser that reads it; fix: tokenizer.response_template = ..."
            )

    def _checked_dummy(self) -> tuple[str, Callable[[str], list[Message]]]:
        """A dummy with a call and its answer, and who makes the call; UnsupportedError where one is left out."""
        if not has_chat_template(self._tokenizer, self._options):
            raise DataError(
                "got tools and a tokenizer without a chat template, want one that shows them to the model; fix: the "
                "tokenizer of a chat model, or tokenizer.chat_template = ..."
            )
        dummy, text, missing = _dummy, "", list[str]()
        try:
            prompt: str = self._rendered(_dummy(_CALL)[:1], tools=[_SCHEMA], xml_tools=[_SCHEMA])
            text = self._rendered([*_dummy(_CALL), _answer()])
            if _CALL not in text and "<tool_call>" in prompt:
                # SmolLM3 writes no calls, and asks for Hermes'. Earlier turns are as they were sampled all the same.
                dummy = _written_dummy
                text = self._rendered([*dummy(_CALL), _answer()])
            missing = [what for what, mark in _SHOWN.items() if mark not in text]
        except Exception as error:  # of the template, which is a program
            missing = [f"the conversation ({type(error).__name__}: {error})"]
        if missing:
            raise UnsupportedError(
                f"got tools and a chat template that does not support tool calling: it leaves out {', '.join(missing)} "
                "of user -> assistant with tool_calls -> tool; fix: a model that was trained to call tools, or "
                "tokenizer.chat_template = ..."
            )
        source = f"{self._options} {getattr(self._tokenizer, 'chat_template', '')}"
        if _CALL not in prompt and not re.search(r"\btools\b", source):
            shows = "got a chat template that does not show the tools' schemas to the model"
            warn_once(f"{shows}; fix: tokenizer.chat_template = ..., or prompts that describe the tools")
        return text, dummy


_SHOWN = {"the name of a call": _CALL, "its arguments": next(iter(_ARGUMENTS)), "the answer": _ANSWER}
_PARAMETERS = {"type": "object", "properties": {"text": {"type": "string", "description": "?"}}, "required": ["text"]}
_SCHEMA = {"type": "function", "function": {"name": _CALL, "description": "Any.", "parameters": _PARAMETERS}}


def _answer() -> Message:
    return {"role": "tool", "name": _CALL, "content": _ANSWER}


def _dummy(name: str) -> list[Message]:
    call = {"type": "function", "function": {"name": name, "arguments": dict(_ARGUMENTS)}}
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


def _written_dummy(name: str) -> list[Message]:
    """With the call in the text, as Hermes writes it."""
    call = json.dumps({"name": name, "arguments": _ARGUMENTS})
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"}]
