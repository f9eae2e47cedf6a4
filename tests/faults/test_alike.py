"""Ranks that are not given the same, or are not in the same place of a run, all say so at once."""

import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("alike_run.py")
CALLS = [
    f"{call} {where}"
    for call in ("evaluate", "save_model", "save_checkpoint", "push_to_hub")
    for where in ("in a callback", "behind the run")
]


@pytest.fixture(scope="module")
def errors(farm, tmp_path_factory):
    """Of each case, those of both ranks."""
    out = tmp_path_factory.mktemp("alike")
    farm.run(SCRIPT, out, json.dumps(CALLS), processes=2, timeout=100)
    first, second = (json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(2))
    return {name: [first[name], second[name]] for name in first}


@pytest.mark.parametrize("name", CALLS)
def test_what_one_rank_alone_calls_is_named_on_both(errors, name):
    first, second = errors[name]
    assert first == second
    assert first.startswith("PeerError: got ranks at different places of the run (rank 0 ")
