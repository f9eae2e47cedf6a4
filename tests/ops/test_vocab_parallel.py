"""A head in shards gives what the whole head gives: values, and every gradient, on every rank."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fused_grpo import linear_logprobs
from fused_grpo.chunked import fold_tile_
from fused_grpo.errors import InputError, UnsupportedError
from fused_grpo.statistics import RowState, finish_rows, merge_rows, start_rows

SCRIPT = Path(__file__).with_name("vocab_parallel_run.py")
spec = importlib.util.spec_from_file_location("vocab_parallel_run", SCRIPT)
vocab_parallel_run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(vocab_parallel_run)


CASES = {
    2: [([60, 41], "float32", "torch"), ([60, 41], "float32", "triton"), ([37, 64], "bfloat16", "torch")],
    # One shard of a single token, one of none.
    4: [([37, 1, 50, 13], "float32", "torch"), ([50, 51, 0, 3], "float32", "torch")],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[int, Path]:
    """Where the ranks of each group left what they got."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    found = {}
    for world_size, cases in CASES.items():
        found[world_size] = folder = tmp_path_factory.mktemp("group")
        commands = [[sys.executable, SCRIPT, str(r), str(folder), json.dumps(cases)] for r in range(world_size)]
        ranks = [subprocess.Popen(command, env=env) for command in commands]
        assert [rank.wait(timeout=300) for rank in ranks] == [0] * world_size
    return found


@pytest.mark.parametrize(("world_size", "case"), [(size, case) for size in CASES for case in range(len(CASES[size]))])
def test_shards_give_what_the_whole_head_gives(folders, world_size, case):
    sizes, dtype, _ = CASES[world_size][case]
    whole = vocab_parallel_run.run(vocab_parallel_run.problem(sum(sizes), getattr(torch, dtype)), slice(None))
    paths = [folders[world_size] / f"{case}-{rank}.pt" for rank in range(world_size)]
    ranks = [torch.load(path, weights_only=True) for path in paths]
    joined = {name: torch.cat([rank[name] for rank in ranks]) for name in ("weight", "bias")}
    for name, expected in whole.items():
        assert all(torch.equal(rank[name], ranks[0][name]) for rank in ranks if name not in joined)
        ours = joined.get(name, ranks[0][name])
        tolerance = 1e-6 if ours.dtype == torch.float32 else torch.finfo(ours.dtype).eps
        error = (ours - expected).float().norm() / expected.float().norm()
        assert error <= tolerance, f"{name} differs by {error:.1e}"


def test_a_confident_token_survives_the_merge():
    """1 - p is 4e-9, spread over both parts; the entropy is of that size, too."""
    logits = torch.tensor([[20.0, 0.0, 0.5, -1.0, 0.2]])
    exact = logits.double().log_softmax(-1)
    parts = []
    for part in (logits[:, :3], logits[:, 3:]):
        state = start_rows(1, dtype=torch.float32, device=logits.device)
        target = torch.tensor([0 if part.shape[1] == 3 else -1])
        fold_tile_(part.clone(), target, state, temperature=torch.ones(1), entropy=True)
        parts.append(torch.stack(state))
    logprobs, entropy = finish_rows(merge_rows(RowState(*torch.stack(parts, 1))))
    torch.testing.assert_close(logprobs.double(), exact[:, 0], rtol=1e-6, atol=0)
    torch.testing.assert_close(entropy.double(), -(exact.exp() * exact).sum(-1), rtol=1e-6, atol=0)


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_target_beyond_all_shards_is_refused(alone):
    with pytest.raises(InputError, match=r"target 9 at \[1\]; want 0 <= target < V=9"):
        linear_logprobs(torch.randn(2, 4), torch.randn(9, 4), torch.tensor([8, 9]), process_group=alone)


def test_the_reference_has_no_shards(alone):
    with pytest.raises(UnsupportedError, match="gather the weight"):
        linear_logprobs(
            torch.randn(2, 4), torch.randn(9, 4), torch.tensor([8, 0]), process_group=alone, impl="reference"
        )
