"""A head in shards gives what the whole head gives: values, losses, metrics and every gradient, on every rank."""

import functools
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import vocab_parallel_run
from torch import Tensor

from fused_grpo import fused_linear_grpo_loss, linear_logprobs
from fused_grpo._maths.statistics import finish_rows
from fused_grpo.errors import InputError, UnsupportedError
from fused_grpo.passes.torch_passes import row_statistics

pytestmark = [pytest.mark.grid, pytest.mark.cpu_only(reason="its ranks are processes that compute on a CPU")]

CASES = vocab_parallel_run.CASES
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-3}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory, fork_server) -> Callable[[int], Path]:
    """Where the ranks of a group of this size left what they got."""

    @functools.cache
    def run(size: int) -> Path:
        folder: Path = tmp_path_factory.mktemp("group")
        fork_server.run(vocab_parallel_run.__file__, folder, processes=size, stage="torch")
        return folder

    return run


@pytest.mark.parametrize(("size", "name"), [(size, name) for size in CASES for name in CASES[size]])
def test_shards_give_what_the_whole_head_gives(folder_of, size, name):
    case = CASES[size][name]
    ranks = [torch.load(folder_of(size) / f"{name}-{rank}.pt", weights_only=True) for rank in range(size)]
    shards = {leaf: torch.cat([rank.pop(leaf) for rank in ranks]) for leaf in ("weight", "bias") if leaf in ranks[0]}
    assert all(torch.equal(rank[key], ranks[0][key]) for rank in ranks for key in ranks[0])
    # That of one chunk is 0.
    ranks[0].pop("recomputed_fraction", None)
    whole = vocab_parallel_run.solve(case._replace(impl="torch"))
    assert whole.keys() - {"recomputed_fraction"} == ranks[0].keys() | shards.keys()
    for key, ours in (ranks[0] | shards).items():
        error = distance(ours, whole[key])
        assert error <= TOLERANCE[case.dtype], f"{key} differs by {error:.1e}"


def test_a_shard_may_want_no_gradient_where_another_does(folder_of):
    ranks = [torch.load(folder_of(2) / f"half frozen-{rank}.pt", weights_only=True) for rank in (0, 1)]
    whole = vocab_parallel_run.solve(vocab_parallel_run.Case(vocab_parallel_run.EVEN, {}, without=("hidden",)))
    assert "weight" not in ranks[1]
    torch.testing.assert_close(ranks[0]["weight"], whole["weight"][:60], rtol=1e-12, atol=1e-12)
    for rank in ranks:
        torch.testing.assert_close(rank["logprobs"], whole["logprobs"], rtol=1e-12, atol=1e-12)


def distance(ours: Tensor, whole: Tensor) -> float:
    if torch.equal(ours, whole):  # extremes of no tokens are infinite
        return 0.0
    floor = 1e-3 if ours.ndim else 1.0  # numbers are means of terms that cancel
    return float((ours - whole).double().norm() / whole.double().norm().clamp_min(floor))


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_ask_for_different_things_are_told(folder_of, rank):
    said = (folder_of(2) / f"quarrel-{rank}.txt").read_text().splitlines()
    for message, wrong in zip(
        said, ("tokens = [23, 22]", "chunk_bytes = [4000, 4001]", "hidden = [1, 0]"), strict=True
    ):
        assert wrong in message


def test_a_confident_token_survives_the_merge():
    """1 - p is 4e-9, spread over both parts; the entropy is of that size, too."""
    logits = torch.tensor([[20.0, 0.0, 0.5, -1.0, 0.2]])
    exact = logits.double().log_softmax(-1)
    parts = []
    for part in (logits[:, :3], logits[:, 3:]):
        target = torch.tensor([0 if part.shape[1] == 3 else -1])
        parts.append(row_statistics(part, target, temperature=torch.ones(1), entropy=True))
    logprobs, entropy, *_ = finish_rows(parts, entropy=True)
    torch.testing.assert_close(logprobs.double(), exact[:, 0], rtol=1e-6, atol=0)
    torch.testing.assert_close(entropy.double(), -(exact.exp() * exact).sum(-1), rtol=1e-6, atol=0)


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    time.sleep(0.25)  # see after_a_moment in fork_server.py
    dist.destroy_process_group()


OPS = {
    "log-probs": linear_logprobs,
    "loss": partial(fused_linear_grpo_loss, advantages=torch.ones(1), cu_seqlens=torch.tensor([0, 2])),
}


@pytest.mark.parametrize("op", OPS)
def test_a_target_beyond_all_shards_is_refused(alone, op):
    with pytest.raises(InputError, match=r"target 9 at \[1\]; want 0 <= target < V=9"):
        OPS[op](torch.randn(2, 4), torch.randn(9, 4), torch.tensor([8, 9]), process_group=alone)


@pytest.mark.parametrize("op", OPS)
def test_the_reference_has_no_shards(alone, op):
    with pytest.raises(UnsupportedError, match="gather the weight"):
        OPS[op](torch.randn(2, 4), torch.randn(9, 4), torch.tensor([8, 0]), process_group=alone, impl="reference")
