"""What some GPUs, CPUs and builds of torch lack or allow, on a CPU that pretends to be one of them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fused_grpo import (
    Distillation,
    fused_linear_divergence,
    fused_linear_grpo_loss,
    linear_logprobs,
    linear_logprobs_and_entropy,
)
from fused_grpo._maths.statistics import full_precision
from fused_grpo.errors import UnavailableError
from fused_grpo.head import head
from fused_grpo.passes import choice

pytestmark = pytest.mark.cpu_only(reason="it pretends to be on each GPU")
PRODUCTS = {"mm": torch.mm, "addmm": torch.addmm}


def on_gpu(dtype: torch.dtype) -> Any:
    """What the ops ask of hidden states, of some on a GPU."""
    return SimpleNamespace(dtype=dtype, device=torch.device("cpu"), is_cuda=True)


def rows(dtype: torch.dtype) -> head.Head:
    blank = torch.empty(0)
    return head.Head(on_gpu(dtype), blank, None, blank, blank, 1.0, None)


@pytest.fixture(autouse=True)
def unasked() -> None:
    head.keeps_sums.cache_clear()


@pytest.mark.parametrize("refused", [(), ("mm",), ("addmm",), ("mm", "addmm")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_where_no_gemm_writes_fp32_all_operands_are_widened(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refused: tuple[str, ...], dtype: torch.dtype
) -> None:
    asked = []

    def product(name: str) -> Any:
        def multiply(*operands: Any, out_dtype: torch.dtype, out: torch.Tensor) -> torch.Tensor:
            assert out.dtype == out_dtype == torch.float32
            asked.append(name)
            if name in refused:
                raise RuntimeError("gemm input type at::BFloat16 and output type float is not supported for ROCm")
            return out

        return multiply

    for name in PRODUCTS:
        monkeypatch.setattr(torch, name, product(name))
    expected = torch.float32 if refused else dtype
    assert [rows(dtype).gemm_dtype for _ in range(3)] == 3 * [expected]
    assert len(asked) == (1 if "mm" in refused else 2), "asked once"
    assert [record.levelname for record in caplog.records] == ["WARNING"] * bool(refused)


def test_a_build_that_refuses_is_this_one_and_fp32_asks_nothing() -> None:
    assert rows(torch.bfloat16).gemm_dtype == torch.float32
    assert rows(torch.float32).gemm_dtype == torch.float32
    assert head.keeps_sums.cache_info().misses == 2


def test_a_full_gpu_says_nothing_of_its_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller may catch the error, make room and call again."""

    def full(*operands: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "mm", full)
    with pytest.raises(torch.OutOfMemoryError):
        _ = rows(torch.bfloat16).gemm_dtype
    for name in PRODUCTS:
        monkeypatch.setattr(torch, name, lambda *operands, out_dtype, out: out)
    assert rows(torch.bfloat16).gemm_dtype == torch.bfloat16


@pytest.mark.parametrize(("capability", "dtype", "runs"), [(75, "bfloat16", "torch"), (75, "float16", "triton")])
def test_bf16_needs_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch, capability: int, dtype: str, runs: str) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: divmod(capability, 10))
    hidden = on_gpu(getattr(torch, dtype))
    assert choice.choose("auto", hidden) == runs
    if runs == "triton":
        assert choice.choose("triton", hidden) == runs
        return
    with pytest.raises(UnavailableError, match=r"bf16 needs compute capability 8\.0 and this GPU has 7\.5"):
        choice.choose("triton", hidden)


@pytest.mark.parametrize("allowed", [True, False])
def test_while_an_op_runs_no_gemm_adds_up_in_fp16(allowed: bool) -> None:
    settings = torch.backends.cuda.matmul
    before, settings.allow_fp16_accumulation = settings.allow_fp16_accumulation, allowed
    try:
        with full_precision(on_gpu(torch.float16)), full_precision(on_gpu(torch.float16)):
            assert not settings.allow_fp16_accumulation
        assert settings.allow_fp16_accumulation == allowed
    finally:
        settings.allow_fp16_accumulation = before


@pytest.mark.parametrize("is_gpu", [False, True])
@pytest.mark.parametrize("own", ["none", "tf32"])
def test_a_setting_for_all_still_counts_after_an_op(is_gpu: bool, own: str) -> None:
    """Unless the device's GEMMs have one of their own."""
    matmul: Any = torch.backends.cuda.matmul if is_gpu else torch.backends.mkldnn.matmul
    hidden = on_gpu(torch.float32) if is_gpu else torch.empty(0)
    before, every = matmul.fp32_precision, torch.backends.fp32_precision
    try:
        torch.backends.fp32_precision, matmul.fp32_precision = "ieee" if own == "tf32" else "tf32", own
        with full_precision(hidden):
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
        torch.backends.fp32_precision = "none"
        assert matmul.fp32_precision == own
    finally:
        torch.backends.fp32_precision, matmul.fp32_precision = every, before


ROWS, TOKENS, ONE = torch.tensor([0, 12]), torch.arange(12), torch.ones(1)
# From hidden states and weight, and the same of a teacher.
OPS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "log-probs": lambda h, w, *_: linear_logprobs(h, w, TOKENS),
    "in tiles": lambda h, w, *_: linear_logprobs(h, w, TOKENS, chunk_bytes=600),
    "entropies": lambda h, w, *_: linear_logprobs_and_entropy(h, w, TOKENS).entropy,
    "three targets": lambda h, w, *_: linear_logprobs(h, w, TOKENS[:, None].repeat(1, 3)),
    "loss": lambda h, w, *_: fused_linear_grpo_loss(h, w, TOKENS, advantages=ONE, cu_seqlens=ROWS).loss,
    "distillation": lambda h, w, *teacher: (
        fused_linear_grpo_loss(
            h, w, TOKENS, advantages=ONE, cu_seqlens=ROWS, distillation=Distillation(*teacher, coef=1.0)
        ).loss
    ),
    "divergence": lambda *heads: fused_linear_divergence(*heads).loss,
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_a_cpu_takes_fp32_for_fp32_whatever_is_allowed(monkeypatch: pytest.MonkeyPatch, op: str, frozen: bool) -> None:
    """With bf16 units, products would have an error of 2^-9."""
    heads = [torch.randn(rows, 8, requires_grad=rows == 12 or not frozen) for rows in (12, 31, 12, 31)]
    seen = list[str]()

    def recorded(multiply: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            seen.append(torch.backends.mkldnn.matmul.fp32_precision)
            return multiply(*args, **kwargs)

        return call

    for name in ("mm", "addmm"):
        monkeypatch.setattr(torch, name, recorded(getattr(torch, name)))
    torch.set_float32_matmul_precision("medium")
    try:
        OPS[op](*heads).sum().backward()
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert len(seen) >= 2
    assert set(seen) == {"ieee"}
