"""A plain step and a plain loss are short to read: they go through little, and nothing that they do not use."""

import pytest
from trace_calls import ROOT, optimizer_step, plain_loss

# What a plain step does not use: changed options, adapters, weights for an engine, conversations, an adaptive entropy.
OFF = ["collect/start_checks", "config/derived_options", "models/adapters", "models/weight_stream"]
OFF += ["models/optimizer", "models/attention", "engines/__init__", "distributed/sharding"]

# What a plain loss does not use: several targets, kept tokens, a teacher, shards, centering, other tokens, log-probs.
OFF_IN_A_LOSS = ["head/several_targets", "head/kept_tokens", "head/entries", "head/chunked_divergence", "head/sharded"]
OFF_IN_A_LOSS += ["head/centering", "head/visited_rows", "head/logprob_plans", "_maths/factors", "_maths/moments"]


@pytest.fixture(scope="module")
def step():
    return optimizer_step()


@pytest.fixture(scope="module")
def loss():
    return plain_loss()


@pytest.mark.parametrize("file", OFF)
def test_a_plain_step_goes_around_what_is_off(step, file):
    assert (ROOT / f"trainer/{file}.py").exists()
    assert step.functions.get(f"trainer/{file}.py", set()) == set()


def test_a_plain_step_is_bounded(step):
    """fix: guard what is off at its caller; `python scripts/trace_calls.py --list` names all functions"""
    assert sum(map(len, step.functions.values())) <= 250
    assert len(step.functions) <= 40


def test_what_a_plain_step_computes_once_is_not_computed_again(step):
    once = {"fused_grpo/integrations/logit_transform.py", "trainer/config/grpo_config.py"}
    assert all((ROOT / file).exists() for file in once)
    assert once.isdisjoint(step.functions)


@pytest.mark.parametrize("file", OFF_IN_A_LOSS)
def test_a_plain_loss_goes_around_what_is_off(loss, file):
    assert (ROOT / f"fused_grpo/{file}.py").exists()
    assert loss.functions.get(f"fused_grpo/{file}.py", set()) == set()


def test_a_plain_loss_is_bounded(loss):
    """fix: guard what is off at its caller; `python scripts/trace_calls.py --list` names all functions"""
    assert sum(map(len, loss.functions.values())) <= 70
    assert len(loss.functions) <= 10
