"""The passes over kept tokens, Triton's interpreted and those in plain torch, against the same sums in fp64."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from fused_grpo import kernels
from fused_grpo.passes import buffers, torch_passes

N, V, D, E = 7, 19, 45, 29
NARROW = [torch.float16, torch.float32, torch.bfloat16]


@pytest.fixture(params=[kernels, torch_passes], ids=["triton", "torch"])
def passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(buffers, "BLOCK_BYTES", 4 * D * 6)  # several blocks
    return request.param


def normal(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def strided(x: Tensor) -> Tensor:
    """The same values, columns where rows should be, amid NaN."""
    amid = torch.full((2 * x.shape[1], 2 * len(x)), torch.nan, dtype=x.dtype)
    return amid[::2, ::2].copy_(x.t()).t()


def entries(count: int) -> Tensor:
    return torch.arange(E) * 5 % count


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("lie", [strided, Tensor.contiguous])
def test_logits_of_entries_are_dot_products_in_fp32(passes: ModuleType, independent, dtype, lie) -> None:
    hidden, weight, rows, tokens = lie(normal(N, D, dtype=dtype)), lie(normal(V, D, seed=1)), entries(N), entries(V)
    ours = passes.entry_logits(hidden, weight, rows, tokens, dtype=torch.float32)
    h, w = hidden[rows], weight.to(dtype)[tokens]
    plain, exact = ((h.to(wide)[:, None] @ w.to(wide)[:, :, None])[:, 0, 0] for wide in (torch.float32, torch.float64))
    independent.assert_as_exact_as_torch(ours, plain, exact, magnitude=D**0.5)


@pytest.mark.parametrize("budget", [1, 3 * 4 * D, 2**20])
def test_entries_of_a_row_may_be_in_several_blocks(passes: ModuleType, monkeypatch, budget) -> None:
    """Some rows have none, and their tokens come in any order, twice even."""
    monkeypatch.setattr(buffers, "CPU_TILE_BYTES", budget)
    rows, hidden, weight = (torch.arange(E) ** 2 // 200), normal(N, D), normal(V, D, seed=1)
    ours = passes.entry_logits(hidden, weight, rows, entries(V), dtype=torch.float32)
    exact = (hidden[rows].double() * weight[entries(V)].double()).sum(-1)
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("lie", [strided, Tensor.contiguous])
@pytest.mark.parametrize("accumulate", [False, True])
def test_weighted_rows_are_the_sums_of_their_segments(passes: ModuleType, independent, dtype, lie, accumulate) -> None:
    ends, places = torch.tensor([0, 1, 1, 12, 29]), torch.tensor([4, 0, 6, 2])
    matrix, factors, index = lie(normal(V, D, seed=1)), normal(E, seed=2), entries(V)
    out = lie(normal(N, D, dtype=dtype))
    before = out.double().clone()
    options = {"cast": torch.float16, "accumulate": accumulate}
    out = passes.weighted_rows_(out, places, ends, index, factors, matrix, **options)
    exact = before.clone()
    for place, (start, end) in zip(places.tolist(), ends.unfold(0, 2, 1).tolist(), strict=True):
        total = (factors[start:end, None].double() * matrix.half()[index[start:end]].double()).sum(0)
        exact[place] = total + (before[place] if accumulate else 0)
    independent.assert_as_exact_as_torch(out, exact.to(dtype), exact, magnitude=D**0.5)
    untouched = [1, 3, 5]
    assert torch.equal(out[untouched].double(), before[untouched])


def test_nothing_is_done_for_no_entry(passes: ModuleType) -> None:
    none = torch.empty(0, dtype=torch.int64)
    assert passes.entry_logits(normal(N, D), normal(V, D), none, none, dtype=torch.float32).shape == (0,)
    out = normal(N, D)
    passes.weighted_rows_(out, none, torch.zeros(1).long(), none, normal(0), normal(V, D), cast=torch.float32)
    assert torch.equal(out, normal(N, D))
