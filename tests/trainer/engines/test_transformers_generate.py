"""The transformers engine with a `generate` that is not the library's."""

from __future__ import annotations

from unittest import mock

import torch

from fused_grpo.trainer.engines.transformers_generate import TransformersEngine
from fused_grpo.trainer.types import SamplingParams


def test_a_generate_that_returns_plain_tokens_gives_completions_without_logprobs(build_model, tokenizer) -> None:
    model, stop = build_model(), tokenizer.eos_token_id
    tails = torch.tensor([[9, stop, 0], [8, 8, 8], [stop, 5, 5], [6, 6, stop]])
    engine = TransformersEngine(model, tokenizer)
    with mock.patch.object(model, "generate", lambda input_ids, **_: torch.cat([input_ids, tails], dim=1)):
        rollouts = engine.generate([[4, 5, 6], [4]], SamplingParams(n=2, max_tokens=3))
    assert rollouts.completion_ids == [[9, stop], [8, 8, 8], [stop], [6, 6, stop]]
    assert rollouts.finish_reasons == ["stop", "length", "stop", "stop"]
    assert rollouts.sampling_logprobs is None
    assert engine.generate([[4]], SamplingParams(n=1, max_tokens=3)).sampling_logprobs is not None
