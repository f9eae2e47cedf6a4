"""A plain step and a plain loss are short to read: they go through little, and nothing that they do not use."""

import pytest
from trace_calls import ROOT, optimizer_step, plain_loss

# What a plain step does not use: changed options, adapters, an adaptive entropy, trees, ranks.
OFF = {f"trainer/{name}.py": "step" for name in ("collect/start_checks", "config/derived_options", "models/adapters")}
OFF |= {f"trainer/{name}.py": "step" for name in ("models/optimizer", "models/attention", "distributed/sharding")}
OFF |= {"trainer/engines/__init__.py": "step", "trainer/models/weight_stream.py": "step"}
# What it computes once, before its first step.
OFF |= dict.fromkeys(("fused_grpo/integrations/logit_transform.py", "trainer/config/grpo_config.py"), "step")
# What a plain loss does not use: several targets, kept tokens, a teacher, shards, centering, other tokens, log-probs.
HEAD = ("several_targets", "kept_tokens", "entries", "chunked_divergence", "sharded", "centering", "visited_rows")
OFF |= {f"fused_grpo/head/{name}.py": "loss" for name in (*HEAD, "logprob_plans")}
OFF |= {f"fused_grpo/_maths/{name}.py": "loss" for name in ("factors", "moments")}


@pytest.fixture(scope="module")
def walks():
    return {"step": optimizer_step(), "loss": plain_loss()}


@pytest.mark.parametrize("file", OFF)
def test_a_plain_call_goes_around_what_is_off(walks, file):
    assert (ROOT / file).exists()
    assert walks[OFF[file]].functions.get(file, set()) == set()


@pytest.mark.parametrize(("name", "functions", "files"), [("step", 250, 40), ("loss", 70, 10)])
def test_a_plain_call_is_bounded(walks, name, functions, files):
    """fix: guard what is off at its caller; `python scripts/trace_calls.py --list` names all functions"""
    walk = walks[name].functions
    assert 10 < sum(map(len, walk.values())) <= functions
    assert len(walk) <= files
