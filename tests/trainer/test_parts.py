"""The pure parts of the trainer: advantages, packing, prompts, configuration."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis.strategies import integers, lists

from fused_grpo import GRPOLossConfig
from fused_grpo.errors import CheckpointError, DataError, InputError
from fused_grpo.trainer import GRPOConfig
from fused_grpo.trainer.advantages import group_advantages, total_rewards
from fused_grpo.trainer.batching import micro_batches, pack, place
from fused_grpo.trainer.data import check_rows, prompt_batches
from fused_grpo.trainer.policy import PolicyLoss
from fused_grpo.trainer.types import EffectiveBatch

NAN, CPU = float("nan"), torch.device("cpu")


def test_advantages_are_those_of_the_group():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 5.0, 5.0, 5.0, 5.0])
    scale = torch.tensor([1.0, 0.0, 0.0, 1.0]).std() + 1e-4
    expected = torch.tensor([0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0]) / scale
    torch.testing.assert_close(group_advantages(rewards, 4, scale="group"), expected)
    torch.testing.assert_close(group_advantages(rewards, 4, scale="none"), expected * scale)
    torch.testing.assert_close(group_advantages(rewards, 4, scale="batch"), expected * scale / (rewards.std() + 1e-4))


def test_unscored_completions_take_no_part_in_their_group():
    advantages = group_advantages(torch.tensor([NAN, 1.0, 3.0, NAN, NAN, NAN]), 3, scale="none")
    torch.testing.assert_close(advantages, torch.tensor([0.0, -1.0, 1.0, 0.0, 0.0, 0.0]))


def test_total_rewards_weigh_what_was_scored():
    per_function = torch.tensor([[1.0, 2.0], [NAN, 2.0], [NAN, NAN]])
    torch.testing.assert_close(
        total_rewards(per_function, torch.tensor([1.0, 10.0])), torch.tensor([21.0, 20.0, NAN]), equal_nan=True
    )


@pytest.fixture
def batch() -> EffectiveBatch:
    return EffectiveBatch(
        prompt_ids=[[2, 3], [4, 5, 6], [7]],
        completion_ids=[[8, 9, 1], [1], [10, 11, 12, 1]],
        sampling_logprobs=[[-1.0, -2.0, -3.0], [-4.0], [-5.0, -6.0, -7.0, -8.0]],
        advantages=torch.tensor([1.0, -1.0, 0.5]),
    )


def test_packing_keeps_every_token_and_what_predicts_it(batch):
    packed = pack(batch, slice(0, 3), one_row=True, device=CPU)
    assert packed.input_ids.tolist() == [[2, 3, 8, 9, 1, 4, 5, 6, 1, 7, 10, 11, 12, 1]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2, 3, 4]]
    assert packed.predictors.tolist() == [1, 2, 3, 7, 9, 10, 11, 12]
    assert packed.targets.tolist() == packed.input_ids[0, packed.predictors + 1].tolist() == [8, 9, 1, 1, 10, 11, 12, 1]
    assert packed.cu_seqlens.tolist() == [0, 3, 4, 8]
    assert packed.sampling_logprobs.tolist() == [-1, -2, -3, -4, -5, -6, -7, -8]


def test_rows_are_as_long_as_the_longest_sequence(batch):
    packed = pack(batch, slice(0, 3), one_row=False, device=CPU)
    assert packed.input_ids.tolist() == [[2, 3, 8, 9, 1], [7, 10, 11, 12, 1], [4, 5, 6, 1, 0]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 0]]
    assert packed.targets.tolist() == packed.input_ids.flatten()[packed.predictors + 1].tolist()
    assert packed.targets.tolist() == [8, 9, 1, 1, 10, 11, 12, 1]


@given(lists(integers(1, 9), min_size=1, max_size=30))
def test_sequences_share_rows_without_overlapping(lengths):
    starts, num_rows = place(lengths, max(lengths))
    taken = [slot for start, length in zip(starts, lengths, strict=True) for slot in range(start, start + length)]
    assert len(set(taken)) == len(taken)
    assert all(start % max(lengths) + length <= max(lengths) for start, length in zip(starts, lengths, strict=True))
    assert num_rows <= 2 * sum(lengths) / max(lengths) + 1


def test_micro_batches_cover_the_batch_in_order(batch):
    cut = micro_batches(batch, 2, one_row=False, device=CPU)
    assert [part.advantages.tolist() for part in cut] == [[1.0, -1.0], [0.5]]
    assert torch.cat([part.targets for part in cut]).tolist() == [8, 9, 1, 1, 10, 11, 12, 1]


@pytest.mark.parametrize("one_row", [False, True])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_packed_row_gives_what_each_sequence_gives_alone(batch, make_model, attention, one_row):
    model = make_model(attn_implementation=attention).double()
    policy = PolicyLoss(model, GRPOLossConfig(), temperature=0.8)
    packed = policy.logprobs(pack(batch, slice(0, 3), one_row=one_row, device=CPU))
    alone = []
    for prompt, completion in zip(batch.prompt_ids, batch.completion_ids, strict=True):
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / 0.8
        alone.append(logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0])
    torch.testing.assert_close(packed, torch.cat(alone), rtol=0, atol=1e-12)


def test_prompt_batches_are_deterministic_cover_a_pass_and_shard():
    rows = [{"prompt": str(number)} for number in range(10)]
    whole = list(islice(prompt_batches(rows, 4, seed=1, shuffle=True), 5))
    assert whole == list(islice(prompt_batches(rows, 4, seed=1, shuffle=True), 5))
    drawn = [row["prompt"] for part in whole for row in part]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == sorted(row["prompt"] for row in rows)
    assert drawn[:10] != drawn[10:]
    ranks = [islice(prompt_batches(rows, 2, seed=1, shuffle=True, rank=r, world_size=2), 5) for r in range(2)]
    assert [left + right for left, right in zip(*ranks, strict=True)] == whole


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (None, "got no train_dataset"),
        ([], "got an empty train_dataset"),
        (
            [{"question": "1+1=", "answer": "2"}],
            r"without a 'prompt' column in row 0 \(columns: 'question', 'answer'\)",
        ),
        ([{"prompt": "1+1="}, {"prompt": ""}], "got '' as the prompt of row 1"),
        ([{"prompt": [{"role": "user", "content": "hi"}]}], "apply_chat_template"),
        ([{"prompt": "1+1=", "completions": "2"}], "a column 'completions'"),
        ([{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2="}], r"columns \['prompt'\] in row 1"),
        ({"train": [{"prompt": "1+1="}]}, "got a dict as train_dataset.*choose a split"),
        (["1+1="], "got a list as train_dataset"),
    ],
)
def test_a_dataset_that_cannot_be_used_is_refused(dataset, message):
    with pytest.raises(DataError, match=message):
        check_rows(dataset, name="train_dataset")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"temperature": 0.0}, "temperature=0.0, want > 0"),
        ({"num_generations": 1}, "num_generations=1"),
        ({"epsilon": -1}, "epsilon=-1"),
        ({"loss_type": "ppo"}, "loss_type='ppo'"),
        ({"max_steps": 0}, "max_steps=0"),
        ({"scale_rewards": "std"}, "scale_rewards='std'"),
        ({"top_k": -1}, "top_k=-1"),
        ({"chunk_bytes": 0}, "chunk_bytes=0"),
        ({"adam_beta2": 2.0}, "adam_beta2=2.0"),
    ],
)
def test_a_config_out_of_range_is_refused(option, message):
    with pytest.raises(InputError, match=message):
        GRPOConfig(**option)


def test_a_loss_of_the_completion_length_gets_it():
    assert GRPOConfig(loss_type="dr_grpo", max_completion_length=77).loss_config().max_completion_length == 77


def test_an_effective_batch_of_broken_groups_is_refused_before_anything_is_written(make_trainer, tmp_path):
    with pytest.raises(
        InputError, match=r"= 6 sequences .* multiple of num_generations=4; fix: make the product 4 or 8"
    ):
        make_trainer(per_device_train_batch_size=3, gradient_accumulation_steps=2)
    assert not (tmp_path / "run").exists()


def test_another_runs_directory_is_refused_untouched(make_trainer):
    make_trainer().train()
    with pytest.raises(CheckpointError, match="overwrite"):
        make_trainer(overwrite_output_dir=False)


def test_what_is_no_reward_function_is_refused(make_trainer):
    with pytest.raises(InputError, match="want a function or a non-empty list of functions"):
        make_trainer([])
    with pytest.raises(InputError, match="got 2 reward_weights for 1 reward functions"):
        make_trainer(reward_weights=[1.0, 2.0])
    with pytest.raises(InputError, match="want finite numbers"):
        make_trainer(reward_weights=[NAN])
