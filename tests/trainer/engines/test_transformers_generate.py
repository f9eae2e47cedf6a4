"""The transformers engine with a `generate` that is not the library's."""

from unittest import mock

import pytest
import torch
from transformers import GenerationConfig

from fused_grpo.errors import InputError, UnavailableError
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.engines.checked_engine import checked_generate
from fused_grpo.trainer.engines.sampling import _EXTRAS
from fused_grpo.trainer.engines.transformers_generate import TransformersEngine
from fused_grpo.trainer.types import SamplingParams


def test_a_generate_that_returns_plain_tokens_gives_no_logprobs(build_model, tokenizer) -> None:
    model, stop = build_model(), tokenizer.eos_token_id
    tails = torch.tensor([[9, stop, 0], [8, 8, 8], [stop, 5, 5], [6, 6, stop]])
    engine = TransformersEngine(model, tokenizer)
    with mock.patch.object(model, "generate", lambda input_ids, **_: torch.cat([input_ids, tails], dim=1)):
        rollouts = engine.generate([[4, 5, 6], [4]], SamplingParams(n=2, max_tokens=3))
    assert rollouts.completion_ids == [[9, stop], [8, 8, 8], [stop], [6, 6, stop]]
    assert rollouts.finish_reasons == ["stop", "length", "stop", "stop"]
    assert rollouts.sampling_logprobs is None
    assert engine.generate([[4]], SamplingParams(n=1, max_tokens=3)).sampling_logprobs is not None


def test_a_beam_search_is_that_of_transformers_and_has_no_logprobs(build_model, tokenizer, caplog) -> None:
    model, prompt, extra = build_model(), [4, 5, 6], {"num_beams": 4, "length_penalty": 0.5}
    plain = model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=0)
    expected = model.generate(torch.tensor([prompt]), plain, max_new_tokens=5, **extra)[0, 3:].tolist()
    options = SamplingParams(n=1, max_tokens=5, temperature=0, extra=extra)
    rollouts = TransformersEngine(model, tokenizer).generate([prompt], options)
    assert rollouts.completion_ids == [expected]
    assert rollouts.sampling_logprobs is None
    assert "no samples of the policy" in caplog.text


def test_sampled_beams_differ_and_repeat_by_their_seed(build_model, tokenizer) -> None:
    def draw(seed: int, max_sequences: int | None = None) -> list[list[int]]:
        engine = TransformersEngine(build_model(), tokenizer, max_sequences=max_sequences)
        options = SamplingParams(n=4, max_tokens=8, top_k=40, seed=seed, extra={"num_beams": 2})
        return engine.generate([[4, 5]], options).completion_ids

    assert draw(1) == draw(1) != draw(2)
    assert len(set(map(tuple, draw(1)))) > 1
    assert len(set(map(tuple, draw(1, max_sequences=1)))) > 1  # each call of `generate` has random numbers of its own


OF_A_MODEL = {"suppress_tokens": [5], "min_new_tokens": 2, "no_repeat_ngram_size": 2, "bad_words_ids": [[6]]}


@pytest.mark.parametrize("name", OF_A_MODEL)
def test_what_a_model_asks_for_is_not_left_out_in_silence(build_model, tokenizer, caplog, name) -> None:
    model, options = build_model(), SamplingParams(n=1, max_tokens=2, seed=1)
    model.generation_config = GenerationConfig(top_k=20, do_sample=True, repetition_penalty=1.1, eos_token_id=1)
    engine = TransformersEngine(model, tokenizer)
    warn_once.cache_clear()
    engine.generate([[4, 5]], options)
    assert caplog.text == ""
    setattr(model.generation_config, name, OF_A_MODEL[name])
    engine.generate([[4, 5]], options)
    assert f"got {name} in the model's generation_config, which samples without it" in caplog.text


@pytest.mark.parametrize("options", [{}, {"temperature": 0}, {"top_k": 4}, {"top_p": 0.5}, {"repetition_penalty": 1.3}])
@pytest.mark.parametrize("is_beside", [True, False])
def test_in_a_thread_of_its_own_the_generators_are_the_trainers(build_model, tokenizer, options, is_beside) -> None:
    """There the trainer may seed them while the engine samples: what it found at its start is not theirs any more."""
    model = build_model()
    engine = TransformersEngine(model, tokenizer)
    engine.samples_in_background = is_beside
    torch.manual_seed(1)
    before = torch.get_rng_state()
    handle = model.register_forward_hook(lambda *_: torch.manual_seed(2) and None)
    rollouts = engine.generate([[4, 5]], SamplingParams(n=4, max_tokens=8, seed=3, **options))
    handle.remove()
    expected = torch.Generator().manual_seed(2).get_state() if is_beside else before
    assert torch.equal(torch.get_rng_state(), expected)
    assert engine.generate([[4, 5]], SamplingParams(n=4, max_tokens=8, seed=3, **options)) == rollouts


VALUES = ["x", -1, 10**6, None, {}, [["a"]], [[10**6]], 0.5, True]


@pytest.mark.filterwarnings("ignore:Unfeasible length")
@pytest.mark.parametrize("name", sorted(_EXTRAS))
def test_values_that_generate_does_not_take_are_named(build_model, tokenizer, name) -> None:
    engine, outcomes = TransformersEngine(build_model(), tokenizer), []
    for value in VALUES:
        if name == "num_beams" and value == 10**6:
            continue  # is taken, and needs memory for that many
        try:
            engine.generate([[4, 5]], SamplingParams(n=2, max_tokens=3, extra={name: value}))
        except InputError as error:
            outcomes.append(str(error))
    assert all(name in outcome and "want" in outcome and "fix: " in outcome for outcome in outcomes)
    # A flag, a number that is only warned of, and one that is read with beams alone.
    assert outcomes or name in ("disable_compile", "min_new_tokens", "length_penalty")


def test_a_cache_that_transformers_does_not_have_is_named(build_model, tokenizer) -> None:
    engine = TransformersEngine(build_model(), tokenizer, cache_implementation="typo")
    with pytest.raises(InputError, match=r"got \{'cache_implementation': 'typo'\} for generate\(\) .*Invalid"):
        engine.generate([[4, 5]], SamplingParams(n=2, max_tokens=3))


@pytest.mark.parametrize("error", [ImportError, AssertionError])
def test_a_cache_without_its_package_or_gpu_is_named(build_model, tokenizer, error) -> None:
    """As "quantized" raises without optimum-quanto, and "offloaded" without CUDA."""
    model = build_model()
    engine = TransformersEngine(model, tokenizer, cache_implementation="quantized")
    with (
        mock.patch.object(model, "generate", side_effect=error("needs it")),
        pytest.raises(InputError, match=r"got \{'cache_implementation': 'quantized'\} .*needs it"),
    ):
        engine.generate([[4, 5]], SamplingParams(n=2, max_tokens=3))


def test_an_error_of_the_model_is_not_taken_for_one_of_the_options(build_model, tokenizer) -> None:
    model = build_model()
    with (
        mock.patch.object(model, "generate", side_effect=ValueError("mine")),
        pytest.raises(ValueError, match=r"^mine$"),
    ):
        TransformersEngine(model, tokenizer).generate([[4, 5]], SamplingParams(n=2, max_tokens=3))


def test_a_prompt_that_gives_nan_is_named_and_the_others_are_sampled(build_model, tokenizer) -> None:
    model, sampling = build_model(), SamplingParams(n=2, max_tokens=3, seed=1)
    sound = TransformersEngine(model, tokenizer).generate([[4, 5], [6]], sampling)
    model.get_input_embeddings().register_forward_hook(
        lambda _, inputs, output: output.masked_fill((inputs[0] == 7)[..., None], torch.nan)
    )
    with pytest.raises(UnavailableError, match="log-prob nan in completion 0 of prompt 1"):
        checked_generate(TransformersEngine(model, tokenizer), [[4, 5], [7]], sampling, vocab_size=64)
    dropping = {"vocab_size": 64, "failure": "drop"}
    samples = checked_generate(TransformersEngine(model, tokenizer), [[4, 5], [7]], sampling, **dropping)
    assert [sample.failure is not None for sample in samples] == [False, False, True, True]
    assert samples[0].completion_ids == sound.completion_ids[0]
