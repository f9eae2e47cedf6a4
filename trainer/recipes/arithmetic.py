"""The built-in task: addition of two-digit numbers, one character per token, with a model trained at the start.

It takes about a minute on a laptop. A transformer with 137 thousand parameters is first trained supervised on a few
hundred batches of sums, four out of five without a carry, until it solves about two in five of the unseen sums: it adds
well and carries badly. GRPO then has only prompts and an exact-match reward, and the model learns to carry. It is
evaluated on sums that neither stage has seen, in either order of their terms.

Answers have the least significant digit first ("58+67=" -> "521"), so that a carry is known when it is needed. Without
this, so small a model cannot learn the task.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

Row = dict[str, str]

PAD, EOS = "<pad>", "<eos>"
ANSWER_TOKENS = 4  # three digits at most, and the end
HELD_OUT_PROMPTS = 384


@dataclass(frozen=True)
class ArithmeticSplits:
    """Rows of {"prompt": "58+67=", "answer": "521"}; a pair of terms is in one split only, whatever its order."""

    train: list[Row]
    dev: list[Row]  # for early stopping of the supervised stage
    heldout: list[Row]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *"0123456789+="])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, eos_token=EOS)


def build_splits() -> ArithmeticSplits:
    """All sums of two numbers from 10 to 99; a hash of the terms puts a tenth of them into dev and held-out."""
    splits: dict[str, list[Row]] = {"train": [], "dev": [], "heldout": []}
    for first in range(10, 100):
        for second in range(10, 100):
            share = _hash(min(first, second), max(first, second)) % 100
            name = "heldout" if share < 5 else "dev" if share < 10 else "train"
            splits[name].append({"prompt": f"{first}+{second}=", "answer": str(first + second)[::-1]})
    for name in ("dev", "heldout"):
        random.Random(name).shuffle(splits[name])
        del splits[name][HELD_OUT_PROMPTS:]
    return ArithmeticSplits(**splits)


def accuracy_reward(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """1 if the completion equals the answer, else 0."""
    return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]


def build_model_config(tokenizer: PreTrainedTokenizerFast, hidden_size: int = 64) -> Qwen2Config:
    """The configuration of a Qwen2 with two layers."""
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def make_base_model(
    *,
    seed: int = 1,
    target: float = 0.42,
    max_batches: int = 1500,
    hidden_size: int = 64,
    on_progress: Callable[[str], None] | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """The supervised stage: a model that adds and does not carry yet. The same seed gives the same model.

    Args:
        seed: seed of the weights and of the order of the sums.
        target: training stops at this accuracy on the dev split.
        max_batches: training stops after so many batches at the latest.
        hidden_size: of the model, a multiple of 4; a larger one learns in fewer batches.
        on_progress: called with a line of text every 50 batches and at the end.
    """
    tokenizer, splits = build_tokenizer(), build_splits()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(build_model_config(tokenizer, hidden_size))
    say = on_progress or (lambda line: None)
    draw = _worked_sums(tokenizer, splits.train, torch.Generator().manual_seed(seed))
    dev_prompts, dev_answers = _encode(tokenizer, splits.dev)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    for batch in range(1, max_batches + 1):
        optimizer.param_groups[0]["lr"] = 4e-3 * min(1.0, batch / 20)
        prompts, answers = draw()
        logits = _answer_logits(model, prompts, answers)
        loss = cross_entropy(logits.flatten(0, 1), answers.flatten(), ignore_index=tokenizer.pad_token_id)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if batch % 5 == 0:
            accuracy = _greedy_accuracy(model, dev_prompts, dev_answers)
            if batch % 50 == 0 or accuracy >= target:
                say(f"supervised batch {batch}: loss {loss.item():.2f}, accuracy on unseen sums {accuracy:.2f}")
            if accuracy >= target:
                break
    optimizer.zero_grad()
    return model.eval(), tokenizer


def _hash(*terms: int) -> int:
    return int.from_bytes(hashlib.sha256(repr(terms).encode()).digest()[:8], "big")


def _carries(row: Row) -> bool:
    first, second = row["prompt"].rstrip("=").split("+")
    return int(first[1]) + int(second[1]) > 9 or int(first) + int(second) > 99


def _worked_sums(
    tokenizer: PreTrainedTokenizerFast, rows: list[Row], generator: torch.Generator
) -> Callable[[], tuple[Tensor, Tensor]]:
    """A function that draws batches of 256 (prompts, answers), one in five with a carry."""
    with_carry = _encode(tokenizer, [row for row in rows if _carries(row)])
    without = _encode(tokenizer, [row for row in rows if not _carries(row)])

    def draw() -> tuple[Tensor, Tensor]:
        parts = []
        for (prompts, answers), count in ((with_carry, 51), (without, 205)):
            chosen = torch.randint(len(prompts), (count,), generator=generator)
            parts.append((prompts[chosen], answers[chosen]))
        return torch.cat([prompts for prompts, _ in parts]), torch.cat([answers for _, answers in parts])

    return draw


def _encode(tokenizer: PreTrainedTokenizerFast, rows: list[Row]) -> tuple[Tensor, Tensor]:
    """Prompts [n, 6], and answers with the end-of-sequence token, padded to [n, ANSWER_TOKENS]."""
    prompts = tokenizer([row["prompt"] for row in rows])["input_ids"]
    answers = tokenizer([row["answer"] for row in rows])["input_ids"]
    ended = [
        ([*ids, tokenizer.eos_token_id] + ANSWER_TOKENS * [tokenizer.pad_token_id])[:ANSWER_TOKENS] for ids in answers
    ]
    return torch.tensor(prompts), torch.tensor(ended)


def _answer_logits(model: PreTrainedModel, prompts: Tensor, answers: Tensor) -> Tensor:
    """Logits [n, ANSWER_TOKENS, V] that predict the answers."""
    logits: Tensor = model(torch.cat([prompts, answers], 1), use_cache=False).logits
    return logits[:, prompts.shape[1] - 1 : -1]


@torch.no_grad()
def _greedy_accuracy(model: PreTrainedModel, prompts: Tensor, answers: Tensor) -> float:
    """Share of answers in which every token is the most likely one after the correct tokens before it.

    This is the accuracy of greedy decoding: in both, the first wrong token makes the answer wrong.
    """
    likeliest = _answer_logits(model, prompts, answers).argmax(-1)
    right = (likeliest == answers) | (answers == model.config.pad_token_id)
    return float(right.all(1).float().mean())
