"""Prompts as the model gets them: text, token ids, and whether there is room for a completion. Formats are TRL's.

Every prompt of a run is encoded once, before anything slow; those of a stream as the sampler reads it. docs/data.md
says what becomes of those that leave no room for a completion.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import compress, islice
from typing import Any
from weakref import WeakKeyDictionary

from jinja2 import TemplateSyntaxError
from torch.utils.data import Subset
from transformers.utils.chat_template_utils import get_json_schema

from fused_grpo.errors import DataError, InputError
from fused_grpo.trainer.common.formatting import message_text
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.data.datasets import clean_prompt, is_conversational, is_plain_arrow, is_stream, read_rows

# Options of `apply_chat_template` that encode_prompts sets.
SET_HERE = {"tokenize", "return_dict", "return_tensors", "padding", "add_generation_prompt"}
_ROWS_AT_ONCE = 1000
_SCHEMAS = WeakKeyDictionary[Any, dict[str, Any]]()
# More than a tokenizer puts into a token on average. What is longer is not encoded: that takes 100 bytes a character.
CHARACTERS_OF_A_TOKEN = 128


def as_completion(row: Mapping[str, Any], text: str) -> str | list[dict[str, str]]:
    """A completion in the format of its prompt, for reward functions."""
    return [{"role": "assistant", "content": text}] if is_conversational(row) else text


def has_chat_template(tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> bool:
    """Whether conversations can be rendered: the tokenizer has a template, or the options have one."""
    # mistral-common's tokenizers have a template but no such attribute.
    return bool(getattr(tokenizer, "chat_template", "its own") or (chat_template_kwargs or {}).get("chat_template"))


def has_own_parser(tokenizer: Any) -> bool:
    """Whether its `parse_response` takes replies apart: by a response template, or a schema, which 5.14 reads last."""
    if getattr(tokenizer, "response_template", None):
        return True
    if not getattr(tokenizer, "response_schema", None):
        return False
    with suppress(Exception):  # that there is no text to read
        try:
            tokenizer.parse_response([])
        except AttributeError:
            warn_once(
                "got a tokenizer with a response_schema, which this version of transformers does not read; fix: "
                "tokenizer.response_template = ... (transformers, 'response parsing')"
            )
            return False
    return True


def parsed_reply(tokenizer: Any, ids: Sequence[int], prefix: Sequence[int], tools: Any = ()) -> dict[str, Any]:
    """A reply as the tokenizer's own parser takes it apart, which is a program and may raise anything."""
    options: dict[str, Any] = {}
    if getattr(tokenizer, "response_template", None):  # before transformers 5.13 there was a schema, without a prompt
        options = {"prefix": list(prefix), **({"tools": list(tools)} if tools else {})}
    try:
        message = tokenizer.parse_response(list(ids), **options)
    except TypeError:  # transformers before 5.15 types no arguments by the tools' schemas
        options.pop("tools", None)
        message = tokenizer.parse_response(list(ids), **options)
    content = str(message.get("content") or "").removesuffix(tokenizer.eos_token or "")
    return {"role": "assistant", **message, "content": content}


def tool_options(tools: Sequence[Callable[..., Any]]) -> dict[str, Any]:
    """The variables of a chat template that have the tools' schemas; none without tools."""
    schemas = [schema_of(tool) for tool in tools]
    return {"tools": schemas, "xml_tools": schemas} if schemas else {}  # xml_tools: in SmolLM3's


def schema_of(tool: Callable[..., Any]) -> dict[str, Any]:
    """Made once: of methods, for all objects of their class."""
    function = getattr(tool, "__func__", tool)
    if function not in _SCHEMAS:
        _SCHEMAS[function] = get_json_schema(tool)
    return _SCHEMAS[function]


def rendered(row: Mapping[str, Any], tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> str:
    """The text of a prompt as its tokens are, with the special ones; raises what `encode_prompts` raises."""
    (ids,) = encode_prompts([row], tokenizer, chat_template_kwargs=chat_template_kwargs)
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def decoded(tokenizer: Any, sampled: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
    """The texts of sampled tokens. One that the tokenizer does not have is no text, as in vLLM.

    A head may have more rows than the tokenizer has tokens. Rust's tokenizers skip such an id, Python's may raise.
    """
    ids = [list(tokens) for tokens in sampled]
    try:
        return list(tokenizer.batch_decode(ids, skip_special_tokens=skip_special_tokens))
    except Exception:
        tokens = set(tokenizer.get_vocab().values())
        if all(token in tokens for row in ids for token in row):
            raise
    warn_once(
        f"got sampled token ids that the tokenizer does not have, want those of its {len(tokens)} tokens, at most "
        f"{max(tokens)}: others are left out of texts; fix: the tokenizer of this model, if it is another's"
    )
    ids = [[token for token in row if token in tokens] for row in ids]
    return list(tokenizer.batch_decode(ids, skip_special_tokens=skip_special_tokens))


def encode_prompts(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    row_numbers: Sequence[int] | None = None,
    name: str = "",
) -> list[list[int]]:
    """Token ids of each prompt, the same as TRL's; all are of one kind.

    Equals, for strings, then for conversations:
        tokenizer([row["prompt"] for row in rows])["input_ids"]
        tokenizer.apply_chat_template([...], add_generation_prompt=True, **chat_template_kwargs)["input_ids"]

    Args:
        chat_template_kwargs: variables of the template ("enable_thinking", ...) and options of `apply_chat_template`
            ("tools", "chat_template"); InputError for those of `SET_HERE`. With `continue_final_message=True`, every
            conversation ends with the beginning of the assistant's message, which the model continues.
        row_numbers, name: places in the dataset, and its name, for errors.

    DataError for no chat template, one that refuses a conversation, a wrong last role, or a prompt without tokens.
    """
    options = dict(chat_template_kwargs or {})
    if taken := SET_HERE & options.keys():
        raise InputError(f"got {min(taken)!r} in chat_template_kwargs, which the trainer sets; fix: leave it out")

    def where(index: int) -> str:
        return prompt_name(rows[index], None if row_numbers is None else row_numbers[index], name)

    ids: list[list[int]]
    if rows and is_conversational(rows[0]):
        ids = _apply_chat_template([clean_prompt(row["prompt"]) for row in rows], tokenizer, options, where, name)
    else:
        ids = tokenizer([row["prompt"] for row in rows])["input_ids"] if rows else []
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
    if not has_chat_template(tokenizer, options):
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
        index = 0
        with suppress(Exception):
            for index in range(len(conversations)):  # up to the first that fails alone
                tokenizer.apply_chat_template([conversations[index]], **options)
        is_broken = isinstance(error, TemplateSyntaxError)
        refusal = f"at {where(index)}, want a conversation that it takes; fix: the row, or chat_template_kwargs"
        syntax = f"line {getattr(error, 'lineno', 0)}, want a Jinja template; fix: tokenizer.chat_template, or its file"
        raise DataError(
            f"got {type(error).__name__}: {error} from the chat template, {syntax if is_broken else refusal}"
        ) from error
    return ids


class PromptLimit:
    """The longest prompt of a run, and what happens to longer ones.

    Args:
        args: `vllm_max_model_length`, or `positions` if that is less, minus `max_completion_length` is the limit.
        positions, vocabulary: those of the model, rows of its embedding. None: unknown, or of no matter.
        tools: functions whose schemas the chat template shows in every prompt.

    InputError for no room for any prompt, or an end-of-sequence or padding token that the model does not have.
    """

    def __init__(
        self,
        args: GRPOConfig,
        tokenizer: Any,
        *,
        positions: int | None = None,
        vocabulary: int | None = None,
        tools: Sequence[Any] = (),
    ) -> None:
        options = (("vllm_max_model_length", args.vllm_max_model_length), ("the model's positions", positions))
        limits = {name: limit for name, limit in options if limit is not None}
        self._by = min(limits, key=limits.__getitem__, default="")
        length = limits.get(self._by)
        self.tokens = None if length is None else length - args.max_completion_length
        self._too_long = f"with more than {self.tokens} tokens ({self._by} less max_completion_length)"
        larger = f"a larger {self._by} or " if self._by == "vllm_max_model_length" else ""
        self._fix = f"fix: {larger}a smaller max_completion_length; long_prompts='fail' for an error"
        self.longest = 0  # tokens of the longest prompt so far
        self._drops, self._vocabulary = args.long_prompts == "drop", vocabulary
        self._tokenizer, self.template = tokenizer, (args.chat_template_kwargs or {}) | tool_options(tools)
        if self.tokens is not None and self.tokens < 1:
            raise InputError(
                f"got max_completion_length={args.max_completion_length} and {self._by}={length}, want room for a "
                "prompt; fix: a smaller max_completion_length"
            )
        self._warn_of_unread(args.chat_template_kwargs or {})
        for name in ("eos_token", "pad_token"):  # the model's config gets the latter, and could not be loaded again
            token = getattr(tokenizer, f"{name}_id")
            if vocabulary is not None and token >= vocabulary:
                self._refuse(token, f"the tokenizer's {name}")

    def _warn_of_unread(self, given: Mapping[str, Any]) -> None:
        """Of variables that the chat template has not, a typo or of another model: they would change nothing."""
        template = str(given.get("chat_template") or getattr(self._tokenizer, "chat_template", None) or "")
        arguments = SET_HERE | inspect.signature(getattr(self._tokenizer, "apply_chat_template", len)).parameters.keys()
        read = arguments | set(re.findall(r"\w+", template))
        if template and (unread := [name for name in given if name not in read]):
            warn_once(
                f"got chat_template_kwargs with {', '.join(unread)}, which the chat template does not read; fix: the "
                "names that it has, or leave it out"
            )

    def fits(self, row: Mapping[str, Any], number: int) -> bool:
        """Whether the prompt of row `number` of a stream is short enough; raises what `encode` raises."""
        if self.encode([row], [number], drops=self._drops)[0]:
            return True
        warn_once(f"got prompts {self._too_long}, which are left out; prompts/dropped counts them; {self._fix}")
        return False

    def applied(self, dataset: Any, *, name: str) -> Any:
        """The dataset without prompts that are too long, with a warning that counts them.

        Of a stream the first prompt is looked at, and the stream returned as it is. Raises what `encode` raises, and
        DataError where every prompt is too long.
        """
        if is_stream(dataset):
            self.encode(list(islice(read_rows(dataset, name=name), 1)), [0], name, drops=self._drops)
            return dataset
        kept, prompts = list[int](), dataset.select_columns(["prompt"]) if is_plain_arrow(dataset) else dataset
        numbered, texts, seen = enumerate(read_rows(prompts, name=name)), set[str](), set[tuple[int, ...]]()
        last = set[int]()
        while batch := list(islice(numbered, _ROWS_AT_ONCE)):
            numbers, rows = zip(*batch, strict=True)
            encoded = self.encode(rows, numbers, name, drops=self._drops)
            kept += compress(numbers, encoded)
            last |= {ids[-1] for ids in encoded if ids}
            if len(seen) < 2:
                texts |= {message_text(row["prompt"]) for row, ids in zip(rows, encoded, strict=True) if ids}
                seen |= set(map(tuple, filter(None, encoded)))
        if len(texts) > len(seen) == 1:
            warn_once(
                f"got {len(kept)} prompts of {name} that differ and have the same tokens, so that a model cannot tell "
                "them apart; fix: the chat template, or the tokenizer of the model"
            )
        if last == {self._tokenizer.eos_token_id}:
            warn_once(
                f"got {len(kept)} prompts of {name} that end with the end-of-sequence token, behind which a model has "
                "learnt to begin another text; fix: tokenizer.add_eos_token = False, or a chat template that begins "
                "the assistant's message"
            )
        if len(kept) == len(dataset):
            return dataset
        got = f"got {len(dataset) - len(kept)} of {len(dataset)} prompts of {name} {self._too_long}"
        if not kept:
            raise DataError(f"{got}, want at least one that is shorter; {self._fix}")
        warn_once(f"{got}, which are left out; {self._fix}")
        # The sampler treats a `datasets.Dataset` in its own way.
        return dataset.select(kept) if hasattr(dataset, "select") else Subset(dataset, kept)

    def encode(
        self, rows: Sequence[Mapping[str, Any]], numbers: Sequence[int], name: str = "", *, drops: bool = False
    ) -> list[list[int]]:
        """Token ids of the prompts of rows with these numbers; with `drops` no ids of one that is too long.

        DataError for one that cannot be encoded, or is too long without `drops`; InputError for an unknown token.
        """
        most = math.inf if self.tokens is None else self.tokens
        short = [len(message_text(row["prompt"])) <= most * CHARACTERS_OF_A_TOKEN for row in rows]
        options: Any = {"chat_template_kwargs": self.template, "row_numbers": list(compress(numbers, short))}
        encoded = iter(encode_prompts(list(compress(rows, short)), self._tokenizer, **options, name=name))
        kept = list[list[int]]()
        for row, number, is_short in zip(rows, numbers, short, strict=True):
            ids = next(encoded) if is_short else None
            place = partial(prompt_name, row, number, name)
            if ids is not None and len(ids) <= most:
                if self._vocabulary is not None and max(ids) >= self._vocabulary:
                    self._refuse(max(ids), place())
                self.longest = max(self.longest, len(ids))
                kept.append(ids)
            elif drops:
                kept.append([])
            else:
                raise DataError(
                    f"got {'too many' if ids is None else len(ids)} tokens for {place()}, want {self.tokens} at most "
                    f"({self._by} less max_completion_length); fix: leave the row out, or change one of the two"
                )
        return kept

    def _refuse(self, token: int, where: str) -> None:
        raise InputError(
            f"got token {token} ({self._tokenizer.convert_ids_to_tokens(token)!r}) in {where}, want ids below "
            f"{self._vocabulary}, the rows of the model's embedding; fix: the tokenizer of the model, or a model after "
            "its resize_token_embeddings(len(tokenizer))"
        )
