"""Sums relative to 0, or to the first logits of a row, and rows whose other logits are far from those."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from fused_grpo import chunked, fused_linear_grpo_loss, linear_logprobs, linear_logprobs_and_entropy
from fused_grpo.head import Head, local_targets
from fused_grpo.planner import BLOCK_BYTES
from fused_grpo.plans import fold
from fused_grpo.statistics import ANCHOR_HOLDS, RowState, adrift, finish_rows, merge_rows, start_rows

pytestmark = pytest.mark.grid

N, V = 40, 64
WAYS = ["no_grad", "frozen", "trainable", "loss"]
# Of the target, from the largest logit of the others, one of the last: nothing that fp32 can hold, just beyond what
# logits may be above an anchor, just within, and tokens without an alternative.
FAR = {3: -200.0, 7: -60.0, 8: -30.0, 20: 30.0, 21: 60.0, 39: 200.0}
CHUNKS = [None, 40 * V]  # all in one piece; several of rows, several of columns


def problem(far: dict[int, float]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(hidden, weight, targets) whose logits are the hidden states, but for rounding nowhere."""
    generator = torch.Generator().manual_seed(0)
    hidden, targets = torch.randn(N, V, generator=generator), torch.randint(V, (N,), generator=generator)
    for row, distance in far.items():
        targets[row] = V - 2
        hidden[row, -1 if distance < 0 else -2] += abs(distance)
    return hidden, torch.eye(V), targets


@pytest.fixture(params=[BLOCK_BYTES, 8 * 4 * N], ids=["one block", "eight columns"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The bytes of the blocks of a row pass, the first of which is looked through."""
    monkeypatch.setattr(chunked, "BLOCK_BYTES", request.param)
    return int(request.param)


def run(way: str, inputs: tuple[torch.Tensor, ...], **options: object) -> list[torch.Tensor]:
    """Log-probs and the gradients that this way has."""
    hidden, weight, targets = inputs
    hidden = hidden.clone().requires_grad_(way != "no_grad")
    weight = weight.clone().requires_grad_(way in ("trainable", "loss"))
    if way == "loss":
        advantages = torch.linspace(-1, 1, N, dtype=hidden.dtype)
        everything = {"advantages": advantages[:, None], "mask": torch.ones(N, 1), "entropy": False, **options}
        output = fused_linear_grpo_loss(hidden[:, None], weight, targets[:, None], **everything)
        output.loss.backward()
        return [output.logprobs[:, 0], hidden.grad, weight.grad]
    logprobs = linear_logprobs(hidden, weight, targets, **options)
    if way == "no_grad":
        return [logprobs]
    (logprobs * torch.linspace(-1, 1, N, dtype=hidden.dtype)).sum().backward()
    return [logprobs.detach(), hidden.grad, *([] if weight.grad is None else [weight.grad])]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize("softcap", [None, 1e4])
@pytest.mark.usefixtures("block")
def test_tokens_far_from_the_others_are_as_exact_as_any(way, chunk_bytes, softcap):
    inputs = problem(FAR)
    ours = run(way, inputs, chunk_bytes=chunk_bytes, softcap=softcap, impl="torch")
    wide = (inputs[0].double(), inputs[1].double(), inputs[2])
    exact = run(way, wide, softcap=softcap, impl="reference")
    for mine, wanted in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine.double(), wanted, rtol=2e-5, atol=2e-6)
    # Not by its size alone: where p is all but 1, 1 - p is what the gradient is made of.
    likely = [20, 21]
    logits, targets = inputs[0].double()[likely], inputs[2][likely, None]
    apart = (logits - logits.gather(1, targets)).scatter(1, targets, -torch.inf)
    rtol = 1e-5 if softcap is None else 1e-3  # which rounds the logits themselves
    torch.testing.assert_close(ours[0].double()[likely], -apart.exp().sum(1).log1p(), rtol=rtol, atol=0)


@contextmanager
def searched() -> Iterator[list[int]]:
    """The number of rows of every tile that is looked through for its largest logits."""
    rows, fold = [], chunked.fold_tile_

    def spied(logits: torch.Tensor, *args: Any, anchored: bool = False, **options: Any) -> torch.Tensor | None:
        rows.extend([] if anchored else [len(logits)])
        return fold(logits, *args, anchored=anchored, **options)

    with mock.patch.object(chunked, "fold_tile_", spied):
        yield rows


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("chunk_bytes", CHUNKS)
def test_nobody_looks_for_the_largest_logit_near_an_anchor(way, chunk_bytes):
    with searched() as rows:
        run(way, problem({8: -30.0, 20: 30.0}), chunk_bytes=chunk_bytes, impl="torch")
    assert rows == []


@pytest.mark.parametrize("way", ["no_grad", "frozen", "trainable"])
def test_rows_adrift_are_folded_again_and_no_others(way, block):
    with searched() as rows:
        run(way, problem(FAR), impl="torch")
    # The first block has every logit, or none of those that are far above the others.
    assert rows == ([] if block == BLOCK_BYTES else [2])


def test_a_chunk_of_the_loss_with_a_row_adrift_is_made_again_and_says_so(monkeypatch):
    monkeypatch.setattr(chunked, "BLOCK_BYTES", 8 * 4 * 8)  # eight columns of eight rows
    hidden, weight, targets = (x.requires_grad_() if x.is_floating_point() else x for x in problem({30: -60.0}))
    options = {"advantages": torch.ones(N), "entropy": False, "chunk_bytes": 3 * 8 * 2 * 4 * V, "impl": "torch"}
    with searched() as rows:
        output = fused_linear_grpo_loss(hidden[:, None], weight, targets[:, None], **options)
    assert len(rows) == 1
    assert rows[0] < N
    assert output.metrics["recomputed_fraction"].item() == pytest.approx(rows[0] / N)
    with searched() as rows:
        ordinary = fused_linear_grpo_loss(problem({})[0][:, None], weight, targets[:, None], **options)
    assert rows == []
    assert ordinary.metrics["recomputed_fraction"].item() == 0.0


@pytest.mark.parametrize("level", [0.0, -86.0])
@pytest.mark.parametrize("banned", [8, 16])
def test_a_first_block_of_banned_tokens_tells_nothing(monkeypatch, banned, level):
    """An anchor of -inf would be no number to take from a logit; and 0 may be far from all others."""
    monkeypatch.setattr(chunked, "BLOCK_BYTES", 8 * 4 * N)
    hidden, weight, targets = problem({})
    targets[:4] = torch.arange(4)
    bias = torch.full((V,), level).index_fill_(0, torch.arange(banned), -torch.inf)
    wide = (hidden.double(), weight.double(), targets)
    exact = linear_logprobs(*wide, bias=bias.double(), impl="reference")
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    ours = linear_logprobs(*leaves, targets, bias=bias, impl="torch")
    torch.testing.assert_close(ours.double(), exact, rtol=2e-6, atol=2e-6)
    assert (ours == -torch.inf).sum() == (targets < banned).sum()
    torch.where(ours.isinf(), 0.0, ours).sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


@pytest.mark.parametrize("shape", [(441, 2048), (96, 50304)])
def test_equal_logits_and_one_above_all_others_are_summed_exactly(shape):
    """Sums of one column after the other would round all rows alike, and lose what is small beside a large one."""
    count, vocab_size = shape
    targets = torch.arange(count)
    level = torch.full((count, vocab_size), 0.31)
    for logits in (level, level.index_fill(1, torch.tensor([vocab_size - 1]), 18.0)):
        state = start_rows(count, dtype=torch.float32, device=logits.device)
        tile = logits.t().contiguous().t()
        chunked.fold_tile_(tile, targets, state, temperature=torch.ones(count), anchored=True)
        exact = logits.double().log_softmax(1).gather(1, targets[:, None])[:, 0]
        torch.testing.assert_close(finish_rows(state)[0].double(), exact, rtol=0, atol=2e-6)


@pytest.mark.parametrize("distance", [*FAR.values(), 0.0])
def test_shards_with_anchors_of_their_own_are_one_vocabulary(distance):
    hidden, weight, targets = problem(dict.fromkeys(range(N), distance) if distance else {})
    targets.fill_(V - 2)
    parts = []
    for columns in (slice(0, 20), slice(20, V)):
        local = local_targets(targets, columns)
        options = (None, local, torch.ones(N), 1.0, None)
        parts.append(fold(Head(hidden, weight[columns], *options), chunked, entropy=False))
    merged = merge_rows(RowState(*(torch.stack(values) for values in zip(*parts, strict=True))))
    exact = linear_logprobs(hidden.double(), weight.double(), targets, impl="torch")
    torch.testing.assert_close(finish_rows(merged)[0].double(), exact, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("level", [0.0, 15.0, -15.0, 25.0, -25.0, 1e3])
def test_an_anchored_tile_is_looked_at_once_at_its_beginning(level):
    """There it is seen whether 0 will do, for which nothing need be subtracted from any logit."""
    hidden, _, targets = problem({8: -30.0})
    hidden += level
    state = start_rows(N, dtype=torch.float32, device=hidden.device)
    for columns in (slice(0, 40), slice(40, V)):
        logits, here = hidden[:, columns].clone(), local_targets(targets, columns)
        chunked.fold_tile_(logits, here, state, temperature=torch.ones(N), anchored=True)
        assert torch.equal(logits, hidden[:, columns])
    others = hidden[:, :40].scatter(1, targets.clamp_max(39)[:, None], -torch.inf)
    others = torch.where((targets < 40)[:, None], others, hidden[:, :40])
    assert torch.equal(state.shift, others.amax(1) if abs(level) > 20 else torch.zeros(N))
    exact = hidden.double().log_softmax(1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(finish_rows(state)[0].double(), exact, rtol=1e-6, atol=1e-6)


def test_a_log_prob_has_not_the_rounding_of_its_logits():
    """Which are near 20, as is the logarithm of the sum that is relative to 0; what they differ by is near 2."""
    generator = torch.Generator().manual_seed(0)
    logits = (20 - 4 * torch.rand(4096, 16, generator=generator)).mul(2**16).round().div(2**16)
    targets = torch.randint(16, (4096,), generator=generator)
    state = start_rows(4096, dtype=torch.float32, device=logits.device)
    chunked.fold_tile_(logits, targets, state, temperature=torch.ones(4096), anchored=True)
    assert not state.shift.any()
    exact = logits.double().log_softmax(1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(finish_rows(state)[0].double(), exact, rtol=0, atol=6e-7)


def test_the_entropy_has_no_anchor():
    with searched() as rows:
        linear_logprobs_and_entropy(*problem({}), impl="torch")
    assert rows


def test_a_row_of_nans_is_nobody_elses():
    hidden, weight, targets = problem({})
    whole = run("frozen", (hidden, weight, targets), impl="torch")
    hidden[5] = math.nan
    ours = run("frozen", (hidden, weight, targets), impl="torch")
    others = torch.arange(N) != 5
    for mine, wanted in zip(ours, whole, strict=True):
        assert mine[5].isnan().all()
        torch.testing.assert_close(mine[others], wanted[others], rtol=1e-6, atol=1e-7)


def test_adrift_is_whoever_is_outside_of_the_range_or_no_number():
    low, high = ANCHOR_HOLDS
    total = torch.tensor([1.0, 0.0, low / 2, 2 * low, high / 2, 2 * high, math.inf, math.nan])
    state = RowState(*(torch.zeros_like(total),), total, *(torch.zeros_like(total) for _ in range(2)))
    assert adrift(state).tolist() == [1, 2, 5, 6, 7]
    assert adrift(state.rows(slice(0, 1))) is None
