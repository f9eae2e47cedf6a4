"""The two kinds of prompt, and everything that depends on the kind.

A plain prompt is a string, and its completion is a string. A conversational prompt is a list of
{"role": ..., "content": ...} messages: the tokenizer's chat template makes tokens of it, and its completion is a list
with the assistant's message. Both are TRL's formats, and a reward function gets what TRL would give it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from fused_grpo.errors import DataError, InputError

_NO_TEXT = "want text: it holds half of a surrogate pair, which UTF-8 cannot encode"

# What encode_prompts says to the chat template itself.
SET_HERE = {"tokenize", "return_dict", "return_tensors", "padding", "add_generation_prompt"}


def is_conversational(row: Mapping[str, Any]) -> bool:
    """Whether the row's (usable) prompt is a list of messages, not a string."""
    return not isinstance(row["prompt"], str)


def prompt_problem(prompt: Any) -> str | None:
    """What keeps this value from being a prompt. None: nothing."""
    if isinstance(prompt, str) and prompt:
        return None if _is_text(prompt) else _NO_TEXT
    if not isinstance(prompt, list) or not prompt:
        return "want a non-empty string or a non-empty list of {'role': ..., 'content': ...} messages"
    for message in prompt:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return "want messages of the form {'role': ..., 'content': ...}"
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            return "want a string as the content of every message (only text is supported)"
        if not _is_text(message.get("content") or ""):
            return _NO_TEXT
    return None


def _is_text(value: Any) -> bool:
    """Whether a tokenizer can take it: half of a surrogate pair, which JSON may hold, is no character."""
    try:
        str(value).encode()
    except UnicodeEncodeError:
        return False
    return True


def prompt_text(row: Mapping[str, Any]) -> str:
    """The prompt as a person reads it: a string as it is, a conversation as lines of "role: content"."""
    if not is_conversational(row):
        return str(row["prompt"])
    return "\n".join(
        f"{message['role']}: {message.get('content') or message.get('tool_calls') or ''}" for message in row["prompt"]
    )


def as_completion(row: Mapping[str, Any], text: str) -> str | list[dict[str, str]]:
    """A completion in the format of its prompt, which is what a reward function gets."""
    return [{"role": "assistant", "content": text}] if is_conversational(row) else text


def encode_prompts(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    row_numbers: Sequence[int] | None = None,
    max_tokens: int | None = None,
) -> list[list[int]]:
    """Token ids of each prompt, those that TRL makes of it.

    Equals, for strings, then for conversations:
        tokenizer([row["prompt"] for row in rows])["input_ids"]
        tokenizer.apply_chat_template([...], add_generation_prompt=True, **chat_template_kwargs)["input_ids"]

    Args:
        rows: rows whose prompts are all of one kind.
        tokenizer: of transformers.
        chat_template_kwargs: variables of the template ("enable_thinking", ...) and options of `apply_chat_template`
            ("tools", "chat_template"). With `continue_final_message=True`, prompts end with what the assistant has
            begun to say, and the model goes on from there.
        row_numbers: their places in the dataset, for the messages of errors.
        max_tokens: how long a prompt may be. None: any.

    Raises:
        InputError: `chat_template_kwargs` sets what is set here.
        DataError: no chat template, a template that refuses a conversation, a conversation with the wrong end, or a
            prompt without tokens or with too many.
    """
    options = dict(chat_template_kwargs or {})
    if taken := SET_HERE & options.keys():
        raise InputError(f"got {min(taken)!r} in chat_template_kwargs, which the trainer sets; fix: leave it out")
    if not rows:
        return []
    if not is_conversational(rows[0]):
        ids: list[list[int]] = tokenizer([row["prompt"] for row in rows])["input_ids"]
    else:
        ids = _apply_chat_template(rows, tokenizer, options, row_numbers)
    for index, tokens in enumerate(ids):
        if not tokens:
            raise DataError(f"got no token for the prompt{_where(rows, index, row_numbers)}, want at least one")
        if max_tokens is not None and len(tokens) > max_tokens:
            raise DataError(
                f"got {len(tokens)} tokens for the prompt{_where(rows, index, row_numbers)}, want {max_tokens} at most "
                "(vllm_max_model_length less max_completion_length); fix: leave the row out, or change one of the two"
            )
    return ids


def longest_prompt(
    dataset: Iterable[Mapping[str, Any]],
    tokenizer: Any,
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    batch_size: int = 1000,
) -> int:
    """Tokens of the longest prompt of a dataset; `batch_size` of them are held at a time.

    Raises:
        InputError, DataError: as `encode_prompts`, with the number of the row.
    """
    longest, first_row, rows = 0, 0, iter(dataset)
    while batch := list(islice(rows, batch_size)):
        numbers = range(first_row, first_row + len(batch))
        ids = encode_prompts(batch, tokenizer, chat_template_kwargs=chat_template_kwargs, row_numbers=numbers)
        longest, first_row = max(longest, *map(len, ids)), first_row + len(batch)
    return longest


def _apply_chat_template(
    rows: Sequence[Mapping[str, Any]], tokenizer: Any, options: dict[str, Any], row_numbers: Sequence[int] | None
) -> list[list[int]]:
    # Tokenizers with a template of their own (mistral-common's) have no such attribute.
    if getattr(tokenizer, "chat_template", "its own") is None and "chat_template" not in options:
        raise DataError(
            "got conversations as prompts and a tokenizer without a chat template, want one that has it; "
            "fix: the tokenizer of a chat model, tokenizer.chat_template = ..., or strings as prompts"
        )
    conversations = [row["prompt"] for row in rows]
    to_continue = bool(options.get("continue_final_message", False))
    for index, messages in enumerate(conversations):
        if (messages[-1]["role"] == "assistant") is not to_continue:
            where, want = (
                _where(rows, index, row_numbers),
                "the assistant" if to_continue else "anyone but the assistant",
            )
            raise DataError(
                f"got a conversation that ends with a message of {messages[-1]['role']!r} as the prompt{where}, "
                f"want one of {want} with continue_final_message={to_continue}; "
                "fix: the prompt, or chat_template_kwargs={'continue_final_message': ...}"
            )
    options = {**options, "tokenize": True, "return_dict": True, "add_generation_prompt": not to_continue}
    try:
        ids: list[list[int]] = tokenizer.apply_chat_template(conversations, **options)["input_ids"]
    except Exception as error:  # a template is a program: it may raise anything
        index = next((i for i, one in enumerate(conversations) if _fails(tokenizer, one, options)), 0)
        raise DataError(
            f"got {type(error).__name__}: {error} from the chat template, at the "
            f"prompt{_where(rows, index, row_numbers)}"
        ) from error
    return ids


def _fails(tokenizer: Any, messages: list[dict[str, Any]], options: dict[str, Any]) -> bool:
    try:
        tokenizer.apply_chat_template([messages], **options)
    except Exception:
        return True
    return False


def _where(rows: Sequence[Mapping[str, Any]], index: int, row_numbers: Sequence[int] | None) -> str:
    number = "" if row_numbers is None else f" of row {row_numbers[index]}"
    return f"{number} ({prompt_text(rows[index])[:200]!r})"
