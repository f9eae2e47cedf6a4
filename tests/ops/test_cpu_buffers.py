"""The cache of large buffers: no sharing, its limit, and no failed allocation because of it."""

import copy
import gc
import mmap
import pickle
import re
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fused_grpo import fused_linear_grpo_loss, linear_logprobs
from fused_grpo.passes import buffers

CPU, MIB = torch.device("cpu"), 2**20
FLOATS = 4 * MIB  # 16 MiB of them

pytestmark = [
    pytest.mark.skipif(not hasattr(mmap, "MADV_FREE"), reason="memory is kept where the kernel may have it"),
    pytest.mark.cpu_only(reason="it is about the memory of CPUs"),
]


@pytest.fixture(autouse=True)
def before() -> None:
    forget()


def forget() -> None:
    gc.collect()
    buffers._free_pages.clear()


def floats(count: int = FLOATS) -> torch.Tensor:
    return buffers.empty((count,), dtype=torch.float32, device=CPU)


def kept() -> list[int]:
    return [len(pages) for pages in buffers._free_pages]


def test_memory_comes_back_when_the_last_tensor_on_it_is_gone():
    first = floats()
    place, row = first.data_ptr(), first.view(16, -1)[3]
    del first
    assert kept() == [], "a row is left"
    assert floats().data_ptr() != place
    forget()
    del row
    assert kept() == [16 * MIB]
    assert floats().data_ptr() == place
    assert floats(FLOATS // 2).data_ptr() == place, "a smaller piece"


def test_two_who_hold_memory_never_share_it():
    def loan(number: int) -> bool:
        held = floats(FLOATS + 4096 * (number % 3)).fill_(number)
        other = floats().fill_(-1)
        return bool((held == number).all() and (other == -1).all())

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(loan, range(100)))
    assert 2 <= len(kept()) <= 8 * 3


@pytest.mark.parametrize("size", [2 * FLOATS + 1, FLOATS - 1])
def test_memory_of_another_size_is_left_where_it_is(size):
    floats(2 * FLOATS)
    assert kept() == [32 * MIB]
    held = floats(size)
    assert kept() == [32 * MIB]
    assert held.shape == (size,)


def test_no_more_is_kept_than_a_limit(monkeypatch):
    monkeypatch.setattr(buffers, "_MOST_FREE_BYTES", 50 * MIB)
    everyone = [floats() for _ in range(5)]
    last = everyone[-1].data_ptr()
    while everyone:
        everyone.pop(0)
    assert kept() == [16 * MIB] * 3
    floats(4 * FLOATS)
    assert kept() == [16 * MIB] * 3, "a buffer above the limit displaces no other"
    assert last in [floats().data_ptr() for _ in range(3)]


def test_at_exit_no_memory_is_reused_that_others_may_still_read():
    held = floats()
    loans = [loan for loan in weakref.finalize._registry if loan.peek()[1] is buffers._take_back]
    assert loans
    assert not any(loan.atexit for loan in loans)
    del held


def test_what_is_kept_gives_way_where_the_address_space_ends(monkeypatch):
    floats()
    plain, asked = mmap.mmap, []

    def full(*args: int, **options: int) -> mmap.mmap:
        asked.append(kept())
        if len(asked) == 1 or len(asked) > 2:
            raise OSError(12, "Cannot allocate memory")
        return plain(*args, **options)

    monkeypatch.setattr(mmap, "mmap", full)
    held = floats(4 * FLOATS)
    assert asked == [[16 * MIB], []]
    assert not held.untyped_storage().resizable()
    assert floats(4 * FLOATS).untyped_storage().resizable(), "PyTorch's, or its error"


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="what the kernel may take is read from Linux's /proc")
def test_what_is_kept_is_the_kernels_for_the_asking():
    def lazily_free() -> int:
        return 1024 * sum(map(int, re.findall(r"LazyFree:\s+(\d+) kB", Path("/proc/self/smaps").read_text())))

    before, held = lazily_free(), floats().fill_(1.0)
    assert lazily_free() - before < MIB
    del held
    assert lazily_free() - before >= 15 * MIB
    assert (floats().fill_(2.0) == 2.0).all()


def test_where_it_would_not_help_memory_is_as_ever(monkeypatch):
    assert floats(100).untyped_storage().resizable()
    weight = torch.empty(4096, 1024).t()
    assert buffers.empty_like(weight).stride() == weight.stride()
    assert buffers.empty((FLOATS,), dtype=torch.float32, device=torch.device("meta")).is_meta
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert floats().untyped_storage().resizable(), "or the profiler would not count it"
    assert not floats().untyped_storage().resizable()
    monkeypatch.delattr(mmap, "MADV_FREE")
    assert floats().untyped_storage().resizable()


def test_a_kernel_that_takes_no_advice_gives_memory_all_the_same(monkeypatch):
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345, raising=False)
    monkeypatch.setattr(mmap, "MADV_FREE", 12345)
    assert (floats().fill_(3.0) == 3.0).all()
    assert kept() == [], "the kernel could not have it back"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_it_is_what_torch_empty_gives(dtype):
    ours, expected = buffers.empty((2048, 4096), dtype=dtype, device=CPU), torch.empty((2048, 4096), dtype=dtype)
    for property_ in ("shape", "dtype", "device", "layout", "requires_grad", "is_leaf"):
        assert getattr(ours, property_) == getattr(expected, property_)
    assert ours.stride() == expected.stride()
    with torch.inference_mode():
        assert buffers.empty((2048, 4096), dtype=dtype, device=CPU).is_inference()


def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(48, 64, requires_grad=True), torch.randn(50304, 64, requires_grad=True), torch.arange(48)


@pytest.mark.parametrize("way", ["loss", "logprobs"])
def test_a_step_takes_the_memory_of_the_one_before(way):
    """And no two that are alive take the same: several graphs, and gradients that add up."""
    hidden, weight, targets = problem()

    def backward_later() -> torch.Tensor:
        if way == "logprobs":
            return linear_logprobs(hidden, weight, targets).sum()
        return fused_linear_grpo_loss(hidden[:, None], weight, targets[:, None], advantages=torch.ones(48)).loss

    backward_later().backward()
    once, place = weight.grad.clone(), weight.grad.data_ptr()
    weight.grad = None
    assert sorted(kept()) == [4 * 48 * 50304, weight.nbytes], "the tile and the gradient"
    backward_later().backward()
    assert weight.grad.data_ptr() == place
    assert torch.equal(weight.grad, once)
    weight.grad = None
    both = [backward_later(), backward_later()]
    for output in both:
        output.backward()
    torch.testing.assert_close(weight.grad, 2 * once)


def test_a_gradient_can_be_copied_saved_and_shared():
    hidden, weight, targets = problem()
    linear_logprobs(hidden, weight, targets).sum().backward()
    gradient = weight.grad.clone()
    assert not weight.grad.untyped_storage().resizable()
    assert torch.equal(copy.deepcopy(weight.grad), gradient)
    assert torch.equal(pickle.loads(pickle.dumps(weight.grad)), gradient)
    assert torch.equal(weight.grad.share_memory_(), gradient)
    torch.optim.SGD([weight], lr=1.0).step()
    assert weight.isfinite().all()
