"""GSM8K: grade-school word problems, rewarded for the correct number.

The dataset has the columns "question" and "answer", a solution that ends in `#### 72`. `prompts` turns a row into a
conversation and the number. The recipes in this folder name `fused_grpo.trainer.recipes.gsm8k:prompts` and
`fused_grpo.trainer.recipes.gsm8k:right_number`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

INSTRUCTION = "Think step by step. Then write the answer, a number, on a line of its own after ####."
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def prompts(split: str) -> Any:
    """The rows of a split ("train": 7473, "test": 1319) as {"prompt": messages, "answer": "72"}."""
    from datasets import load_dataset

    dataset = load_dataset("openai/gsm8k", "main", split=split)
    return dataset.map(as_row, remove_columns=dataset.column_names)


def as_row(example: dict[str, str]) -> dict[str, Any]:
    """A row for the trainer from a row of the dataset."""
    messages = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": example["question"]}]
    return {"prompt": messages, "answer": last_number(example["answer"])}


def right_number(completions: Sequence[Any], answer: Sequence[str], **columns: Any) -> list[float]:
    """1 if the last number after `####` is the answer, else 0."""
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [float("####" in text and last_number(text) == right) for text, right in zip(texts, answer, strict=True)]


def last_number(text: str) -> str | None:
    """The last number after the last `####`, or of a text without it; "1,030" is "1030" and "3.0" is "3"."""
    found = _NUMBER.findall(text.rpartition("####")[2])
    if not found:
        return None
    number: str = found[-1].replace(",", "")
    return number.rstrip("0").rstrip(".") if "." in number else number
