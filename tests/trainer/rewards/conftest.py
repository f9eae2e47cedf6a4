"""Batches of two groups of two, and a tiny reward model."""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForSequenceClassification

from fused_grpo.trainer.rewards import RewardOutput, Rewards, reward_functions


@pytest.fixture
def reward() -> Callable[..., RewardOutput]:
    """Completions a, b, c, d of the prompts p, p, q, q, as `Rewards(functions, **options)` judges them."""

    def judge(functions: Any, *, rows: list[dict] | None = None, trainer_state: Any = None, **options) -> RewardOutput:
        rows = [{"prompt": prompt, "answer": prompt.upper()} for prompt in "ppqq"] if rows is None else rows
        ids = [[number] * (number + 1) for number in range(len(rows))]
        rewards = Rewards(functions, **options)
        completions = list("abcdefgh"[: len(rows)])
        return rewards(rows, completions, ids, num_generations=2, trainer_state=trainer_state)

    return judge


@pytest.fixture
def no_pauses(monkeypatch) -> None:
    monkeypatch.setattr(reward_functions, "FIRST_PAUSE", 0.0)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *"abcdefghpqu:|"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    template = "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}|{% endfor %}"
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", chat_template=template
    )


@pytest.fixture
def reward_model(tokenizer) -> Qwen2ForSequenceClassification:
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_labels=1,
    )
    return Qwen2ForSequenceClassification(config)
