"""Sequences are assigned to ranks: each to one rank, equally many to every rank, and nearly equal work."""

import random

import pytest
import torch
from batches import batch_of, column
from hypothesis import given
from hypothesis import strategies as st

from fused_grpo.trainer.batching import micro_batches
from fused_grpo.trainer.batching.micro_batches import Packing, assignments, balanced
from fused_grpo.trainer.batching.rollout_buffer import as_tensors, from_tensors
from fused_grpo.trainer.types import Sample


@given(st.lists(st.integers(1, 10_000) | st.just(0), max_size=40), st.integers(1, 8))
def test_every_sequence_goes_to_one_rank_and_all_get_equally_many(costs, ranks):
    assigned = assignments([float(cost) for cost in costs], ranks)
    assert sorted(index for indices in assigned for index in indices) == list(range(len(costs)))
    assert len(assigned) == ranks
    for chosen in (range(len(costs)), [index for index, cost in enumerate(costs) if cost]):
        assert max(len(set(indices) & set(chosen)) for indices in assigned) <= -(-len(chosen) // ranks)


def test_work_is_nearly_equal_where_lengths_are_far_apart():
    lengths = [random.Random(seed).lognormvariate(5, 1) for seed in range(128)]
    loads = [sum(lengths[index] for index in indices) for indices in assignments(lengths, 8)]
    in_order = [sum(lengths[start : start + 16]) for start in range(0, 128, 16)]
    assert max(loads) / (sum(loads) / 8) < 1.03
    assert max(in_order) / (sum(in_order) / 8) > 1.25


@pytest.mark.parametrize(("shares", "ways"), [(False, 1), (True, 2)])
def test_sequences_are_assigned_once_where_no_prompt_is_shared(monkeypatch, shares, ways):
    calls, own = [], micro_batches.by_trees
    monkeypatch.setattr(micro_batches, "by_trees", lambda *args: calls.append(args) or own(*args))
    assert [len(share) for share in balanced(numbered(8, 0), 2, Packing(one_row=False, share_prompts=shares))] == [4, 4]
    assert len(calls) == ways


def numbered(count: int, first: int) -> list[Sample]:
    return batch_of(
        prompt_ids=[[first + index] for index in range(count)],
        completion_ids=[list(range(first + index)) for index in range(count)],
        sampling_logprobs=[[-0.1 * (first + index)] * (first + index) for index in range(count)],
        advantage=torch.arange(first, first + count, dtype=torch.float32),
        in_loss=torch.arange(first, first + count) % 2 == 0,
    )


def test_what_is_sent_arrives_and_is_joined_in_order():
    sent = [numbered(3, 1), numbered(0, 4), numbered(2, 4)]
    whole = [sample for batch in sent for sample in from_tensors(as_tensors(batch))]
    expected = numbered(5, 1)
    for name in ("prompt_ids", "completion_ids", "sampling_logprobs", "old_logprobs", "ref_logprobs"):
        assert column(whole, name) == column(expected, name), name
    assert torch.equal(column(whole, "advantage"), column(expected, "advantage"))
    assert torch.equal(column(whole, "in_loss"), column(expected, "in_loss"))
