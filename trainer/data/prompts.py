"""Plain and conversational prompts: checks, text, token ids.

A plain prompt is a string, and so is its completion. A conversational prompt is a list of {"role": ..., "content": ...}
messages: the tokenizer's chat template renders it, and its completion is a list with the assistant's message. These are
TRL's formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fused_grpo.errors import DataError, InputError
from fused_grpo.trainer.logging.formatting import message_text

_NO_TEXT = "want text: it holds half of a surrogate pair, which UTF-8 cannot encode"

# Options of `apply_chat_template` that encode_prompts sets.
SET_HERE = {"tokenize", "return_dict", "return_tensors", "padding", "add_generation_prompt"}


def is_conversational(row: Mapping[str, Any]) -> bool:
    """True where the prompt is a list of messages, False where it is a string."""
    return not isinstance(row["prompt"], str)


def clean_prompt(prompt: Any) -> Any:
    """A conversation as chat templates expect it, and any other value as it is.

    Arrow gives all messages of a column the same keys: those that are None were not there. Contents that are parts of
    text become one string.
    """
    if not isinstance(prompt, list):
        return prompt
    messages = _without_none(prompt)
    for message in messages:
        parts = message.get("content") if isinstance(message, dict) else None
        if isinstance(parts, list) and all(map(_is_text_part, parts)):
            message["content"] = "".join(part["text"] for part in parts)
    return messages


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    return list(map(_without_none, value)) if isinstance(value, list) else value


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def prompt_problem(prompt: Any) -> str | None:
    """Why this value, cleaned, cannot be a prompt; None if it can."""
    if isinstance(prompt, str) and prompt:
        return None if _is_text(prompt) else _NO_TEXT
    if not isinstance(prompt, list) or not prompt:
        return "want a non-empty string or a non-empty list of {'role': ..., 'content': ...} messages"
    for message in prompt:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return "want messages of the form {'role': ..., 'content': ...}"
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            return "want a string, or parts {'type': 'text', 'text': ...}, as the content of every message (text alone)"
        if not _is_text(message.get("content") or ""):
            return _NO_TEXT
    return None


def _is_text(value: Any) -> bool:
    """False for a lone surrogate, which JSON may hold and no tokenizer takes."""
    try:
        str(value).encode()
    except UnicodeEncodeError:
        return False
    return True


def as_completion(row: Mapping[str, Any], text: str) -> str | list[dict[str, str]]:
    """A completion in the format of its prompt, for reward functions."""
    return [{"role": "assistant", "content": text}] if is_conversational(row) else text


def encode_prompts(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    row_numbers: Sequence[int] | None = None,
    name: str = "",
) -> list[list[int]]:
    """Token ids of each prompt, the same as TRL's.

    Equals, for strings, then for conversations:
        tokenizer([row["prompt"] for row in rows])["input_ids"]
        tokenizer.apply_chat_template([...], add_generation_prompt=True, **chat_template_kwargs)["input_ids"]

    Args:
        rows: rows with prompts of one kind.
        tokenizer: of transformers.
        chat_template_kwargs: variables of the template ("enable_thinking", ...) and options of `apply_chat_template`
            ("tools", "chat_template"). With `continue_final_message=True`, every conversation ends with the beginning
            of the assistant's message, which the model continues.
        row_numbers: their places in the dataset, for errors.
        name: of the dataset, for errors.

    Raises:
        InputError: `chat_template_kwargs` has an option of `SET_HERE`.
        DataError: no chat template, a template that refuses a conversation, a conversation that ends with the wrong
            role, or a prompt without tokens.
    """
    options = dict(chat_template_kwargs or {})
    if taken := SET_HERE & options.keys():
        raise InputError(f"got {min(taken)!r} in chat_template_kwargs, which the trainer sets; fix: leave it out")

    def where(index: int) -> str:
        return prompt_name(rows[index], None if row_numbers is None else row_numbers[index], name)

    prompts = [clean_prompt(row["prompt"]) for row in rows]
    ids: list[list[int]]
    if not rows:
        ids = []
    elif is_conversational(rows[0]):
        ids = _apply_chat_template(prompts, tokenizer, options, where, name)
    else:
        ids = tokenizer(prompts)["input_ids"]
    for index, tokens in enumerate(ids):
        if not tokens:
            raise DataError(f"got no token for {where(index)}, want at least one")
    return ids


def prompt_name(row: Mapping[str, Any], number: int | None, name: str) -> str:
    """What an error calls the prompt of row `number` of the dataset `name`."""
    place = f" of row {number}" if number is not None else ""
    return f"the prompt{place}{f' of {name}' if name else ''} ({message_text(row['prompt'])[:200]!r})"


def _apply_chat_template(
    conversations: list[Any], tokenizer: Any, options: dict[str, Any], where: Callable[[int], str], name: str
) -> list[list[int]]:
    # mistral-common's tokenizers have a template but no such attribute.
    if getattr(tokenizer, "chat_template", "its own") is None and "chat_template" not in options:
        raise DataError(
            f"got conversations as prompts{f' of {name}' if name else ''} and a tokenizer without a chat template, "
            "want one that has it; fix: the tokenizer of a chat model, tokenizer.chat_template = ..., or strings as "
            "prompts"
        )
    to_continue = bool(options.get("continue_final_message", False))
    for index, messages in enumerate(conversations):
        if (messages[-1]["role"] == "assistant") is not to_continue:
            raise DataError(
                f"got a conversation that ends with a message of {messages[-1]['role']!r} as {where(index)}, want "
                f"{'the assistant' if to_continue else 'another role'} with continue_final_message={to_continue}; "
                "fix: the prompt, or chat_template_kwargs={'continue_final_message': ...}"
            )
    options = {**options, "tokenize": True, "return_dict": True, "add_generation_prompt": not to_continue}
    try:
        ids: list[list[int]] = tokenizer.apply_chat_template(conversations, **options)["input_ids"]
    except Exception as error:  # a template is a program
        index = next((i for i, one in enumerate(conversations) if _fails(tokenizer, one, options)), 0)
        raise DataError(
            f"got {type(error).__name__}: {error} from the chat template, at {where(index)}, want a conversation that "
            "it takes; fix: the row, or chat_template_kwargs"
        ) from error
    return ids


def _fails(tokenizer: Any, messages: list[dict[str, Any]], options: dict[str, Any]) -> bool:
    try:
        tokenizer.apply_chat_template([messages], **options)
    except Exception:
        return True
    return False
