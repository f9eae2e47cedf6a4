"""How large pieces of the logits are, where they lie, and which rows of them take part in a gradient."""

from types import ModuleType
from typing import Any

import pytest
import torch
from device_under_test import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_grpo import fused_linear_grpo_loss, kernels, linear_logprobs
from fused_grpo.head.head import Head
from fused_grpo.passes import buffers, torch_passes

CPU = torch.device("cpu")
computes_sizes = pytest.mark.cpu_only(reason="it computes sizes, and asks no op")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


SIZES = {"num_rows": st.integers(1, 5000), "vocab_size": st.integers(2, 200_000), "mib": st.integers(8, 300)}


def check_shape(rows: int, columns: int, *, num_rows: int, vocab_size: int, budget: int) -> None:
    """Of fp32 on a CPU, where columns are padded."""
    assert 1 <= rows <= num_rows
    assert 1 <= columns <= vocab_size
    fits = buffers.column_stride(rows) * columns * 4 <= budget
    assert fits or (rows == 1 and columns in (1, vocab_size))


@computes_sizes
@settings(max_examples=300, deadline=None)
@given(**SIZES)
def test_chunks_fit_the_budget_and_leave_no_gap_between_columns(num_rows: int, vocab_size: int, mib: int) -> None:
    rows = buffers.chunk_rows(buffers.Sizes(num_rows, vocab_size, CPU, 4), mib * 2**20)
    check_shape(rows, vocab_size, num_rows=num_rows, vocab_size=vocab_size, budget=mib * 2**20)
    if rows < num_rows:
        assert buffers.column_stride(rows) == rows


@computes_sizes
@settings(max_examples=300, deadline=None)
@given(**SIZES)
def test_tiles_fit_the_budget(num_rows: int, vocab_size: int, mib: int) -> None:
    shape = buffers.tile_shape(buffers.Sizes(num_rows, vocab_size, CPU, 4), mib * 2**20)
    check_shape(*shape, num_rows=num_rows, vocab_size=vocab_size, budget=mib * 2**20)


GIB = 2**30
# (rows, vocabulary, memory of the GPU): rows of a chunk. Two of 4096, one that holds all, what a small card has room
# for, and one row where nothing else has room.
ON_GPUS = [(8192, 151936, 141 * GIB, 4096), (1000, 151936, 141 * GIB, 1000), (5000, 151936, 141 * GIB, 2560)]
ON_GPUS += [(8192, 151936, 24 * GIB, 768), (8192, 151936, GIB, 36), (8192, 2**24, GIB, 1)]


@computes_sizes
@pytest.mark.parametrize(("num_rows", "vocab_size", "memory", "rows"), ON_GPUS)
def test_on_a_gpu_rows_decide_and_its_memory_is_the_limit(monkeypatch, num_rows, vocab_size, memory, rows):
    monkeypatch.setattr(buffers, "total_memory", lambda device: memory)
    assert buffers.chunk_rows(buffers.Sizes(num_rows, vocab_size, torch.device("cuda"), 4)) == rows
    assert rows < 128 or rows % 128 == 0 or rows == num_rows
    assert rows == 1 or rows * vocab_size * 4 <= memory / 48


@pytest.mark.parametrize("passes", [torch_passes, kernels], ids=["torch", "triton"])
@pytest.mark.parametrize("rows", [1, 5, 130, 300])
def test_tiles_hold_the_logits_of_their_rows_and_columns(passes: ModuleType, rows: int) -> None:
    hidden, weight = torch.randn(300, 8, device=DEVICE), torch.randn(257, 8, device=DEVICE)
    targets = torch.zeros(300, dtype=torch.int64, device=DEVICE)
    head = Head(hidden, weight, None, targets, torch.ones(300, device=DEVICE), 1.0, None)
    seen = torch.zeros(300, 257, device=DEVICE)
    for tile in head.tiles(passes.empty_tile(rows, 100, dtype=torch.float32, device=DEVICE)):
        seen[tile.rows, tile.columns] = tile.logits
        first_rows = tile.first(3)
        assert len(first_rows.logits) == len(first_rows.hidden) == len(first_rows.targets) == min(3, len(tile.logits))
        assert first_rows.rows.start == tile.rows.start
    torch.testing.assert_close(seen, hidden @ weight.t(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("clipped", [3, 40])
def test_clipped_rows_add_nothing(clipped: int) -> None:
    hidden, weight = torch.randn(96, 16), torch.randn(200, 16)
    targets, mask = torch.randint(200, (96, 1)), torch.ones(96, 1)
    logprobs = (hidden @ weight.t()).log_softmax(-1).gather(1, targets)
    old = logprobs.clone()
    old[:: 96 // clipped][:clipped] -= 1.0  # a ratio of e, clipped for advantages above 0
    gone = torch.zeros(96, dtype=torch.bool)
    gone[:: 96 // clipped][:clipped] = True
    gradients = []
    for scored, total in ((mask, None), (torch.where(gone[:, None], 0.0, mask), 96 - clipped)):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        options = {"advantages": torch.ones(96), "mask": scored, "old_logprobs": old, "entropy": False}
        loss = fused_linear_grpo_loss(leaves[0][:, None], leaves[1], targets, **options).loss
        (loss if total is None else loss * total / 96).backward()
        gradients.append([leaf.grad for leaf in leaves])
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


@pytest.mark.cpu_only(reason="tests/gpu has a GPU whose memory runs out")
def test_where_memory_runs_out_chunks_are_halved_once_and_say_so(monkeypatch, caplog) -> None:
    hidden, weight, targets = torch.randn(200, 16), torch.randn(300, 16), torch.randint(300, (200,))
    options: dict[str, Any] = {"advantages": torch.randn(200), "cu_seqlens": torch.tensor([0, 200], dtype=torch.int32)}
    allocate, asked = torch_passes.empty_tile, list[int]()

    def scarce(rows: int, columns: int, **where: Any) -> torch.Tensor:
        asked.append(rows)
        if rows > 100:
            raise torch.OutOfMemoryError
        return allocate(rows, columns, **where)

    def gradients(**more: Any) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        fused_linear_grpo_loss(leaves[0], leaves[1], targets, **options, **more).loss.backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    whole = gradients()
    monkeypatch.setattr(torch_passes, "empty_tile", scarce)
    for ours, wanted in zip(gradients(), whole, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-7)
    assert asked == [200, 100]
    assert "no memory for 200 rows of logits: chunks of half as many; fix: set chunk_bytes" in caplog.text
    with pytest.raises(torch.OutOfMemoryError):
        gradients(chunk_bytes=2**28)  # the user's own choice is not second-guessed
