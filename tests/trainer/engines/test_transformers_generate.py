"""The transformers engine with a `generate` that is not the library's."""

from unittest import mock

import pytest
import torch

from fused_grpo.errors import InputError, UnavailableError
from fused_grpo.trainer.engines.checked_engine import checked_generate
from fused_grpo.trainer.engines.transformers_generate import _EXTRAS, TransformersEngine
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


def test_a_beam_search_is_refused(build_model, tokenizer) -> None:
    engine = TransformersEngine(build_model(), tokenizer)
    for name in ("num_beams", "length_penalty"):
        with pytest.raises(InputError, match=f"got generation_kwargs with {name}, want only what .*fix: "):
            engine.generate([[4, 5]], SamplingParams(n=2, max_tokens=3, extra={name: 2}))


VALUES = ["x", -1, 10**6, None, {}, [["a"]], [[10**6]], 0.5, True]


@pytest.mark.filterwarnings("ignore:Unfeasible length")
@pytest.mark.parametrize("name", sorted(_EXTRAS))
def test_values_that_generate_does_not_take_are_named(build_model, tokenizer, name) -> None:
    engine, outcomes = TransformersEngine(build_model(), tokenizer), []
    for value in VALUES:
        try:
            engine.generate([[4, 5]], SamplingParams(n=2, max_tokens=3, extra={name: value}))
        except InputError as error:
            outcomes.append(str(error))
    assert all(name in outcome and "want" in outcome and "fix: " in outcome for outcome in outcomes)
    assert outcomes or name in ("disable_compile", "min_new_tokens")  # a flag, and a number that is only warned of


def test_a_cache_that_transformers_does_not_have_is_named(build_model, tokenizer) -> None:
    engine = TransformersEngine(build_model(), tokenizer, cache_implementation="typo")
    with pytest.raises(InputError, match=r"got \{'cache_implementation': 'typo'\} for generate\(\) .*Invalid"):
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
