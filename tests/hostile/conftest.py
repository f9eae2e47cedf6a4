"""Calls a function with many random inputs, each from a seed of its own, so that a failure can be reproduced."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from fused_grpo.errors import FusedGRPOError


@pytest.fixture
def chat_tokenizer() -> Any:
    """Takes every character for a token, and has a chat template."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content + '=' }}{% endfor %}"
    return tokenizer


@pytest.fixture
def hostile(portion) -> Callable[..., list[float]]:
    """`hostile(function, count)` calls it with `count` generators. Returns the shares of results and of errors."""

    def run(function: Callable[[random.Random], Any], count: int, *, documented: Any = FusedGRPOError) -> list[float]:
        count, outcomes = portion(count), [0, 0]
        for seed in range(count):
            try:
                function(random.Random(f"{function.__name__}/{seed}"))
                outcomes[0] += 1
            except documented as error:
                # An error that does not say what it got counts as neither.
                outcomes[1] += isinstance(error, SystemExit) or "got " in str(error)
            except BaseException as error:
                error.add_note(f"seed {seed} of {function.__name__}")
                raise
        assert sum(outcomes) == count
        return [outcome / count for outcome in outcomes]

    return run
