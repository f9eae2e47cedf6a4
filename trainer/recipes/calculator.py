"""The built-in task with a tool: products of two numbers of three digits, which no model of this size can compute.

    <|user|>471*863<|end|>
    <|assistant|><tool_call>{"name": "multiply", "arguments": {"a": 471, "b": 863}}</tool_call><|end|>
    <|tool|>406473<|end|>
    <|assistant|>406473<|end|>

docs/agents.md has the task. Neither the base model nor its training here sees a held-out product.

calculator_model.safetensors: scripts/make_base_model.py calculator wrote it with seed 1, in fp16; sha256 of the file
25edb044b1a10c9d5d9175ec718c100d4eecb6fd87788f7e2011c6fec19f19cd
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from fused_grpo.trainer.recipes.arithmetic import PAD, is_held_out, tokenizer_of, with_model

END, ROLES = "<|end|>", ("<|user|>", "<|assistant|>", "<|tool|>")
# Besides single characters; `<tool_call>` before JSON is how Hermes and Qwen write calls.
WORDS = ("<tool_call>", '{"name": "multiply", "arguments": {"a": ', ', "b": ', "}}", "</tool_call>")
TEMPLATE = (
    "{#- No tools are shown: the model knows the one that there is. -#}"
    "{%- for message in messages -%}<|{{ message.role }}|>{{ message.content }}"
    "{%- for call in message.tool_calls or [] -%}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{%- endfor -%}<|end|>{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
BASE_MODEL = Path(__file__).with_name("calculator_model.safetensors")
PROMPTS, HELD_OUT_PROMPTS = 8192, 384


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: One number.
        b: The other.
    """
    return int(a) * int(b)


def product_reward(completions: Sequence[Sequence[Mapping[str, Any]]], answer: Sequence[str], **_: Any) -> list[float]:
    """1 if the last turn is the answer, else 0."""
    last = [messages[-1] for messages in completions]
    return [
        float(turn["role"] == "assistant" and turn["content"] == right)
        for turn, right in zip(last, answer, strict=True)
    ]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character but for WORDS, and a chat template that writes calls as Hermes and Qwen do."""
    characters = [one for one in string.printable if one.isprintable() or one == "\n"]
    return tokenizer_of(
        [PAD, END, *ROLES, *WORDS, *characters],
        pattern="|".join([*map(re.escape, WORDS), r"[\s\S]"]),
        eos_token=END,
        additional_special_tokens=list(ROLES),
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE,
    )


def build_splits() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows to train on and held-out ones, of {"prompt": a message "471*863", "answer": "406473"}."""
    generator, train, heldout = random.Random("calculator"), list[dict[str, Any]](), list[dict[str, Any]]()
    while len(train) < PROMPTS or len(heldout) < HELD_OUT_PROMPTS:
        a, b = generator.randrange(100, 1000), generator.randrange(100, 1000)
        split = heldout if is_held_out(a, b) else train
        split.append({"prompt": [{"role": "user", "content": f"{a}*{b}"}], "answer": str(a * b)})
    return train[:PROMPTS], heldout[:HELD_OUT_PROMPTS]


def load_base_model() -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """The model that seldom calls, in fp32, and its tokenizer."""
    return with_model(build_tokenizer(), BASE_MODEL)
