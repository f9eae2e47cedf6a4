"""A response of any engine that is not what was asked for is an error that says what it was."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import column

from fused_grpo.errors import UnavailableError, WeightSyncError
from fused_grpo.trainer.engines.checked_engine import checked_generate, checked_load_weights, generated
from fused_grpo.trainer.engines.rollout_func import FunctionEngine
from fused_grpo.trainer.types import Rollouts, Sample, SamplingParams

SAMPLING = SamplingParams(n=2, max_tokens=3)
PROMPTS = [[6, 5, 7], [4, 5]]
GOOD = Rollouts(
    prompt_ids=PROMPTS,
    completion_ids=[[9, 1], [9, 9, 9], [8], [19]],
    sampling_logprobs=[[-0.5, -2.0], [0.0, -1.0, -90.0], [1e-7], [-3]],
    finish_reasons=["stop", "length", "stop", "length"],
    num_generations=2,
    weight_version=4,
)


class Engine:
    """Returns what it was made with."""

    name, weight_version = "mine", 4

    def __init__(self, rollouts: Rollouts = GOOD) -> None:
        self.rollouts = rollouts

    def generate(self, prompt_ids: Any, sampling: Any) -> Rollouts:
        return self.rollouts

    def load_weights(self, named_weights: Any, version: int) -> None:
        """Does not set `weight_version`."""


def ask(**changes: Any) -> list[Sample]:
    return checked_generate(Engine(replace(GOOD, **changes)), PROMPTS, SAMPLING, vocab_size=20)


def test_rollouts_that_are_right_are_returned_as_they_are() -> None:
    assert column(ask(sampling_logprobs=None, extra={"score": [1, 2, 3, 4]}), "sampling_logprobs") is None
    returned = checked_generate(Engine(), PROMPTS, SAMPLING, vocab_size=20)
    assert repr(returned) == repr(GOOD.samples())  # their rewards are NaN


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"completion_ids": [[9]] * 3}, "3 completions from the mine engine"),
        ({"finish_reasons": ["stop"] * 5}, "5 finish reasons from the mine engine"),
        ({"sampling_logprobs": [[-1.0]]}, "1 lists of log-probs from the mine engine"),
        ({"extra": {"score": [1.0]}}, "1 values of 'score' from the mine engine"),
        ({"num_generations": 4}, "groups of 4 from the mine engine"),
        ({"prompt_ids": PROMPTS[:1]}, "1 prompts from the mine engine"),
        ({"prompt_ids": PROMPTS[::-1]}, "completions of other prompts from the mine engine"),
        ({"prompt_ids": None}, "no prompts from the mine engine"),
        ({"finish_reasons": None}, "no finish reasons from the mine engine"),
        ({"completion_ids": [torch.tensor([9, 1])] * 4}, "a Tensor as a completion from the mine engine"),
        ({"completion_ids": torch.tensor([[9, 1]] * 4).numpy()}, "a ndarray as a completion from the mine engine"),
        ({"completion_ids": [None] * 4}, "a NoneType as a completion from the mine engine"),
        ({"extra": {"score": 1.0}}, "0 values of 'score' from the mine engine"),
        ({"extra": None}, "no extra columns from the mine engine"),
    ],
)
def test_another_number_of_anything_is_refused(changes, message) -> None:
    with pytest.raises(UnavailableError, match=rf"got {message}, want 2 completions for each of 2 prompts.*fix:"):
        ask(**changes)
    with pytest.raises(UnavailableError, match=r"got a dict from the mine engine, want .* as Rollouts with lists"):
        generated(SimpleNamespace(name="mine", weight_version=4, generate=lambda *_: changes), PROMPTS, SAMPLING)


@pytest.mark.parametrize(
    ("ids", "logprobs", "reason", "message"),
    [
        ([], [], "stop", "no tokens"),
        ([9, 9, 9, 9], [-1.0] * 4, "length", "4 tokens"),
        ([9, 20], [-1.0] * 2, "stop", "token id 20"),
        ([-1], [-1.0], "stop", "token id -1"),
        ([9.0], [-1.0], "stop", "token id 9.0"),
        ([9], [-1.0, -2.0], "stop", "2 log-probs for 1 tokens"),
        ([9], [math.nan], "stop", "log-prob nan"),
        ([9], [-math.inf], "stop", "log-prob -inf"),
        ([9], [-1e39], "stop", r"log-prob -1e\+39"),
        ([9, 9], [-1, math.nan], "stop", "log-prob nan"),
        ([9], [0.01], "stop", r"log-prob 0\.01"),
        ([9], [None], "stop", "log-prob None"),
        ([9], [-1.0], "abort", "finish reason 'abort'"),
    ],
)
def test_a_completion_that_cannot_be_one_is_refused_by_its_prompt(ids, logprobs, reason, message) -> None:
    changes = {
        "completion_ids": [*GOOD.completion_ids[:3], ids],
        "sampling_logprobs": [*GOOD.sampling_logprobs[:3], logprobs],
        "finish_reasons": [*GOOD.finish_reasons[:3], reason],
    }
    where = r"in completion 1 of prompt 1 \(token ids \[4, 5\]\) from the mine engine, want 1 to 3 token ids below 20"
    with pytest.raises(UnavailableError, match=rf"got {message} {where}.*fix:"):
        ask(**changes)


@pytest.mark.parametrize("version", [3, 5, -1])
def test_completions_of_other_weights_than_the_last_are_refused(version) -> None:
    with pytest.raises(
        WeightSyncError, match=rf"of weight version {version} from the mine engine, want version 4.*fix:"
    ):
        ask(weight_version=version)


def test_an_engine_that_does_not_report_the_new_version_is_refused() -> None:
    with pytest.raises(WeightSyncError, match=r"weight version 4 from the mine engine after a sync, want 5; fix:"):
        checked_load_weights(Engine(), [], version=5)
    checked_load_weights(Engine(), [], version=4)


@pytest.mark.parametrize("method", ["load_weights", "generate"])
def test_an_engine_that_edits_the_weights_it_is_given_is_refused(make_trainer, served_engine, method) -> None:
    class Halving(served_engine):  # which keeps what it is given, as others that quantise or cast
        samples_in_background, kept = False, ()

        def load_weights(self, named_weights: Any, version: int) -> None:
            self.kept = dict(named_weights)
            super().load_weights(self.kept.items(), version)
            self.halve("load_weights")

        def generate(self, prompt_ids: Any, sampling: Any) -> Rollouts:
            self.halve("generate")
            return super().generate(prompt_ids, sampling)

        def halve(self, now: str) -> None:
            for weight in self.kept if now == method else ():
                self.kept[weight].mul_(0.5)

    with pytest.raises(WeightSyncError, match=r"got 27 of .* changed in place by the scripted engine.*fix: weight"):
        make_trainer(engine=Halving).train()


def test_a_function_may_omit_log_probs_but_not_return_unknown_tokens() -> None:
    trainer = SimpleNamespace(model=None, processing_class=SimpleNamespace(eos_token_id=1, pad_token_id=0))
    output = {"prompt_ids": [[2]] * 4, "completion_ids": [[9]] * 4, "logprobs": [[None]] * 4}
    seen: list[Any] = []

    def ask_function(**changes: Any) -> list[Sample]:
        engine = FunctionEngine(lambda prompts, _: seen.append(prompts) or output | changes, trainer)
        return checked_generate(
            engine, PROMPTS, SAMPLING, vocab_size=20, rows=[(0, {"prompt": "a"}), (1, {"prompt": "b"})]
        )

    assert column(ask_function(), "prompt_ids") == [[2]] * 4
    assert seen == [["a", "a", "b", "b"]]
    with pytest.raises(UnavailableError, match=r"log-prob inf in completion 0 of prompt 0 .* rollout_func"):
        ask_function(logprobs=[[math.inf]] * 4)
    with pytest.raises(UnavailableError, match=r"2 log-probs for 1 tokens in completion 0 of prompt 0 .* rollout_func"):
        ask_function(logprobs=[[-1.0, -1.0]] * 4)
    with pytest.raises(UnavailableError, match="no tokens in completion 0 of prompt 0"):
        ask_function(completion_ids=[[]] * 4)
    with pytest.raises(UnavailableError, match="token id 20 in a prompt from the rollout_func engine"):
        ask_function(prompt_ids=[[20]] * 4)


def test_no_prompts_are_whole_without_completions() -> None:
    none = replace(GOOD, prompt_ids=[], completion_ids=[], sampling_logprobs=[], finish_reasons=[])
    assert checked_generate(Engine(none), [], SAMPLING, vocab_size=20) == []
