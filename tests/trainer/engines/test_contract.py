"""What the loop relies on, for every engine."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from fused_grpo.errors import InputError
from fused_grpo.trainer import GRPOConfig
from fused_grpo.trainer.engines import RolloutEngine
from fused_grpo.trainer.engines.engine_choice import choose_engine
from fused_grpo.trainer.models.adapters import checkpoint_weights
from fused_grpo.trainer.types import SamplingParams

PLAIN = SamplingParams(n=4, max_tokens=8, seed=11)
GREEDY = replace(PLAIN, temperature=0.0)
VLLM = ["vllm", "server"]


@pytest.fixture(scope="module")
def model(build_model):
    return build_model("qwen2", tied=True)


@pytest.fixture(scope="module", params=["transformers", *(pytest.param(n, marks=pytest.mark.engine) for n in VLLM)])
def engine(request, model, tokenizer) -> Iterator[RolloutEngine]:
    urls = [request.getfixturevalue("server").url] if request.param == "server" else None
    args = GRPOConfig(vllm_max_model_length=192, vllm_server_base_url=urls, top_k=8)
    engine = choose_engine(request.param, args, model, tokenizer)
    engine.load_weights(checkpoint_weights(model), version=0)
    yield engine
    engine.close()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logprobs_are_those_of_the_tempered_model(
    engine, model, prompts, plain_logprobs, sampled_logprobs, temperature
) -> None:
    rollouts = engine.generate(prompts, replace(PLAIN, temperature=temperature))
    expected = plain_logprobs(model, rollouts, temperature=temperature)
    torch.testing.assert_close(sampled_logprobs(rollouts), expected, atol=1e-4, rtol=0)
    assert expected.std() > 0.1


def test_completions_are_grouped_by_prompt_in_the_order_asked(engine, model, prompts) -> None:
    rollouts = engine.generate(prompts, GREEDY)
    alone = [engine.generate([prompt], replace(GREEDY, n=1)).completion_ids[0] for prompt in prompts]
    assert rollouts.prompt_ids == prompts
    assert rollouts.completion_ids == [completion for completion in alone for _ in range(GREEDY.n)]
    assert len({tuple(completion) for completion in alone}) > 2


def test_a_call_may_have_more_prompt_tokens_than_one_pass_of_vllm(
    engine, model, prompts, plain_logprobs, sampled_logprobs
) -> None:
    many = [[3 + place, *prompts[-1][1:]] for place in range(40)]  # of 150 tokens; a pass has 4096
    rollouts = engine.generate(many, PLAIN)
    torch.testing.assert_close(sampled_logprobs(rollouts), plain_logprobs(model, rollouts), atol=1e-4, rtol=0)


def test_greedy_takes_the_most_likely_token_and_its_untempered_logprob(
    engine, model, prompts, plain_logits, plain_logprobs, sampled_logprobs
) -> None:
    rollouts = engine.generate(prompts, GREEDY)
    for index, completion in enumerate(rollouts.completion_ids):
        assert plain_logits(model, rollouts, index).argmax(-1).tolist() == completion
    torch.testing.assert_close(sampled_logprobs(rollouts), plain_logprobs(model, rollouts), atol=1e-4, rtol=0)


def test_truncated_sampling_renormalises_over_the_tokens_it_keeps(engine, model, prompts, plain_logits) -> None:
    rollouts = engine.generate(prompts, replace(PLAIN, top_k=3))
    for index, completion in enumerate(rollouts.completion_ids):
        best = plain_logits(model, rollouts, index).topk(3)
        position = (best.indices == torch.tensor(completion)[:, None]).float().argmax(-1, keepdim=True)
        assert best.indices.gather(1, position)[:, 0].tolist() == completion
        expected = best.values.log_softmax(-1).gather(1, position)[:, 0]
        torch.testing.assert_close(torch.tensor(rollouts.sampling_logprobs[index]), expected, atol=1e-4, rtol=0)


def kept_tokens(logits: torch.Tensor, *, top_p: float, top_k: int, min_p: float) -> list[int]:
    """What min_p, top_k and top_p leave, one after the other, as vLLM applies them."""
    probabilities = logits.softmax(-1)
    order = probabilities.argsort(descending=True)
    order = order[probabilities[order] >= min_p * probabilities.max()][:top_k]
    share = probabilities[order] / probabilities[order].sum()
    return sorted(order[share.cumsum(0) - share < top_p].tolist())


def test_the_support_of_a_token_is_what_the_truncation_keeps(engine, model, prompts, plain_logits) -> None:
    cut = {"top_p": 0.8, "top_k": 8, "min_p": 0.05}
    rollouts = engine.generate(prompts, replace(PLAIN, **cut, temperature=0.5, sampling_support="require"))
    sizes = set()
    for index, completion in enumerate(rollouts.completion_ids):
        listed = rollouts.listed_tokens[index]
        supports = listed.ids.split(listed.sizes.tolist())
        logits = plain_logits(model, rollouts, index) / 0.5
        for kept, row, token, logprob in zip(
            supports, logits, completion, rollouts.sampling_logprobs[index], strict=True
        ):
            assert kept.tolist() == kept_tokens(row, **cut)
            assert logprob == pytest.approx(row[kept].log_softmax(-1)[kept.tolist().index(token)].item(), abs=1e-4)
            sizes.add(len(kept))
    assert len(sizes) > 3
    assert engine.generate(prompts, replace(PLAIN, **cut)).listed_tokens is None


@pytest.mark.parametrize("kind", ["kept", "topk"])
def test_logprobs_of_likely_tokens_are_those_of_the_tempered_model(engine, model, prompts, plain_logits, kind) -> None:
    cut = {"top_p": 0.9, "top_k": 8, "sampling_support": "require"} if kind == "kept" else {"score_centering_topk": 5}
    rollouts = engine.generate(prompts, replace(PLAIN, **cut, temperature=0.5, score_centering=kind))
    drawn = set()
    for index, completion in enumerate(rollouts.completion_ids):
        given = rollouts.listed_tokens[index]
        assert given.is_top_k is (kind == "topk")
        listed = zip(*(values.split(given.sizes.tolist()) for values in (given.ids, given.logprobs)), strict=True)
        logits = plain_logits(model, rollouts, index) / 0.5
        for (ids, got), row, token, logprob in zip(
            listed, logits, completion, rollouts.sampling_logprobs[index], strict=True
        ):
            within = kept_tokens(row, top_p=0.9, top_k=8, min_p=0.0) if kind == "kept" else row.topk(5).indices.tolist()
            assert ids.tolist() == sorted(within)
            expected = row[ids].log_softmax(-1) if kind == "kept" else row.log_softmax(-1)[ids]
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
            assert kind == "topk" or got.double().exp().sum().item() == pytest.approx(1.0, abs=1e-5)
            assert torch.equal(got[ids == token], torch.full_like(got[ids == token], logprob))  # the same number
            drawn.add(token in ids.tolist())
    assert drawn == ({True} if kind == "kept" else {True, False})


def test_a_repetition_penalty_does_not_depend_on_the_batch(engine, prompts, sampled_logprobs) -> None:
    penalised = replace(GREEDY, repetition_penalty=1.5, n=1)
    together = engine.generate(prompts, penalised)
    alone = [engine.generate([prompt], penalised) for prompt in prompts]
    assert together.completion_ids == [rollouts.completion_ids[0] for rollouts in alone]
    expected = torch.cat([sampled_logprobs(rollouts) for rollouts in alone])
    torch.testing.assert_close(sampled_logprobs(together), expected, atol=1e-4, rtol=0)
    assert together.completion_ids != engine.generate(prompts, replace(GREEDY, n=1)).completion_ids


def test_stopped_completions_keep_their_stop_token_and_say_so(engine, prompts) -> None:
    rollouts = engine.generate(prompts, replace(PLAIN, n=32))
    stops = {1, 7}
    for completion, reason in zip(rollouts.completion_ids, rollouts.finish_reasons, strict=True):
        assert not stops & set(completion[:-1])
        assert reason == ("stop" if completion[-1] in stops else "length")
        assert reason == "stop" or len(completion) == PLAIN.max_tokens
    assert set(rollouts.finish_reasons) == {"stop", "length"}
    assert {completion[-1] for completion in rollouts.completion_ids} > stops


def test_the_same_seed_gives_the_same_completions_and_another_gives_others(engine, prompts) -> None:
    first = engine.generate(prompts, PLAIN)
    assert engine.generate(prompts, PLAIN) == first
    assert engine.generate(prompts, replace(PLAIN, seed=12)).completion_ids != first.completion_ids


def test_calls_without_a_seed_do_not_repeat_each_other(engine, prompts) -> None:
    unseeded = replace(PLAIN, seed=None)
    assert engine.generate(prompts, unseeded).completion_ids != engine.generate(prompts, unseeded).completion_ids


def test_equal_prompts_do_not_share_random_numbers(engine, prompts) -> None:
    completions = engine.generate([prompts[0]] * 8, PLAIN).completion_ids
    distinct = {tuple(completion) for completion in completions}
    # Two of 32 may meet by chance where the first token already stops; overlapping seeds would leave 11.
    assert len(distinct) > 24


def test_completions_carry_the_version_that_was_loaded(engine, model, prompts) -> None:
    before = engine.generate(prompts[:1], PLAIN)
    engine.load_weights(checkpoint_weights(model), version=before.weight_version + 5)
    after = engine.generate(prompts[:1], PLAIN)
    assert after.weight_version == before.weight_version + 5
    assert after.completion_ids == before.completion_ids


def test_sampling_leaves_the_trainers_random_numbers_and_modes_alone(engine, model, prompts) -> None:
    torch.manual_seed(5)
    model.train()
    model.model.norm.eval()
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    engine.generate(prompts, PLAIN)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert torch.is_grad_enabled()
    assert model.training
    assert not model.model.norm.training
    model.eval()


def test_no_stop_token_before_min_tokens(engine, model, prompts, plain_logits, sampled_logprobs) -> None:
    least = "min_new_tokens" if engine.name == "transformers" else "min_tokens"
    rollouts = engine.generate(prompts, replace(PLAIN, n=16, extra={least: 6}))
    assert min(map(len, rollouts.completion_ids)) >= 6
    assert {completion[-1] for completion in rollouts.completion_ids} & {1, 7}
    first = plain_logits(model, rollouts, 0)[0]
    first[[1, 7]] = -torch.inf
    expected = first.log_softmax(-1)[rollouts.completion_ids[0][0]].item()
    assert rollouts.sampling_logprobs[0][0] == pytest.approx(expected, abs=1e-4)


def test_further_stop_tokens_end_completions_too(engine, prompts) -> None:
    stops = list(range(10, 30))
    rollouts = engine.generate(prompts, replace(PLAIN, extra={"stop_token_ids": stops}))
    assert not any(set(completion[:-1]) & {1, 7, *stops} for completion in rollouts.completion_ids)
    assert {completion[-1] for completion in rollouts.completion_ids} & set(stops)


def test_an_option_that_the_engine_decides_or_does_not_know_is_refused(engine, prompts) -> None:
    for extra in ({"temperature": 0.5}, {"guidance_scale": 2.0}):
        with pytest.raises(InputError, match=rf"got generation_kwargs with {next(iter(extra))}, .*fix:"):
            engine.generate(prompts, replace(PLAIN, extra=extra))


def test_sleeping_and_waking_change_nothing_without_sleep_mode(engine, prompts) -> None:
    before = engine.generate(prompts, PLAIN)
    engine.sleep()
    engine.wake()
    assert engine.generate(prompts, PLAIN) == before


def test_an_empty_prompt_is_refused_by_its_index(engine, prompts) -> None:
    with pytest.raises(InputError, match=r"got prompt 1 with no tokens.*fix:"):
        engine.generate([prompts[0], []], PLAIN)


def test_no_prompts_give_no_completions(engine) -> None:
    assert engine.generate([], PLAIN).completion_ids == []
