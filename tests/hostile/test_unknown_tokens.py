"""A head with more rows than the tokenizer has tokens: a sampled id that has no token is no text, as in vLLM."""

import json
import logging
from typing import Any

import pytest
from small_runs import ROWS, model_of, trainer_in
from transformers import ByT5Tokenizer, PreTrainedTokenizer

from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.data.prompts import decoded
from fused_grpo.trainer.recipes.arithmetic import build_tokenizer

LETTERS = ["<pad>", "</s>", *"0123456789+= "]


class Letters(PreTrainedTokenizer):
    """A tokenizer in Python, which raises `error` for an id that it does not have, or returns None."""

    def __init__(self, error: type[Exception] | None = None, **options: Any) -> None:
        self.error = error
        super().__init__(pad_token="<pad>", eos_token="</s>", unk_token="<pad>", **options)

    vocab_size = property(lambda self: len(LETTERS))

    def get_vocab(self) -> dict[str, int]:
        return {letter: index for index, letter in enumerate(LETTERS)}

    def _tokenize(self, text: str, **options: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return LETTERS.index(token)

    def _convert_id_to_token(self, index: int) -> str | None:
        if index >= len(LETTERS):
            if self.error is None:
                return None
            raise self.error(index)
        return LETTERS[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


TOKENIZERS = {
    "bytes": lambda: ByT5Tokenizer(),
    "none": lambda: Letters(),
    **{
        error.__name__: lambda error=error: Letters(error)
        for error in (KeyError, IndexError, ValueError, OverflowError)
    },
    "rust": build_tokenizer,
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_an_id_beyond_the_tokenizer_is_no_text(name):
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer("1+1=")["input_ids"]
    whole = tokenizer.batch_decode([ids, ids[:2]], skip_special_tokens=True)
    beyond = [len(tokenizer) + 700, *ids[:1], len(tokenizer) + 900, *ids[1:]]
    assert decoded(tokenizer, [ids, ids[:2]]) == whole
    assert decoded(tokenizer, [beyond, ids[:2]]) == whole
    assert decoded(tokenizer, [beyond[:1]]) == [""]


def test_other_errors_of_a_tokenizer_are_its_own(monkeypatch):
    tokenizer = build_tokenizer()
    monkeypatch.setattr(type(tokenizer), "batch_decode", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        decoded(tokenizer, [[3]])


@pytest.mark.parametrize("name", ["bytes", "none", "KeyError"])
def test_a_run_samples_and_learns_from_such_ids(name, tmp_path, caplog):
    tokenizer, seen = TOKENIZERS[name](), list[int]()
    warn_once.cache_clear()

    def reward(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        seen.extend(max(ids) for ids in completion_ids)
        return [float(len(text)) for text in completions]

    model = model_of(vocab_size=len(tokenizer) + 2000)
    options = {"processing_class": tokenizer, "max_completion_length": 4, "max_steps": 2}
    with caplog.at_level(logging.WARNING):
        trainer = trainer_in(tmp_path, model, reward=reward, eval_dataset=ROWS[:1], **options)
        assert trainer.train().steps == 2
    assert max(seen) >= len(tokenizer)
    assert caplog.text.count("got sampled token ids that") == 1
    lines = (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()
    assert all(isinstance(json.loads(line)["completion"], str) for line in lines)
