"""Which row of the tile tables an architecture gets."""

import pytest
import torch

from fused_grpo import kernels, linear_logprobs
from fused_grpo.kernels import _device, tuning

pytestmark = pytest.mark.cpu_only(reason="it pretends to be on each GPU")
CUDA = torch.device("cuda")


@pytest.fixture
def another_gpu():
    _device.architecture.cache_clear()
    yield
    _device.architecture.cache_clear()


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((9, 0), "sm_90"), ((8, 7), "sm_86"), ((10, 3), "sm_100"), ((11, 0), "sm_100"), ((12, 1), "sm_120")],
)
@pytest.mark.usefixtures("another_gpu")
def test_an_architecture_without_a_row_has_that_of_its_family(monkeypatch, capability, arch):
    monkeypatch.setattr(_device, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert _device.architecture(CUDA) == arch
    expected = tuning.ALIGNED.get(arch) or tuning.HALF.get(arch, tuning.HALF["default"])
    assert tuning.gemm_tile(CUDA, torch.bfloat16, aligned=True) == expected
    assert tuning.row_tile(CUDA) == tuning.ROW.get(arch, tuning.ROW["default"])


@pytest.mark.parametrize(
    ("rows", "options", "by_tiles"),
    [(32, {}, True), (31, {}, False), (32, {"chunk_bytes": 2**20}, False), (32, {"batch_invariant": True}, False)],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_log_probs_go_by_tiles_where_the_table_says_that_these_are_faster(monkeypatch, rows, options, by_tiles, dtype):
    """Not where the caller bounds the memory: then no logit is worth its bytes."""
    monkeypatch.setitem(tuning.TILES_FROM, "interpreter", tuning.TilesFrom(rows=32, hidden_size=40))
    passed, pass_over_rows = [], kernels.row_statistics
    monkeypatch.setattr(kernels, "row_statistics", lambda *x, **o: passed.append(x) or pass_over_rows(*x, **o))
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 40, generator=generator).to(dtype) for n in (rows, 300))
    targets = torch.randint(300, (rows,), generator=generator)
    exact = (hidden.double() @ weight.double().t()).log_softmax(1).gather(1, targets[:, None])[:, 0]
    ours = linear_logprobs(hidden, weight, targets, impl="triton", **options)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-6, atol=1e-6)
    assert bool(passed) == by_tiles
