"""Sampling options: what each engine makes of them, and which of them make a distribution that is not plain."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from fused_grpo.errors import InputError, UnsupportedError
from fused_grpo.trainer.engines.sampling import prepared, vllm_requests
from fused_grpo.trainer.engines.transformers_generate import TransformersEngine
from fused_grpo.trainer.engines.vllm.inprocess import VLLMEngine, VLLMOptions
from fused_grpo.trainer.types import SamplingParams

PLAIN = SamplingParams(n=4, max_tokens=8, seed=11)


@pytest.fixture(scope="module")
def model(build_model):
    return build_model("qwen2", tied=True)


@pytest.mark.parametrize("extra", [{}, {"stop": ["."]}, {"stop_token_ids": [3]}, {"cache_implementation": "static"}])
def test_where_to_stop_and_how_to_compute_leave_sampling_plain(extra) -> None:
    assert replace(PLAIN, temperature=0.7, extra=extra).is_plain


@pytest.mark.parametrize(
    "change",
    [
        {"extra": {"min_tokens": 2}},
        {"structured_outputs_regex": "a"},
        {"extra": {"logit_bias": {3: 1.0}}},
        {"min_p": 0.1},
    ],
)
def test_what_moves_probability_does_not(change) -> None:
    assert not replace(PLAIN, **change).is_plain


def test_a_bound_on_sequences_bounds_the_batch_and_keeps_the_order(model, tokenizer, prompts, monkeypatch) -> None:
    sizes: list[int] = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda *a, **k: sizes.append(len(k["input_ids"])) or forward(*a, **k))
    greedy = replace(PLAIN, temperature=0.0)
    few = TransformersEngine(model, tokenizer, max_sequences=5).generate(prompts, greedy)
    assert max(sizes) == 5
    assert few.completion_ids == TransformersEngine(model, tokenizer).generate(prompts, greedy).completion_ids
    with pytest.raises(InputError, match="max_sequences=0"):
        TransformersEngine(model, tokenizer, max_sequences=0)


def test_parts_of_a_bounded_batch_do_not_share_random_numbers(model, tokenizer, prompts) -> None:
    engine = TransformersEngine(model, tokenizer, max_sequences=4)
    completions = engine.generate([prompts[0]] * 8, PLAIN).completion_ids
    assert len({tuple(completion) for completion in completions}) > 24


@pytest.mark.parametrize("extra", [{"suppress_tokens": list(range(10, 44))}, {"cache_implementation": "static"}])
def test_transformers_takes_its_own_options(model, tokenizer, prompts, extra, plain_logits, sampled_logprobs) -> None:
    rollouts = TransformersEngine(model, tokenizer).generate(prompts, replace(PLAIN, extra=extra))
    hidden = extra.get("suppress_tokens", [])
    expected = []
    for index, completion in enumerate(rollouts.completion_ids):
        logits = plain_logits(model, rollouts, index)
        logits[:, hidden] = -torch.inf
        expected.append(logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0])
    torch.testing.assert_close(sampled_logprobs(rollouts), torch.cat(expected), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", [int, np.float32])
def test_transformers_takes_numbers_of_other_types(model, tokenizer, prompts, kind) -> None:
    engine, options = TransformersEngine(model, tokenizer), {"temperature": kind(2), "repetition_penalty": kind(3)}
    given = engine.generate(prompts, replace(PLAIN, **options))
    plain = engine.generate(prompts, replace(PLAIN, temperature=2.0, repetition_penalty=3.0))
    assert given.completion_ids == plain.completion_ids


def test_transformers_says_what_it_does_not_have(model, tokenizer, prompts) -> None:
    engine = TransformersEngine(model, tokenizer)
    with pytest.raises(UnsupportedError, match=r"structured_outputs_regex='a\+'.*fix: use_vllm=True"):
        engine.generate(prompts, replace(PLAIN, structured_outputs_regex="a+"))
    with pytest.raises(InputError, match="got generation_kwargs with stop,"):
        engine.generate(prompts, replace(PLAIN, extra={"stop": ["a"]}))


def test_a_temperature_that_vllm_would_raise_is_refused() -> None:
    limits = {"engine": "vllm", "max_model_len": 64, "max_listed": 0, "vocab_size": 64}
    with pytest.raises(InputError, match=r"temperature=0\.005, which vLLM replaces by 0\.01"):
        vllm_requests([[6]], replace(PLAIN, temperature=0.005), random.Random(0), **limits)


@pytest.mark.parametrize("engine", ["vllm", "server", "vllm-server"])
def test_a_temperature_that_vllm_would_raise_is_refused_at_the_start(engine) -> None:
    cold = replace(PLAIN, temperature=0.005)
    prepared([], cold, random.Random(0), engine="transformers")
    with pytest.raises(InputError, match=r"temperature=0\.005, which vLLM replaces"):
        prepared([], cold, random.Random(0), engine=engine)


@pytest.mark.parametrize("block", [None, 64, 128])
def test_the_cache_on_a_cpu_has_a_block_for_each_of_two_sequences_at_least(model, block) -> None:
    given = {} if block is None else {"block_size": block}
    options = VLLMOptions(max_model_len=6, dtype=torch.float32, max_sequences=1, engine_options=given).arguments(model)
    token_bytes = 2 * 2 * 1 * 32 * 4  # keys and values, 2 layers, one head of 32, fp32
    assert options["block_size"] == (block or 32)
    assert options["kv_cache_memory_bytes"] == 2 * options["block_size"] * token_bytes


def test_sleep_mode_on_a_cpu_is_refused_before_vllm_starts(model, tokenizer) -> None:
    with pytest.raises(UnsupportedError, match="sleep mode for a vllm engine on a CPU"):
        VLLMEngine(model, tokenizer, VLLMOptions(max_model_len=64, dtype=torch.float32, enable_sleep_mode=True))


@pytest.mark.parametrize("kind", [list, tuple, set, torch.tensor])
def test_every_end_of_sequence_token_of_the_model_ends_a_completion(build_model, tokenizer, prompts, kind) -> None:
    model = build_model("qwen2", tied=True)
    model.generation_config.eos_token_id = kind(list(range(5, 30)))
    rollouts = TransformersEngine(model, tokenizer).generate(prompts, PLAIN)
    assert any(ids[-1] in range(5, 30) for ids in rollouts.completion_ids)
    assert not any(token in range(5, 30) for ids in rollouts.completion_ids for token in ids[:-1])
