"""The built-in task: addition of two-digit numbers, one character per token, and a model that rarely carries.

The base model is a transformer with 134 thousand parameters; docs/quickstart.md has what training makes of it.

base_model.safetensors: scripts/make_base_model.py wrote it with seed 1, in fp16; sha256 of the file
da00e2268cea3a0adabee97cffb2bfe408b40febcb88d85bba81df9331cfbe70

Answers have the least significant digit first ("58+67=" -> "521"), so that a carry is known when it is needed. Without
this, so small a model cannot learn the task.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

Row = dict[str, str]

PAD, EOS = "<pad>", "<eos>"
BASE_MODEL = Path(__file__).with_name("base_model.safetensors")
HELD_OUT_PROMPTS = 384


class ArithmeticSplits(NamedTuple):
    """Rows of {"prompt": "58+67=", "answer": "521"}; a pair of terms is in one split only, whatever its order."""

    train: list[Row]
    heldout: list[Row]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    return tokenizer_of([PAD, EOS, *"0123456789+="], ".", eos_token=EOS)


def tokenizer_of(tokens: Sequence[str], pattern: str, **options: Any) -> PreTrainedTokenizerFast:
    """A tokenizer with these tokens, each of which the pattern matches."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, **options)


def build_splits() -> ArithmeticSplits:
    """All sums of two numbers from 10 to 99; a hash of the terms puts a twentieth of them into held-out."""
    train, heldout = list[Row](), list[Row]()
    for first in range(10, 100):
        for second in range(10, 100):
            split = heldout if is_held_out(first, second) else train
            split.append({"prompt": f"{first}+{second}=", "answer": str(first + second)[::-1]})
    random.Random("heldout").shuffle(heldout)
    return ArithmeticSplits(train, heldout[:HELD_OUT_PROMPTS])


def is_held_out(first: int, second: int) -> bool:
    """True for a twentieth of all pairs, whatever their order: by a hash."""
    return hashlib.sha256(repr((min(first, second), max(first, second))).encode()).digest()[0] < 13


def sum_reward(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """1 if the completion equals the answer, else 0."""
    return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]


def build_model_config(tokenizer: PreTrainedTokenizerFast) -> Qwen2Config:
    """The configuration of a Qwen2 with two layers."""
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def load_base_model() -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """The model that adds and does not carry yet, in fp32, and its tokenizer."""
    return with_model(build_tokenizer(), BASE_MODEL)


def with_model(tokenizer: PreTrainedTokenizerFast, weights: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """The model of a built-in task in fp32, with these weights, and its tokenizer."""
    with torch.random.fork_rng(devices=[]):
        model = Qwen2ForCausalLM(build_model_config(tokenizer))
    model.load_state_dict(load_file(weights))
    return model.eval(), tokenizer
