"""Tokens of a tool in the middle of a completion: the model reads them, and nothing is computed from them."""

import json
import math
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from batches import batch_of, column

from fused_grpo import GRPOLossConfig
from fused_grpo.errors import UnavailableError
from fused_grpo.trainer.batching.micro_batch_metrics import means, turn_differences, turn_sums
from fused_grpo.trainer.batching.micro_batches import Packing, micro_batches, pack, skip_zero_advantages
from fused_grpo.trainer.batching.rollout_buffer import as_tensors, from_tensors
from fused_grpo.trainer.engines.checked_engine import checked_generate
from fused_grpo.trainer.policy import PolicyLoss
from fused_grpo.trainer.types import ListedTokens, Rollouts, Sample, SamplingParams, with_fields

CPU = torch.device("cpu")
# The answers of the tool are 10, 11, 12 and 16.
MASKS = [[True, True, False, False, False, True, True], [False, True], [True, True, True]]
OWN = [4, 1, 3]
OLD = [[-2.0, -3.0, -2.5, -3.5], [-3.0], [-2.0, -4.0, -3.0]]
BATCH = batch_of(
    prompt_ids=[[2, 3], [4, 5, 6], [7]],
    completion_ids=[[8, 9, 10, 11, 12, 13, 1], [16, 1], [14, 15, 1]],
    completion_mask=MASKS,
    sampling_logprobs=[[-2.1, -3.1, 0.0, 0.0, 0.0, -2.6, -3.6], [0.0, -3.1], [-2.1, -4.1, -3.1]],
    old_logprobs=[torch.tensor(row) for row in OLD],
    advantage=[1.0, -1.0, 0.5],
)


def by_hand(model: Any, batch: list[Sample], loss_type: str) -> torch.Tensor:
    """The clipped loss from the logits of each whole sequence, of the model's own tokens alone."""
    losses = []
    for sample, mask, old in zip(batch, MASKS, OLD, strict=True):
        ids = torch.tensor(sample.prompt_ids + sample.completion_ids)
        logits = model(ids[None]).logits[0, len(sample.prompt_ids) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(sample.completion_ids)[:, None])[mask, 0]
        ratio = (logprobs - torch.tensor(old)).exp()
        losses.append(-torch.minimum(ratio * sample.advantage, ratio.clamp(0.8, 1.2) * sample.advantage))
    if loss_type == "dapo":
        return torch.cat(losses).sum() / 8
    return torch.stack([loss.mean() for loss in losses]).mean()


@pytest.mark.parametrize(
    "layout", [{"one_row": True}, {"one_row": False}, {"one_row": False, "max_tokens": 10}], ids=str
)
@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_loss_and_gradients_are_those_of_the_models_own_tokens(make_model, layout, loss_type):
    model, batch = make_model(), with_fields(BATCH, {"sampling_logprobs": [None] * 3})
    expected = by_hand(model, batch, loss_type)
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    policy, loss = PolicyLoss(model, GRPOLossConfig(loss_type=loss_type), temperature=1.0), torch.tensor(0.0)
    for part in micro_batches(batch, Packing(sequences=3, **layout), device=CPU):
        output = policy(part, num_tokens=8.0, num_sequences=3.0)
        output.loss.backward()
        loss += output.loss.detach()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_rows_hold_all_tokens_and_only_the_models_own_are_predicted():
    packed = pack(BATCH, [[0], [1], [2]], Packing(one_row=True), device=CPU)
    assert packed.input_ids.tolist() == [[2, 3, 8, 9, 10, 11, 12, 13, 1, 4, 5, 6, 16, 1, 7, 14, 15, 1]]
    assert packed.targets.tolist() == packed.input_ids[0, packed.predictors + 1].tolist() == [8, 9, 13, 1, 1, 14, 15, 1]
    assert packed.cu_seqlens.diff().tolist() == OWN
    assert packed.old_logprobs.tolist() == list(chain(*OLD))
    assert packed.sampling_logprobs.tolist() == pytest.approx([value - 0.1 for value in list(chain(*OLD))])


def test_kept_tokens_stay_with_the_tokens_that_were_sampled():
    kept = [[[8], [2, 9], [], [], [], [13], []], [[], [0, 1]], [[14], [], [1]]]
    batch = with_fields(BATCH, {"listed_tokens": list(map(ListedTokens.of, kept))})
    tokens, offsets = pack(batch, [[0], [1], [2]], Packing(one_row=True), device=CPU).support
    by_place = [tokens[start:end].tolist() for start, end in pairwise(offsets.tolist())]
    assert by_place == [[8], [2, 9], [13], [], [0, 1], [14], [], [1]]


def test_the_sampler_is_compared_by_turn_however_the_step_is_cut():
    """It is 0.1 or 0.2 away in first turns, and 0.3 and 0.5 in the second one; one log-prob is not known."""
    sampled = [[-2.1, -3.1, 0.0, 0.0, 0.0, -2.8, -4.0], [0.0, -3.1], [-2.1, math.nan, -3.2]]
    batch = with_fields(BATCH, {"sampling_logprobs": sampled})
    for sequences in (1, 3):
        parts = micro_batches(batch, Packing(one_row=True, sequences=sequences), device=CPU)
        rows = [
            torch.tensor([value for index in part.sequence_index.tolist() for value in OLD[index]]) for part in parts
        ]
        metrics = means(turn_sums(batch, parts, rows))
        assert metrics == pytest.approx(
            {
                "sampling/sampling_logp_difference/turn_1/mean": (0.1 * 4 + 0.2) / 5,
                "sampling/sampling_logp_difference/turn_1/max": 0.2,
                "sampling/sampling_logp_difference/turn_2/mean": 0.4,
                "sampling/sampling_logp_difference/turn_2/max": 0.5,
            }
        )
        assert turn_differences(metrics) == [pytest.approx((0.12, 0.2)), pytest.approx((0.4, 0.5))]
        assert turn_differences({name: value for name, value in metrics.items() if "turn_1" not in name}) == []
    assert turn_sums(with_fields(batch, {"completion_mask": [None] * 3}), parts, rows) == {}


def test_a_mask_survives_a_checkpoint_and_the_way_to_another_rank():
    again = from_tensors(as_tensors(BATCH))
    assert column(again, "completion_mask") == MASKS
    assert [sample.num_own for sample in again] == OWN


class ToolEngine:
    """Answers of another engine, in which every second token, from the second on, is a tool's."""

    def __init__(self, engine: Any, masks: Any = None) -> None:
        self.engine, self.masks, self.recorded = engine, masks, list[Rollouts]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(self, prompt_ids: Any, sampling: SamplingParams) -> Rollouts:
        rollouts = self.engine.generate(prompt_ids, sampling)
        masks = [[place % 2 == 0 for place in range(len(ids))] for ids in rollouts.completion_ids]
        masked = replace(rollouts, completion_masks=self.masks or masks)
        self.recorded.append(masked)
        return masked


@pytest.mark.parametrize("options", [{"num_iterations": 2}, {"beta": 0.1, "max_tokens_per_micro_batch": 20}], ids=str)
def test_a_run_counts_and_learns_from_the_models_own_tokens(make_trainer, options):
    trainer = make_trainer(max_steps=2, **options)
    trainer.engine = engine = ToolEngine(trainer.engine)
    trainer.train()
    lines = map(json.loads, (trainer.output_dir / "metrics.jsonl").read_text().splitlines())
    first = next(line for line in lines if "reward" in line)
    counts = [sum(mask) for mask in engine.recorded[0].completion_masks]
    assert counts != [len(ids) for ids in engine.recorded[0].completion_ids]
    assert first["completion_tokens"] == sum(counts)
    assert first["completions/mean_length"] == sum(counts) / len(counts)
    assert first["sampling/sampling_logp_difference/max"] < 1e-5


def test_what_is_left_out_counts_with_the_models_own_tokens(make_trainer):
    learner = make_trainer(per_device_train_batch_size=4).learner
    batch = skip_zero_advantages(with_fields(BATCH, {"advantage": [1.0, 0.0, 0.0]}))
    _, metrics = learner.learn(batch)
    assert metrics["loss_tokens"] == 8.0
    (part,) = learner._pack(batch)
    assert learner._counts([part], batch)["num_tokens"] == 8.0


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([True], r"a completion mask of 1 values for \d tokens"),
        ([0, 1], r"a completion mask of 2 values for \d tokens"),
        ([False, False], "no token of the model's own"),
    ],
)
def test_a_mask_that_cannot_be_one_is_refused(mask, message):
    class Two:
        name, weight_version = "mine", 0

        def generate(self, prompt_ids: Any, sampling: Any) -> Rollouts:
            return Rollouts(
                prompt_ids=prompt_ids,
                completion_ids=[[5, 1], [6, 1]],
                sampling_logprobs=None,
                finish_reasons=["stop", "stop"],
                num_generations=2,
                weight_version=0,
                completion_masks=[[True, True], mask],
            )

    with pytest.raises(UnavailableError, match=rf"got {message} in completion 1 of prompt 0 .*fix:"):
        checked_generate(Two(), [[2]], SamplingParams(n=2, max_tokens=3), vocab_size=20)  # type: ignore[arg-type]
