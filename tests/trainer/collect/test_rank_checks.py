"""What functions hold is compared between ranks: a warning names what differs, of whatever kind it is."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fused_grpo.trainer.collect.rank_checks import MANY, held_by_functions, plain, settings_of, warn_of_other_values
from fused_grpo.trainer.common.warnings import warn_once


def of_closure(value):
    def reward(completions, **columns):
        return [value for _ in completions]

    return reward


def of_default(value):
    def reward(completions, held=value, **columns):
        return [held for _ in completions]

    return reward


def of_keyword(value):
    def reward(completions, *, held=value, **columns):
        return [held for _ in completions]

    return reward


class Judge:
    def __init__(self, value):
        self.held = value

    def __call__(self, completions, **columns):
        return [self.held for _ in completions]

    def reward(self, completions, **columns):
        return [self.held for _ in completions]


def weighed(weight, completions, **columns):
    return [weight for _ in completions]


MAKERS = {
    "value": of_closure,
    "held": of_default,
    "held of a keyword": of_keyword,
    "held of an object": Judge,
    "held of a method": lambda value: Judge(value).reward,
    "argument 0": lambda value: partial(weighed, value),
    "weight": lambda value: partial(weighed, weight=value),
    "value of a partial": lambda value: partial(of_closure(value), extra=1),
}


def long_array(place=None):
    array = np.zeros(2000)
    if place is not None:
        array[place] = 1.0
    return array


VALUES = {
    "a number": lambda rank: 0.5 + rank,
    "a text": lambda rank: "ab"[rank],
    "a table": lambda rank: {"words": {1, 2 + rank}, "more": [None, True]},
    "a long array": lambda rank: long_array(place=1000 if rank else None),
    "a long tensor": lambda rank: torch.tensor(long_array(place=1000 if rank else None)),
    "a number of NumPy's": lambda rank: np.float32(rank),
    "a function": lambda rank: [lambda text: text, lambda text: text + " "][rank],
}


def held(function):
    rewards = SimpleNamespace(functions=[function])
    return held_by_functions(SimpleNamespace(rewards=rewards, rules=None, rollout_func=None))


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("name", MAKERS)
def test_another_value_that_a_function_holds_on_a_rank_is_named(name, kind, caplog):
    warn_once.cache_clear()
    same, other = (held(MAKERS[name](VALUES[kind](rank))) for rank in (0, 1))
    warn_of_other_values([same, held(MAKERS[name](VALUES[kind](0))), same])
    assert caplog.text == ""
    warn_of_other_values([same, same, other])
    assert f"got another value of {name.partition(' of ')[0]} of " in caplog.text
    assert "on rank 2 than on rank 0" in caplog.text


def test_of_a_long_table_the_number_of_entries_counts(caplog):
    warn_once.cache_clear()
    tables = [[0] * MANY + [rank] for rank in range(2)]
    warn_of_other_values([held(of_closure(table)) for table in tables])
    assert caplog.text == ""
    warn_of_other_values([held(of_closure(table)) for table in (tables[0], tables[1] + [2])])
    assert "got another value of value of reward on rank 1" in caplog.text


def test_values_that_have_no_text_of_their_own_count_by_their_type(caplog):
    itself = []
    itself.append(itself)
    for value in (itself, torch.zeros(2, device="meta"), object(), Judge(1)):
        warn_of_other_values([held(of_closure(value)), held(of_closure(value))])
    warn_of_other_values([held(of_closure(object())), held(of_closure(object()))])
    assert caplog.text == ""


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_options_are_compared_by_all_numbers_of_an_array(make):
    first, second = make(long_array()), make(long_array(place=1000))
    assert repr(first) == repr(second)
    assert plain({"a": [first]}) != plain({"a": [second]})
    assert plain({"a": [first]}) == plain({"a": [make(long_array())]})


@pytest.mark.parametrize("as_given", [float, torch.tensor, np.float32])
def test_optimizers_and_schedules_are_compared_by_their_values(as_given):
    def both(rate, factor):
        weights = [torch.zeros(2, requires_grad=True)]
        optimizer = torch.optim.AdamW(weights, lr=1e-3)
        optimizer.param_groups[0]["betas"] = (as_given(rate), 0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        schedule.factors = [as_given(factor)]
        return settings_of(optimizer), settings_of(schedule)

    first = both(0.5, 0.1)
    assert first == both(0.5, 0.1)
    assert [one == other for one, other in zip(first, both(0.25, 0.1), strict=True)] == [False, True]
    assert [one == other for one, other in zip(first, both(0.5, 0.2), strict=True)] == [True, False]
