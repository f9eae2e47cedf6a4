"""make_engine: what is chosen, and what is said where that is not possible."""

from __future__ import annotations

import importlib.util
import logging

import pytest

from fused_grpo.errors import InputError, UnavailableError
from fused_grpo.trainer.engines import make_engine
from fused_grpo.trainer.engines.transformers_generate import TransformersEngine

OPTIONS = {"max_model_len": 64, "dtype": "float32"}


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else found(name))


@pytest.mark.usefixtures("without_vllm")
def test_auto_falls_back_to_transformers_and_says_so(build_model, tokenizer, caplog) -> None:
    with caplog.at_level(logging.INFO, logger="fused_grpo.trainer.engines"):
        engine = make_engine("auto", build_model(), tokenizer, **OPTIONS)
    assert isinstance(engine, TransformersEngine)
    assert "rollout engine: transformers" in caplog.text


@pytest.mark.usefixtures("without_vllm")
def test_asking_for_vllm_where_it_is_missing_names_the_command(build_model, tokenizer) -> None:
    with pytest.raises(UnavailableError, match=r"fix: pip install 'fused-grpo\[vllm"):
        make_engine("vllm", build_model(), tokenizer, **OPTIONS)


def test_an_unknown_engine_is_refused_with_the_choices(build_model, tokenizer) -> None:
    with pytest.raises(
        InputError, match=r"got rollout engine 'sglang', want one of \('auto', 'vllm', 'server', .*fix:"
    ):
        make_engine("sglang", build_model(), tokenizer, **OPTIONS)
