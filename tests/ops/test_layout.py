"""How pieces of the logits lie in memory, and which rows of them move."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_grpo import chunked, fused_linear_grpo_loss, linear_logprobs, loss_plans, planner
from fused_grpo.head import Head
from fused_grpo.loss_plans import _Step, kept_first_
from fused_grpo.plans import in_columns
from fused_grpo.statistics import start_rows

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


SIZES = {"num_rows": st.integers(1, 5000), "vocab_size": st.integers(2, 200_000), "mib": st.integers(8, 300)}


def check_shape(shape: planner.TileShape, *, num_rows: int, vocab_size: int, budget: int) -> None:
    assert 1 <= shape.rows <= num_rows
    assert 1 <= shape.columns <= vocab_size
    assert shape.stride >= shape.rows
    assert shape.size == shape.stride * shape.columns
    assert (
        shape.size * 4 <= budget
        or shape.rows == shape.columns == 1
        or (shape.rows == 1 and shape.columns == vocab_size)
    )
    if shape.rows >= 96:
        assert shape.stride % 32 == 16, "an odd number of cache lines, or columns share a set of the cache"
        assert shape.stride < shape.rows + 32
    else:
        assert shape.stride == shape.rows, "padding would be much of a column"


@settings(max_examples=300, deadline=None)
@given(**SIZES)
def test_chunks_of_columns_fit_the_budget(num_rows: int, vocab_size: int, mib: int) -> None:
    options: dict[str, Any] = {"device": CPU, "itemsize": 4, "chunk_bytes": mib * 2**20, "in_columns": True}
    shape = planner.chunk_shape(num_rows, vocab_size, **options)
    assert shape.columns == vocab_size
    check_shape(shape, num_rows=num_rows, vocab_size=vocab_size, budget=mib * 2**20)
    if 96 <= shape.rows < num_rows:
        assert shape.rows % 16 == 0


@pytest.mark.parametrize(("num_rows", "rows", "stride"), [(2048, 432, 432), (1009, 128, 144), (410, 410, 432)])
def test_full_chunks_have_no_gap_between_columns_unless_that_leaves_a_stub(num_rows, rows, stride):
    vocab_size = 50304 if num_rows != 1009 else 151936
    shape = planner.chunk_shape(num_rows, vocab_size, device=CPU, itemsize=4, row_bytes=3072, in_columns=True)
    assert shape == (rows, vocab_size, stride)


@settings(max_examples=300, deadline=None)
@given(**SIZES)
def test_tiles_of_columns_fit_the_budget(num_rows: int, vocab_size: int, mib: int) -> None:
    options: dict[str, Any] = {"device": CPU, "itemsize": 4, "chunk_bytes": mib * 2**20, "in_columns": True}
    shape = planner.tile_shape(num_rows, vocab_size, **options)
    check_shape(shape, num_rows=num_rows, vocab_size=vocab_size, budget=mib * 2**20)


@pytest.mark.parametrize("rows", [1, 5, 130, 300])
def test_tiles_are_where_their_shape_says(rows: int) -> None:
    hidden, weight = torch.randn(300, 8), torch.randn(257, 8)
    head = Head(hidden, weight, None, torch.zeros(300, dtype=torch.int64), torch.ones(300), 1.0, None)
    assert in_columns(head, chunked)
    shape = planner.TileShape(rows, 100, rows + 7)
    seen = torch.zeros(300, 257)
    for tile in head.tiles(shape):
        count = tile.rows.stop - tile.rows.start
        assert tile.logits.stride() == (1, rows + 7 if count == rows else planner.column_stride(count))
        seen[tile.rows, tile.columns] = tile.logits
    torch.testing.assert_close(seen, hidden @ weight.t(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["plain", "bias", "softcap", "temperature"])
@pytest.mark.parametrize("weights", [False, True])
def test_row_passes_do_the_same_in_either_order(monkeypatch: pytest.MonkeyPatch, name: str, weights: bool) -> None:
    monkeypatch.setattr(chunked, "BLOCK_BYTES", 2048)
    logits, targets = 3 * torch.randn(9, 300), torch.tensor([0, 1, 31, 32, 150, 298, 299, -1, 64])
    options = {"temperature": torch.linspace(0.5, 2, 9) if name == "temperature" else torch.ones(9)}
    options |= {"bias": torch.randn(300)} if name == "bias" else {"softcap": 4.0} if name == "softcap" else {}
    found = []
    for tile in (logits.clone(), logits.t().contiguous().t()):
        state = start_rows(9, dtype=torch.float32, device=CPU)
        how: dict[str, Any] = {"weights": torch.float32} if weights else {"entropy": True}
        out = chunked.fold_tile_(tile, targets, state, **options, **how)
        assert weights or torch.equal(tile, logits)
        found.append([*state, torch.empty(0) if out is None else out])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("order", ["rows", "columns"])
def test_kept_rows_come_to_the_front(order: str) -> None:
    logits = torch.arange(12.0)[:, None].repeat(1, 50)
    logits = logits if order == "rows" else logits.t().contiguous().t()
    kept = torch.tensor([1, 2, 5, 9, 11])
    came_from = kept_first_(logits, kept)
    assert sorted(came_from.tolist()) == kept.tolist()
    assert torch.equal(logits[:5], came_from[:, None].float().repeat(1, 50))


def test_few_rows_without_a_gradient_stay_unless_zero_times_them_is_not_zero() -> None:
    fields = dict.fromkeys(_Step.__dataclass_fields__)
    step = _Step(**{**fields, "as_weights": True})
    rows = SimpleNamespace(total=torch.ones(64))
    assert step._may_stay(rows, torch.arange(56))
    assert not step._may_stay(rows, torch.arange(55))
    rows.total[3] = torch.inf
    assert not step._may_stay(rows, torch.arange(56))
    assert not _Step(**{**fields, "as_weights": False})._may_stay(rows, torch.arange(56))


@pytest.mark.parametrize("clipped", [3, 40])
def test_clipped_rows_add_nothing_whether_they_stay_or_go(monkeypatch: pytest.MonkeyPatch, clipped: int) -> None:
    hidden, weight = torch.randn(96, 16), torch.randn(200, 16)
    targets, mask = torch.randint(200, (96, 1)), torch.ones(96, 1)
    logprobs = (hidden @ weight.t()).log_softmax(-1).gather(1, targets)
    old = logprobs.clone()
    old[:: 96 // clipped][:clipped] -= 1.0  # a ratio of e, clipped for advantages above 0
    gone = torch.zeros(96, dtype=torch.bool)
    gone[:: 96 // clipped][:clipped] = True
    gradients, moved = [], mock.Mock(side_effect=kept_first_)
    monkeypatch.setattr(loss_plans, "kept_first_", moved)
    for scored, total in ((mask, None), (torch.where(gone[:, None], 0.0, mask), 96 - clipped)):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        options = {"advantages": torch.ones(96), "mask": scored, "old_logprobs": old, "entropy": False}
        loss = fused_linear_grpo_loss(leaves[0][:, None], leaves[1], targets, **options).loss
        (loss if total is None else loss * total / 96).backward()
        gradients.append([leaf.grad for leaf in leaves])
    assert moved.call_count == (clipped > 12), "one row in eight may stay"
    assert (gradients[0][0][gone] == 0).all()
    for ours, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6 * wanted.abs().max().item())


def test_no_rows_at_all_are_as_invariant_as_any() -> None:
    """Tiles of one size for every N would be there for none."""
    hidden, weight = torch.randn(0, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    targets = torch.zeros(0, dtype=torch.int64)
    logprobs = linear_logprobs(hidden, weight, targets, batch_invariant=True, impl="torch")
    logprobs.sum().backward()
    assert logprobs.shape == (0,)
    assert weight.grad is not None
    assert not weight.grad.any()
