"""A plain step is short to read: it goes through nothing of what it does not use, and a bounded part of the house."""

import pytest
from trace_calls import ROOT, optimizer_step

# What a plain step does not use: changed options, adapters, weights for an engine, conversations, an adaptive entropy.
OFF = ["collect/start_checks", "config/derived_options", "models/adapters", "models/weight_stream", "common/formatting"]
OFF += ["models/optimizer"]


@pytest.fixture(scope="module")
def step():
    return optimizer_step()


@pytest.mark.parametrize("file", OFF)
def test_a_plain_step_goes_around_what_is_off(step, file):
    assert (ROOT / f"trainer/{file}.py").exists()
    assert step.functions.get(f"trainer/{file}.py", set()) == set()


def test_what_a_plain_step_computes_once_is_not_computed_again(step):
    once = {"fused_grpo/integrations/logit_transform.py", "trainer/config/grpo_config.py"}
    assert all((ROOT / file).exists() for file in once)
    assert once.isdisjoint(step.functions)
