"""The states of random generators, which come back as they were."""

import random

import numpy as np
import pytest
import torch

from fused_grpo.trainer.checkpoint.training_state import random_state, set_random_state


def test_random_generators_come_back():
    def draw():
        return [random.random(), random.gauss(0, 1), float(np.random.randn()), float(torch.randn(()))]

    random.gauss(0, 1)  # leaves one of its pair
    np.random.randn()
    state = random_state()
    first = draw()
    draw()
    set_random_state(state)
    assert draw() == first


def test_what_a_thread_draws_while_generators_are_set_ends_no_run(monkeypatch):
    """A client of websockets draws the numbers of its pings in a thread of its own."""
    state, wanted, set_python = random_state(), random.getstate(), random.setstate

    def set_and_draw(state):
        set_python(state)
        random.random()

    monkeypatch.setattr(random, "setstate", set_and_draw)
    set_random_state(state)
    assert random.getstate() != wanted
    set_python(wanted)
    state["python"][5] = -1
    with pytest.raises((ValueError, OverflowError)):
        set_random_state(state)
    assert random.getstate() == wanted  # a wrong state is set nowhere
