"""rollout_func: TRL's shapes in, our rollouts out, and an error that explains everything else."""

import copy
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fused_grpo.errors import DataError
from fused_grpo.trainer.engines.rollout_func import FunctionEngine
from fused_grpo.trainer.engines.transformers_generate import TransformersEngine
from fused_grpo.trainer.types import SamplingParams

SAMPLING = SamplingParams(n=2, max_tokens=8)
PROMPT_IDS = [[6, 39, 7], [4, 5]]
GOOD = {
    "prompt_ids": [[6, 39, 7], [6, 39, 7], [4, 5], [4, 5]],
    "completion_ids": [[9, 1], [9], [8, 8, 7], [8]],
    "logprobs": [[-0.1, -0.2], [-0.3], [-0.4, None, -0.6], [-0.7]],
}


@pytest.fixture
def trainer(build_model, tokenizer) -> SimpleNamespace:
    return SimpleNamespace(model=build_model(), processing_class=tokenizer)


@pytest.fixture
def engine(trainer):
    return lambda **changes: FunctionEngine(lambda prompts, trainer: GOOD | changes, trainer)


def test_weights_are_read_for_an_inner_engine_alone(engine, trainer) -> None:
    """Each rank would gather all of them, under FSDP2, and merge its adapter."""
    inner = SimpleNamespace(weight_version=0)
    assert not engine().has_own_weights
    assert FunctionEngine(lambda prompts, trainer: GOOD, trainer, inner=inner).has_own_weights


def test_what_the_function_returns_becomes_rollouts(engine) -> None:
    engine = engine(env_reward=[1.0, 2.0, 3.0, 4.0], source="web", env_mask=[[1, 1], [1], [1, 1, 1], [1]])
    engine.load_weights([], version=7)
    rollouts = engine.generate(PROMPT_IDS, SAMPLING)
    assert rollouts.prompt_ids == GOOD["prompt_ids"]
    assert rollouts.completion_ids == GOOD["completion_ids"]
    assert rollouts.sampling_logprobs[0] == [-0.1, -0.2]
    assert math.isnan(rollouts.sampling_logprobs[2][1])
    assert rollouts.finish_reasons == ["stop", "length", "stop", "length"]
    assert rollouts.extra == {"env_reward": [1.0, 2.0, 3.0, 4.0], "source": ["web"] * 4}
    assert rollouts.weight_version == 7


@pytest.mark.parametrize(
    "kind",
    [
        *(list, np.array, torch.tensor),
        *(lambda mask: np.array(mask, bool), lambda mask: torch.tensor(mask).bool()),
        *(lambda mask: list(map(float, mask)), torch.FloatTensor, lambda mask: list(torch.FloatTensor(mask))),
    ],
)
def test_tokens_of_an_environment_are_told_from_the_models_own(engine, kind) -> None:
    masks = [[1, 0], [1], [0, 0, 1], [1]]
    rollouts = engine(env_mask=[kind(mask) for mask in masks]).generate(PROMPT_IDS, SAMPLING)
    assert rollouts.completion_masks == masks
    assert [sample.num_own for sample in rollouts.samples()] == [1, 1, 1, 1]
    assert engine().generate(PROMPT_IDS, SAMPLING).completion_masks is None


def test_members_of_a_group_may_have_prompts_of_their_own(engine) -> None:
    prompts = [[6], [7], [4, 5], [4, 5]]
    samples = engine(prompt_ids=prompts).generate(PROMPT_IDS, SAMPLING).samples()
    assert [sample.prompt_ids for sample in samples] == prompts


def test_logprobs_may_be_arrays_and_tensors(engine) -> None:
    made = {"completion_ids": [[9, 8]] * 4, "prompt_ids": GOOD["prompt_ids"]}
    for logprobs in (np.full((4, 2), -0.5), torch.full((4, 2), -0.5)):
        assert engine(**made, logprobs=logprobs).generate(PROMPT_IDS, SAMPLING).sampling_logprobs == [[-0.5, -0.5]] * 4


def test_the_function_sees_each_prompt_once_per_completion_and_the_trainer(trainer) -> None:
    seen: list[Any] = []
    engine = FunctionEngine(lambda prompts, trainer: seen.append((prompts, trainer)) or GOOD, trainer)
    messages = [[{"role": "user", "content": "3+4="}], [{"role": "user", "content": "a"}]]
    engine.generate(PROMPT_IDS, SAMPLING, rows=[(number, {"prompt": one}) for number, one in enumerate(messages)])
    engine.generate(PROMPT_IDS, SAMPLING)
    assert seen[0] == ([messages[0], messages[0], messages[1], messages[1]], trainer)
    decoded = trainer.processing_class.batch_decode(PROMPT_IDS)
    assert seen[1][0] == [decoded[0], decoded[0], decoded[1], decoded[1]]


def test_the_tokens_that_the_function_says_were_kept_become_supports(engine) -> None:
    kept = [[[9, 2], [1, 3]], None, [[8], None, [3, 7]], [[8]]]
    wanted = replace(SAMPLING, sampling_support="auto")
    rollouts = engine(sampling_support=kept).generate(PROMPT_IDS, wanted)
    assert [one.ids.tolist() for one in rollouts.listed_tokens] == [[2, 9, 1, 3], [], [8, 3, 7], [8]]
    assert [one.sizes.tolist() for one in rollouts.listed_tokens] == [[2, 2], [0], [1, 0, 2], [1]]
    assert engine(sampling_support=kept).generate(PROMPT_IDS, SAMPLING).listed_tokens is None
    assert all(one.logprobs is None for one in rollouts.listed_tokens)
    assert engine().generate(PROMPT_IDS, wanted).listed_tokens is None
    with pytest.raises(DataError, match=r"sampling_support of 1 completions from rollout_func for 4.*fix:"):
        engine(sampling_support=kept[:1]).generate(PROMPT_IDS, wanted)


def test_a_function_that_does_not_know_its_logprobs_says_none(engine) -> None:
    assert engine(logprobs=None).generate(PROMPT_IDS, SAMPLING).sampling_logprobs is None


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"completion_ids": [[9]] * 2}, DataError, r"2 completion_ids .* for 4 prompts"),
        ({"score": [1.0]}, DataError, "1 score .* for 4 prompts"),
        ({"completions": ["a"] * 4}, DataError, r"columns \['completions'\]"),
        ({"env_mask": [[1, 0], [1], [1, 1], [1]]}, DataError, r"env_mask of \[2, 1, 2, 1\] values"),
        ({"env_mask": [[1, 2], [1], [1, 1, 1], [1]]}, DataError, "env_mask of"),
        ({"env_mask": [[1, 0]]}, DataError, "env_mask of"),
        ({"env_mask": [[1, 0.5], [1], [1, 1, 1], [1]]}, DataError, "'float' object"),
    ],
)
def test_a_return_value_of_another_shape_is_refused(engine, changes, error, message) -> None:
    with pytest.raises(error, match=rf"got .*{message}.* want .*fix:"):
        engine(**changes).generate(PROMPT_IDS, SAMPLING)


@pytest.mark.parametrize("output", [None, [], {"prompt_ids": [], "completion_ids": []}])
def test_a_return_value_without_the_three_lists_is_refused(trainer, output) -> None:
    with pytest.raises(DataError, match="want a dict with prompt_ids, completion_ids, logprobs"):
        FunctionEngine(lambda prompts, trainer: output, trainer).generate(PROMPT_IDS, SAMPLING)


def test_an_inner_engine_is_kept_in_step_and_closed(trainer) -> None:
    inner = TransformersEngine(trainer.model, trainer.processing_class)
    closed: list[bool] = []
    inner.close = lambda: closed.append(True)

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        made = inner.generate(PROMPT_IDS, SAMPLING)
        prompt_ids = [ids for ids in made.prompt_ids for _ in range(2)]
        return {"prompt_ids": prompt_ids, "completion_ids": made.completion_ids, "logprobs": made.sampling_logprobs}

    engine = FunctionEngine(rollout, trainer, inner=inner)
    engine.load_weights([], version=4)
    rollouts = engine.generate(PROMPT_IDS, SAMPLING)
    engine.close()
    assert inner.weight_version == rollouts.weight_version == 4
    assert not engine.sync_metrics
    inner.sync_metrics = {"weight_sync/bytes": 7.0}
    assert engine.sync_metrics == {"weight_sync/bytes": 7.0}
    assert closed


def test_the_function_may_edit_its_prompts_and_what_it_returned(trainer) -> None:
    messages, output = [[{"role": "user", "content": "3+4="}], [{"role": "user", "content": "a"}]], copy.deepcopy(GOOD)
    output["notes"] = [["a"], ["b"], ["c"], ["d"]]

    def edits(prompts, trainer):
        assert [prompt[0]["content"] for prompt in prompts] == ["3+4=", "3+4=", "a", "a"]
        for number, prompt in enumerate(prompts):
            assert prompt[0].pop("content")
            assert len(prompts[number]) == 1
            prompt.clear()
        prompts.clear()
        return output

    rollouts = FunctionEngine(edits, trainer).generate(
        PROMPT_IDS, SAMPLING, rows=[(number, {"prompt": one}) for number, one in enumerate(messages)]
    )
    assert [message["content"] for (message,) in messages] == ["3+4=", "a"]
    for values in output.values():
        for value in values:
            value.clear()
    assert rollouts.completion_ids == GOOD["completion_ids"]
    assert rollouts.sampling_logprobs[0] == [-0.1, -0.2]
    assert (rollouts.prompt_ids, rollouts.extra["notes"]) == (GOOD["prompt_ids"], [["a"], ["b"], ["c"], ["d"]])


@pytest.mark.parametrize("name", ["prompt_ids", "completion_ids"])
@pytest.mark.parametrize(
    "value", [5, None, [5] * 4, [[1.5]] * 4, [["5"]] * 4, ["56"] * 4, dict.fromkeys(range(4), 1), [None] * 4]
)
def test_what_are_no_lists_of_token_ids_is_a_data_error(engine, name, value) -> None:
    with pytest.raises(DataError, match="from rollout_func, want "):
        engine(**{name: value}).generate(PROMPT_IDS, SAMPLING)
