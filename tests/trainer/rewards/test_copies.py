"""What user code is handed: equal to the original, and nothing in it that an edit would reach the original through."""

import copy
import pickle
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import dictionaries, lists, one_of, recursive, sampled_from, sets, text, tuples
from transformers import TrainerState

from fused_grpo.trainer.rewards.reward_call import RewardCaller, RewardInputs, own_copy

MUTABLE = (list, dict, set, bytearray, deque, np.ndarray, torch.Tensor)
leaves = one_of(
    text(max_size=3), sampled_from([0, 1.5, True, None, b"x"]), sets(sampled_from("ab")), sampled_from("ab").map(list)
)
values = recursive(
    leaves,
    lambda inner: one_of(lists(inner), tuples(inner, inner), dictionaries(text(max_size=2), inner)),
    max_leaves=9,
)


@dataclass
class Task:
    tests: list[str] = field(default_factory=list)
    lock: Any = None


def mutable(value: Any) -> set[int]:
    """The ids of all that can be edited in a value."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | deque) else ()
    own = {id(value)} if isinstance(value, MUTABLE) else set()
    return own.union(*map(mutable, inside))


@given(values)
@settings(max_examples=50)
def test_a_copy_is_equal_and_shares_nothing_that_can_be_edited(value):
    copied = own_copy(value)
    assert copied == value
    assert type(copied) is type(value)
    assert not mutable(copied) & mutable(value)


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2),
        np.ones(2),
        bytearray(b"ab"),
        deque([[1]]),
        OrderedDict(a=[1]),
        np.array([[1], None], dtype=object),
        ([1], threading.Lock(), ({"a": object()},)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_arrays_and_other_containers_are_copied(value):
    row = {"kept": [value]}
    copied = own_copy(row)["kept"][0]
    assert type(copied) is type(value)
    assert not mutable(copied) & mutable(value)
    assert str(copied) == str(value)


def test_fields_of_dataclasses_are_copied_and_what_cannot_be_is_shared():
    lock, there = threading.Lock(), object()
    task = Task(["a"], lock)
    copied = own_copy({"task": task, "more": [(lock, ["b"]), there, open]})
    copied["task"].tests.clear()
    copied["more"].pop()
    assert (task.tests, copied["task"].lock) == (["a"], lock)
    assert copied["more"] == [(lock, ["b"]), there]


def test_a_function_that_reads_no_log_gets_no_copy_of_it():
    copies, seen = [], []

    class Log(list):
        def __deepcopy__(self, memo):
            copies.append(len(self))
            return Log(self)

    state = TrainerState(max_steps=5, log_history=Log([{"loss": 1.0}]))

    def steps(completions, **columns):
        return [columns["trainer_state"].max_steps for _ in completions]

    inputs = RewardInputs(columns={"prompts": ["a"], "completions": ["b"]}, trainer_state=state)
    assert (RewardCaller(steps, "steps")(inputs).values, copies) == ([5.0], [])
    state.log_history = list(state.log_history)

    def reads(completions, trainer_state):
        trainer_state.log_history[0]["loss"], trainer_state.epoch = 0.0, 7.0
        seen.extend([trainer_state, copy.deepcopy(trainer_state), pickle.loads(pickle.dumps(trainer_state))])
        return [float(isinstance(trainer_state, TrainerState)) for _ in completions]

    assert RewardCaller(reads, "reads")(inputs).values == [1.0]
    assert state.log_history == [{"loss": 1.0}]
    assert [(one.log_history, one.epoch, one.max_steps) for one in seen] == [([{"loss": 0.0}], 7.0, 5)] * 3
    assert type(seen[1]) is type(seen[2]) is TrainerState


def test_a_list_in_itself_and_one_of_ten_thousand_levels_are_shared():
    inside, deep = [1], []
    inside += [inside, inside]
    for _ in range(10_000):
        deep = [deep]
    assert own_copy(inside) is inside
    assert own_copy(deep) is deep
