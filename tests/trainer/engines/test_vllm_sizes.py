"""vLLM in process on a CPU at the sizes of real data: a call of any size gives what small calls give.

One engine serves all tests. Its KV cache is smaller than the default one, so that it overflows soon; everything else
is as a run has it.
"""

import operator
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_grpo.errors import InputError
from fused_grpo.trainer.engines.vllm.inprocess import VLLMEngine, VLLMOptions
from fused_grpo.trainer.models.adapters import checkpoint_weights
from fused_grpo.trainer.types import Rollouts, SamplingParams

pytestmark = pytest.mark.engine

LONGEST = 2304
BLOCK = 128 * 2 * 2 * 32 * 4  # bytes of four blocks, 128 tokens: keys and values, 2 layers, one head of 32, fp32
SAMPLING = SamplingParams(n=1, max_tokens=6, seed=3)
FULL = {"ignore_eos": True}

Prompts = list[list[int]]


@pytest.fixture(scope="module")
def model(build_model):
    return build_model("qwen2", tied=True, positions=LONGEST)


@pytest.fixture(scope="module")
def engine(model, tokenizer) -> Iterator[VLLMEngine]:
    options = {"kv_cache_memory_bytes": 220 * BLOCK}
    engine = VLLMEngine(
        model, tokenizer, VLLMOptions(max_model_len=LONGEST, dtype=torch.float32, engine_options=options)
    )
    yield engine
    engine.close()


@pytest.fixture
def preempted(engine, monkeypatch) -> list[str]:
    """The requests that vLLM interrupted for lack of memory, to compute them again."""
    scheduler, requests = engine._llm.llm_engine.engine_core.engine_core.scheduler, list[str]()
    preempt = scheduler._preempt_request

    def counted(request: Any, *args: Any, **options: Any) -> None:
        requests.append(request.request_id)
        preempt(request, *args, **options)

    monkeypatch.setattr(scheduler, "_preempt_request", counted)
    return requests


@pytest.fixture(scope="module")
def compare(engine, model, plain_logprobs) -> Callable[..., Rollouts]:
    """Sample in one call; compare some groups with calls of one prompt, and their log-probs with the trainer's."""

    def compare(prompts: Prompts, sampling: SamplingParams, *, alone: int = 3) -> Rollouts:
        rollouts, n, others = engine.generate(prompts, sampling), sampling.n, 0
        for group in {0, len(prompts) - 1, *random.Random(0).sample(range(len(prompts)), min(alone, len(prompts)))}:
            small = engine.generate([prompts[group]], replace(sampling, first_prompt=group))
            part = slice(n * group, n * group + n)
            others += sum(map(operator.ne, rollouts.completion_ids[part], small.completion_ids))
            sampled = torch.tensor([value for values in rollouts.sampling_logprobs[part] for value in values])
            own = replace(small, completion_ids=rollouts.completion_ids[part])
            expected = plain_logprobs(model, own, temperature=sampling.temperature)
            torch.testing.assert_close(sampled, expected, atol=1e-4, rtol=0)
        # A pass of another size rounds differently by 1e-6, which may decide one of a million tokens.
        assert others <= 1
        return rollouts

    return compare


def random_prompts(count: int, shortest: int, longest: int | None = None) -> Prompts:
    source = random.Random(f"{count} {shortest}")
    lengths = (source.randint(shortest, longest or shortest) for _ in range(count))
    return [[source.randrange(3, 43) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize(
    ("prompts", "sampling"),
    [
        pytest.param(random_prompts(16, 400), replace(SAMPLING, n=4), id="more tokens than a pass"),
        pytest.param(random_prompts(150, 5, 60), replace(SAMPLING, n=4), id="more sequences than run at a time"),
        pytest.param(random_prompts(1024, 5, 60), SAMPLING, id="1024 prompts"),
        pytest.param(random_prompts(5, LONGEST - 6), replace(SAMPLING, n=2), id="prompts as long as the model allows"),
        pytest.param(random_prompts(1, LONGEST - 6), replace(SAMPLING, n=16), id="a long prompt, many completions"),
        pytest.param(random_prompts(6, 100, 200), replace(SAMPLING, n=64), id="groups larger than a block's share"),
    ],
)
def test_a_large_call_equals_small_ones(compare, prompts, sampling) -> None:
    rollouts = compare(prompts, sampling)
    assert len(rollouts.completion_ids) == sampling.n * len(prompts)


def test_a_full_cache_interrupts_completions_and_changes_none(compare, preempted) -> None:
    rollouts = compare(random_prompts(110, 240, 250), replace(SAMPLING, max_tokens=40, extra=FULL), alone=8)
    assert len(preempted) > 5
    assert set(map(len, rollouts.completion_ids)) == {40}


def test_completions_of_2048_tokens_have_the_trainers_logprobs(engine, model, plain_logprobs, sampled_logprobs) -> None:
    long = replace(SAMPLING, n=2, max_tokens=2048, extra=FULL)
    rollouts = engine.generate(random_prompts(1, 250), long)
    torch.testing.assert_close(sampled_logprobs(rollouts), plain_logprobs(model, rollouts), atol=1e-4, rtol=0)
    short = engine.generate(random_prompts(1, 250), replace(long, max_tokens=40))
    assert [completion[:40] for completion in rollouts.completion_ids] == short.completion_ids


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    count=st.integers(1, 60),
    length=st.integers(1, 700),
    n=st.integers(1, 8),
    max_tokens=st.integers(1, 12),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_no_size_of_a_call_matters(compare, count, length, n, max_tokens, temperature) -> None:
    sampling = replace(SAMPLING, n=n, max_tokens=max_tokens, temperature=temperature)
    compare(random_prompts(count, max(1, length // 2), length), sampling, alone=1)


def test_groups_share_a_cached_prompt_and_a_sync_empties_the_cache(engine, model, compare) -> None:
    prompts, sampling = random_prompts(6, 260, 300), replace(SAMPLING, n=8)
    before = compare(prompts, sampling)
    kept = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    engine.load_weights(checkpoint_weights(model), version=1)
    assert compare(prompts, sampling).completion_ids != before.completion_ids
    model.load_state_dict(kept)
    engine.load_weights(checkpoint_weights(model), version=0)
    assert compare(prompts, sampling) == before


def test_a_call_finds_nothing_of_the_calls_before_in_the_cache(engine, monkeypatch) -> None:
    manager, cached = engine._llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager, list[int]()
    look_up = manager.get_computed_blocks

    def counted(*request: Any) -> Any:
        blocks = look_up(*request)
        cached.append(blocks[1])
        return blocks

    monkeypatch.setattr(manager, "get_computed_blocks", counted)
    for _ in range(2):
        engine.generate(random_prompts(1, 300), replace(SAMPLING, n=3))
    assert cached == [0, 288, 288] * 2  # whole blocks of 32 tokens


@pytest.mark.parametrize("option", [{"enable_chunked_prefill": True}, {"long_prefill_token_threshold": 64}])
def test_options_that_compute_a_prompt_in_parts_are_refused(model, tokenizer, option) -> None:
    with pytest.raises(InputError, match=rf"engine_options with {next(iter(option))}.*fix:"):
        VLLMEngine(model, tokenizer, VLLMOptions(max_model_len=64, dtype=torch.float32, engine_options=option))
