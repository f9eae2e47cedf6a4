"""Supports from what engines return; and those that cannot be right are refused before anything is learnt from them."""

import math
import random
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from batches import column
from hypothesis import given
from hypothesis.strategies import booleans, floats, integers, lists

from fused_grpo.errors import UnavailableError, UnsupportedError, WrongTypeError
from fused_grpo.trainer.engines.checked_engine import checked_generate
from fused_grpo.trainer.engines.sampling import check_listed, listed_support, num_listed, vllm_requests
from fused_grpo.trainer.engines.transformers_generate import SupportRecorder
from fused_grpo.trainer.engines.vllm import start_vllm
from fused_grpo.trainer.engines.vllm.inprocess import VLLMEngine, _completion
from fused_grpo.trainer.types import ListedTokens, Rollouts, SamplingParams

V = 20
PLAIN = SamplingParams(n=2, max_tokens=3)
SAMPLING = replace(PLAIN, top_p=0.9, sampling_support="auto")


def rollouts_of(listed: list[ListedTokens] | None) -> Rollouts:
    return Rollouts(
        prompt_ids=[[6]],
        completion_ids=[[9, 1], [4, 4, 1]],
        sampling_logprobs=None,
        finish_reasons=["stop", "stop"],
        num_generations=2,
        weight_version=0,
        listed_tokens=listed,
    )


class Engine:
    """Returns one of these in each call."""

    name, weight_version = "mine", 0

    def __init__(self, *rollouts: Rollouts) -> None:
        self.rollouts = list(rollouts)

    def generate(self, prompt_ids, sampling) -> Rollouts:
        return self.rollouts.pop(0)


GOOD = [ListedTokens.of([[9, 3], []]), ListedTokens.of([[4], [0, 4, 19], [1, 2]])]


def test_supports_are_ascending_int32_and_empty_for_the_whole_vocabulary() -> None:
    rollouts = checked_generate(Engine(rollouts_of(GOOD)), [[6]], SAMPLING, vocab_size=V)
    listed = column(rollouts, "listed_tokens")
    assert [one.ids.tolist() for one in listed] == [[3, 9], [4, 0, 4, 19, 1, 2]]
    assert [one.sizes.tolist() for one in listed] == [[2, 0], [1, 3, 2]]
    assert {tensor.dtype for one in listed for tensor in (one.ids, one.sizes)} == {torch.int32}


def tensors(ids: list[int], sizes: list[int]) -> ListedTokens:
    return ListedTokens(torch.tensor(ids, dtype=torch.int32), torch.tensor(sizes, dtype=torch.int32))


WRONG = {
    "without the token": (tensors([4, 4, 2], [1, 1, 1]), "a token that is not among those that were kept"),
    "of another token": (tensors([1, 4, 4], [1, 1, 1]), "a token that is not among those that were kept"),
    "twice": (tensors([4, 4, 1], [2, 0, 1]), "kept tokens that are not ascending"),
    "descending": (tensors([5, 4, 1], [2, 0, 1]), "kept tokens that are not ascending"),
    "outside": (tensors([4, 20], [2, 0, 0]), "kept tokens from 4 to 20"),
    "negative": (tensors([-1, 4], [2, 0, 0]), "kept tokens from -1 to 4"),
    "too few sizes": (tensors([4, 4], [1, 1]), "2 kept tokens for supports of 2 tokens"),
    "too few ids": (tensors([4, 4], [1, 1, 1]), "2 kept tokens for supports of 3 tokens"),
    "incomplete": (ListedTokens.of([]), "no complete list of the tokens that the sampler kept"),
}


@pytest.mark.parametrize(("wrong", "message"), WRONG.values(), ids=WRONG)
def test_a_support_that_cannot_be_one_makes_a_completion_unusable(wrong, message) -> None:
    bad = rollouts_of([GOOD[0], wrong])
    with pytest.raises(UnavailableError, match=rf"got {message}.* in completion 1 of prompt 0 .*fix:"):
        checked_generate(Engine(bad), [[6]], SAMPLING, vocab_size=V)
    again = checked_generate(Engine(bad, rollouts_of(GOOD)), [[6]], SAMPLING, vocab_size=V, failure="retry")
    assert again[1].listed_tokens.sizes.tolist() == [1, 3, 2]
    dropped = checked_generate(Engine(bad), [[6]], SAMPLING, vocab_size=V, failure="drop")
    assert [one.sizes.tolist() for one in column(dropped, "listed_tokens")] == [[2, 0], []]


@given(lists(lists(booleans(), min_size=6, max_size=6), min_size=1, max_size=5), integers(1, 3))
def test_a_recorder_sorts_steps_of_a_batch_by_sequence(kept, batch) -> None:
    recorder, steps = SupportRecorder(), torch.tensor(kept)
    for step in steps:
        rows = torch.stack([step.roll(shift) for shift in range(batch)])
        recorder.add(torch.where(rows, 0.5, -torch.inf))
    for shift, support in enumerate(recorder.take()):
        expected = [row.roll(shift) for row in steps]
        sizes = [0 if row.all() else int(row.sum()) for row in expected]
        assert support.sizes.tolist() == sizes
        ids = [row.nonzero()[:, 0] for row, size in zip(expected, sizes, strict=True) if size]
        assert support.ids.tolist() == torch.cat([torch.zeros(0, dtype=torch.int64), *ids]).tolist()


def test_a_list_of_likely_tokens_is_a_support_only_with_all_kept_ones() -> None:
    even = {5: math.log(0.5), 3: math.log(0.5)}
    support = listed_support([even | {7: -math.inf}, even | {7: -9999.0}])
    assert (support.ids.tolist(), support.sizes.tolist()) == ([3, 5, 3, 5], [2, 2])
    assert not len(listed_support([even, {5: math.log(0.5), 3: math.log(0.4)}]).sizes)


def test_the_most_likely_tokens_do_not_depend_on_the_one_that_was_drawn() -> None:
    likely = {5: -1.0, 3: -0.5, 8: -3.0, 2: -1.0}
    drawn = [{token: likely.get(token, -9.0), **likely} for token in (9, 8, 5)]  # first, as vLLM has it
    support = listed_support([*drawn, {4: -0.1, 6: -math.inf}], top=2)
    assert (support.ids.tolist(), support.sizes.tolist()) == ([2, 3, 2, 3, 2, 3, 4], [2, 2, 2, 1])
    torch.testing.assert_close(support.logprobs, torch.tensor([-1.0, -0.5] * 3 + [-0.1]))


@given(lists(lists(floats(-9, 9, width=32), min_size=6, max_size=6), min_size=1, max_size=5), integers(1, 3))
def test_probabilities_of_all_kept_tokens_sum_to_one(rows, batch) -> None:
    recorder = SupportRecorder()
    for row in rows:
        scores = torch.stack([torch.tensor(row).roll(shift) for shift in range(batch)])
        scores = scores.masked_fill(scores < scores.median(1, keepdim=True).values, -torch.inf)
        recorder.add(scores, scores.log_softmax(-1))
    for support in recorder.take():
        assert support.sizes.min() > 0  # all tokens are listed where all are kept
        parts = support.logprobs.double().exp().split(support.sizes.tolist())
        torch.testing.assert_close(
            torch.stack([part.sum() for part in parts]), torch.ones(len(rows)).double(), atol=1e-6, rtol=0
        )


CENTERED = replace(SAMPLING, score_centering="kept")
KNOWN = [
    ListedTokens.of([{9: math.log(0.25), 3: math.log(0.75)}, {1: 0.0}]),
    ListedTokens.of([{4: 0.0}] * 2 + [{1: 0.0}]),
]


def centered(**changes) -> Rollouts:
    """With other listed tokens of the second completion."""
    listed = [KNOWN[0], replace(KNOWN[1], **changes)]
    return replace(rollouts_of(listed), sampling_logprobs=[[-1.0] * 2, [-1.0] * 3])


@pytest.mark.parametrize(
    ("logprobs", "message"),
    [
        ([0.0, 0.0], "2 log-probs for 3 kept tokens"),
        ([0.0, 0.0, math.nan], "one that is not finite"),
        ([0.0, 0.0, 0.1], "probabilities of kept tokens that sum to 1 to 1.105"),
        ([0.0, -0.1, 0.0], "probabilities of kept tokens that sum to 0.9048 to 1"),
    ],
)
def test_logprobs_that_are_no_distribution_make_a_completion_unusable(logprobs, message) -> None:
    bad = centered(logprobs=torch.tensor(logprobs))
    with pytest.raises(UnavailableError, match=rf"got .*{message}.* in completion 1 of prompt 0 .*fix:"):
        checked_generate(Engine(bad), [[6]], CENTERED, vocab_size=V)
    dropped = checked_generate(Engine(bad), [[6]], CENTERED, vocab_size=V, failure="drop")
    assert [len(one.logprobs) for one in column(dropped, "listed_tokens")] == [3, 0]


@pytest.mark.parametrize("given", [[GOOD[0], None], [[[9], [1]], [[4], [4], [1]]]], ids=["None", "lists"])
def test_listed_tokens_of_another_type_are_an_error_that_names_theirs(given) -> None:
    with pytest.raises(WrongTypeError, match=r"got listed_tokens with (NoneType|list) from the mine engine.*fix: List"):
        checked_generate(Engine(rollouts_of(given)), [[6]], SAMPLING, vocab_size=V)


NO_LOGPROBS = {
    "no log-probs": centered(logprobs=None),
    "likely tokens": centered(is_top_k=True),
    "no lists": replace(centered(), listed_tokens=None),
    "nothing of the drawn": replace(centered(), sampling_logprobs=None),
}


@pytest.mark.parametrize("rollouts", NO_LOGPROBS.values(), ids=NO_LOGPROBS)
def test_score_centering_without_the_samplers_logprobs_is_refused(rollouts) -> None:
    assert checked_generate(Engine(centered()), [[6]], CENTERED, vocab_size=V)[1].listed_tokens.logprobs is not None
    with pytest.raises(UnsupportedError, match=r"got score_centering='kept' and no log-probs .* mine engine.*fix:"):
        checked_generate(Engine(rollouts), [[6]], CENTERED, vocab_size=V)


@pytest.mark.parametrize(
    ("sampling", "most", "message"),
    [
        (
            replace(PLAIN, score_centering="topk"),
            100,
            "lists the log-probs of 100 tokens at most, want 128; fix: --x=128",
        ),
        (replace(PLAIN, score_centering="topk", score_centering_topk=30), 30, None),
        (replace(CENTERED, top_k=20), 29, "of 29 tokens at most, want 30"),
        (replace(CENTERED, top_k=20), 30, None),
        (CENTERED, 9000, "top_k=0 with the vllm engine, want a bound .*fix: top_k of 1 to 1024"),
        (replace(SAMPLING, top_k=20), 0, None),
    ],
)
def test_an_engine_that_lists_too_few_tokens_is_refused_at_the_start(sampling, most, message) -> None:
    limits = {"max_listed": most, "vocab_size": 9000, "engine": "vllm", "fix": "--x"}
    with nullcontext() if message is None else pytest.raises(UnsupportedError, match=message):
        check_listed(sampling, **limits)


def test_more_than_top_k_are_listed_as_equal_logits_are_all_kept() -> None:
    listed = {(50, 9000): 75, (4, 9000): 12, (50, 60): 60, (0, 43): 43, (0, 9000): None, (2000, 9000): None}
    for (top_k, vocab_size), number in listed.items():
        assert num_listed(replace(SAMPLING, top_k=top_k), vocab_size) == number


@pytest.mark.engine
def test_a_sampling_mask_of_vllm_is_taken_as_it_is() -> None:
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput, SamplingMask

    logprobs = [{9: Logprob(-0.5)}, {1: Logprob(-0.1)}]
    mask = SamplingMask([[9, 3], [1]])
    output = CompletionOutput(0, "", [9, 1], None, logprobs, finish_reason="stop", sampling_mask=mask)
    support = _completion(output, listed=False).listed_tokens
    assert (support.ids.tolist(), support.sizes.tolist()) == ([3, 9, 1], [2, 1])


@pytest.mark.engine
def test_an_engine_with_a_mask_asks_for_what_vllm_takes() -> None:
    """vLLM refuses temperature 0 and an unlimited top_k with its mask: see its input_processor.py."""
    engine = VLLMEngine.__new__(VLLMEngine)
    engine._has_mask, engine._vocab_size = True, V
    seeded = replace(SAMPLING, seed=0)
    requests = [seeded, replace(seeded, top_k=7), replace(seeded, temperature=0.0)]
    limits = {"engine": "vllm", "max_model_len": 9, "max_listed": 0, "vocab_size": V}
    options = [vllm_requests([[6]], one, random.Random(0), **limits)[1] for one in requests]
    asked = [engine._requests(each, one)[0] for each, one in zip(options, requests, strict=True)]
    assert [(one.temperature, one.top_k, one.top_p) for one in asked] == [(1.0, V, 0.9), (1.0, 7, 0.9), (1.0, 1, 0.9)]


def test_vllm_without_a_mask_for_a_model_starts_without_it(monkeypatch, caplog) -> None:
    started: list[dict] = []

    def launch(folder, options, *, on_cpu):
        started.append(options)
        if options["return_sampling_mask"]:
            raise ValueError("sampling distribution replay requires Model Runner V2")

    monkeypatch.setattr(start_vllm, "_launch", launch)
    start_vllm._launch_with_mask("folder", {"return_sampling_mask": True}, on_cpu=False)
    assert [options["return_sampling_mask"] for options in started] == [True, False]
    assert "requires Model Runner V2" in caplog.text
