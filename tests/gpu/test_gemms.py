"""The products that our code asks of the vendor's library, with the strides that it has: 16-bit operands, fp32 out."""

from collections.abc import Iterator

import pytest
import torch
from device_under_test import DEVICE
from gpu_problems import SIZES
from torch import Tensor

from fused_grpo import kernels, linear_logprobs
from fused_grpo._maths.statistics import full_precision
from fused_grpo.head import head

pytestmark = pytest.mark.gpu

R, D = 256, 512
VOCABS = SIZES.gemm_vocabs or (3001,)
DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def as_ours() -> Iterator[None]:
    with full_precision(torch.empty(0, device=DEVICE)):
        yield


def normal(*size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*size, generator=torch.Generator(DEVICE).manual_seed(sum(size)), device=DEVICE).to(dtype)


def tile(V: int) -> Tensor:
    out = kernels.empty_tile(R, V, dtype=torch.float32, device=DEVICE)
    out.as_strided((R, out.stride(0)), out.stride()).fill_(torch.nan)  # beside its columns, too
    return out


def weights_in(memory: Tensor, dtype: torch.dtype) -> Tensor:
    """[R, V] in 16 bits at the front of each row of an fp32 tile, as the row passes leave them: rows are 2 V apart."""
    front = memory.view(dtype)[:, : memory.shape[1]]
    return front.copy_(torch.rand_like(front))


def check(ours: Tensor, exact: Tensor) -> None:
    """Sums in fp32, which tensor cores truncate: less than the 1.6e-3 that a rounding to bf16 costs."""
    assert ours.dtype == torch.float32
    error = ((ours.double() - exact).norm() / exact.norm()).item()
    print(f"error {error:.2e}")
    assert error <= 7e-4


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_build_whose_gemms_keep_no_sums_has_the_same_results(monkeypatch, dtype):
    monkeypatch.setattr(head, "keeps_sums", lambda device, dtype: False)
    leaves = [normal(R, D, dtype=dtype).requires_grad_(), normal(997, D, dtype=dtype).requires_grad_()]
    targets, g = torch.arange(R, device=DEVICE), torch.sin(torch.arange(R, device=DEVICE))
    exact = [x.detach().double().requires_grad_() for x in leaves]
    wanted = (exact[0] @ exact[1].t() / D**0.5).log_softmax(1).gather(1, targets[:, None])[:, 0]
    ours = linear_logprobs(*leaves, targets, temperature=D**0.5, chunk_bytes=2**19)
    torch.testing.assert_close(ours.double(), wanted, rtol=1e-5, atol=1e-5)
    for actual, other in zip(
        torch.autograd.grad(ours, leaves, g), torch.autograd.grad(wanted, exact, g.double()), strict=True
    ):
        assert (actual - other).norm() <= torch.finfo(dtype).eps * other.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", VOCABS)
def test_logits_into_padded_rows(V, dtype):
    hidden, weight, out = normal(R, D, dtype=dtype), normal(V, D, dtype=dtype), tile(V)
    beside = out.as_strided((R, out.stride(0)), out.stride())[:, V:]
    torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=out)
    check(out, hidden.double() @ weight.double().t())
    assert beside.isnan().all(), "written beyond the columns"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", VOCABS)
@pytest.mark.parametrize("accumulate", [False, True])
def test_d_hidden_from_weights_in_half_of_a_tile(V, dtype, accumulate):
    weights, weight = weights_in(tile(V), dtype), normal(V, D, dtype=dtype)
    out = normal(R, D, dtype=torch.float32)
    exact = weights.double() @ weight.double() + (out.double() if accumulate else 0.0)
    if accumulate:
        torch.addmm(out, weights, weight, out_dtype=torch.float32, out=out)
    else:
        torch.mm(weights, weight, out_dtype=torch.float32, out=out)
    check(out, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", VOCABS)
@pytest.mark.parametrize("accumulate", [False, True])
def test_d_weight_from_weights_in_half_of_a_tile(V, dtype, accumulate):
    weights, hidden = weights_in(tile(V), dtype), normal(R, D, dtype=dtype)
    out = normal(V, D, dtype=torch.float32)
    exact = weights.t().double() @ hidden.double() + (out.double() if accumulate else 0.0)
    if accumulate:
        torch.addmm(out, weights.t(), hidden, out_dtype=torch.float32, out=out)
    else:
        torch.mm(weights.t(), hidden, out_dtype=torch.float32, out=out)
    check(out, exact)


@pytest.mark.parametrize("V", VOCABS)
def test_d_weight_straight_into_16_bits_is_rounded_once(V):
    weights, hidden = weights_in(tile(V), torch.bfloat16), normal(R, D, dtype=torch.bfloat16)
    out = torch.empty(V, D, dtype=torch.bfloat16, device=DEVICE)
    torch.mm(weights.t(), hidden, out=out)
    exact = weights.t().double() @ hidden.double()
    assert ((out.double() - exact).abs() <= 2.0**-8 * 1.01 * exact.abs() + 1e-3).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_row_is_added(dtype):
    """For a result of one contiguous row the vendor's library is called in another way."""
    weights, weight = weights_in(tile(VOCABS[0]), dtype)[:1], normal(VOCABS[0], D, dtype=dtype)
    out = normal(1, D, dtype=torch.float32)
    exact = weights.double() @ weight.double() + out.double()
    torch.addmm(out, weights, weight, out_dtype=torch.float32, out=out)
    check(out, exact)


def test_d_bias_is_a_column_of_a_product():
    V = VOCABS[0]
    weights, factor = weights_in(tile(V), torch.bfloat16), normal(R, dtype=torch.bfloat16)
    out = torch.zeros(V, device=DEVICE)
    column = out[:, None]
    torch.addmm(column, weights.t(), factor[:, None], out_dtype=torch.float32, out=column)
    check(out, weights.t().double() @ factor.double())
