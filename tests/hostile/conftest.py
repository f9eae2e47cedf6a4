"""Runs a function on many inputs drawn from a seed each, so that a failure can be had again."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from fused_grpo.errors import FusedGRPOError


@pytest.fixture
def chat_tokenizer() -> Any:
    """Takes any character for a token, and has a chat template."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content + '=' }}{% endfor %}"
    return tokenizer


@pytest.fixture
def hostile(request, record_property, portion) -> Callable[..., list[float]]:
    """`hostile(function, count)` calls it with `count` generators: what share it answered, what share it refused."""

    def run(function: Callable[[random.Random], Any], count: int, *, documented: Any = FusedGRPOError) -> list[float]:
        count, outcomes = portion(count), [0, 0]
        for seed in range(count):
            try:
                function(random.Random(f"{function.__name__}/{seed}"))
                outcomes[0] += 1
            except documented as error:
                # One that does not say what it got counts as neither.
                outcomes[1] += isinstance(error, SystemExit) or "got " in str(error)
            except BaseException as error:
                error.add_note(f"seed {seed} of {function.__name__}")
                raise
        assert sum(outcomes) == count
        what = f"{request.path.stem}: {request.node.name}".replace("test_", "").replace("_", " ")
        record_property("hostile", json.dumps({"what": what, "inputs": count}))
        return [outcome / count for outcome in outcomes]

    return run
