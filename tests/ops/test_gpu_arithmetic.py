"""What GPUs do with 16-bit inputs, on a CPU: d-logits and softmax weights in 16 bits, products accumulated in fp32."""

import pytest
import torch

from fused_grpo import GRPOLossConfig, fused_linear_grpo_loss, linear_logprobs, linear_logprobs_and_entropy
from fused_grpo.head import head, logprob_plans

pytestmark = pytest.mark.cpu_only(reason="it does on a CPU what tests/gpu sees a GPU do")

PATHS = [("torch", torch.float16), ("torch", torch.bfloat16), ("triton", torch.bfloat16)]
SHAPES = {"torch": (21, 4001, 16), "triton": (4, 1001, 16)}  # (N, V, D): the interpreter takes a row after the other


@pytest.fixture(autouse=True)
def tensor_cores(monkeypatch):
    """Operands of every GEMM keep the dtype of the hidden states; `out_dtype` is what it is on CUDA."""

    def multiply_into(out, a, b, *, accumulate=False):
        assert a.dtype == b.dtype in (torch.float16, torch.bfloat16), "tensor cores would not take these"
        product = a.float() @ b.float()
        out.add_(product) if accumulate else out.copy_(product)

    monkeypatch.setattr(head, "multiply_into", multiply_into)
    monkeypatch.setattr(head.Head, "gemm_dtype", property(lambda self: self.hidden.dtype))


def solve(inputs, dtypes, *, frozen, impl, **options):
    """Gradients of hidden and, unless frozen, of weight and bias."""
    *tensors, targets, g, g_entropy = inputs
    leaves = [x.to(dtype, copy=True) for x, dtype in zip(tensors, dtypes, strict=True)]
    wanted = [x.requires_grad_() for x in leaves[: 1 if frozen else 3]]
    out = linear_logprobs_and_entropy(*leaves[:2], targets, bias=leaves[2], softcap=8.0, impl=impl, **options)
    return torch.autograd.grad(out, wanted, [g.to(out[0].dtype), g_entropy.to(out[0].dtype)])


@pytest.mark.parametrize(("impl", "dtype"), PATHS)
@pytest.mark.parametrize("chunk_bytes", [None, 40_000])
@pytest.mark.parametrize("plan", ["trainable", "frozen", "frozen, entropy not used"])
@pytest.mark.parametrize("several", [(), (3,)])
def test_small_gradients_of_large_vocabularies_do_not_vanish(impl, dtype, chunk_bytes, plan, several):
    """As in a step of a million tokens: upstream gradients of 1e-6, most probabilities below 1e-4."""
    generator, (N, V, D) = torch.Generator().manual_seed(0), SHAPES[impl]

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).double()

    targets = torch.randint(0, V, (N, *several), generator=generator)
    used = 0.0 if "not used" in plan else 1e-6
    inputs = (normal(N, D), normal(V, D) / 4, normal(V), targets, 1e-6 * normal(N, *several), used * normal(N))
    options = {"frozen": "frozen" in plan}
    exact = solve(inputs, [torch.float64] * 3, impl="reference", **options)
    # Master weights: their gradients come back in fp32, where what fp16 lost on the way can be seen.
    ours = solve(inputs, [dtype, torch.float32, torch.float32], impl=impl, chunk_bytes=chunk_bytes, **options)
    for one, other in zip(ours, exact, strict=True):
        # dH itself ends in fp16, whose numbers are 6e-8 apart at the least.
        floor = 2.0**-24 * other.numel() ** 0.5 if one.dtype == torch.float16 else 0.0
        assert (one.double() - other).norm() <= torch.finfo(dtype).eps * other.norm() + floor


@pytest.mark.parametrize(("impl", "dtype"), PATHS)
@pytest.mark.parametrize("chunk_bytes", [None, 400_000])
@pytest.mark.parametrize("centred", [False, True])
def test_nor_do_those_of_the_loss(impl, dtype, chunk_bytes, centred):
    """The same step: each token has a millionth of the loss."""
    generator, (N, V, D) = torch.Generator().manual_seed(0), SHAPES[impl]
    hidden, weight = torch.randn(N, D, generator=generator), torch.randn(V, D, generator=generator) / 4
    targets = torch.randint(0, V, (N,), generator=generator)
    rest = {"advantages": torch.tensor([1.0, -0.5, 2.0]), "cu_seqlens": torch.tensor([0, N // 3, N - 1, N]).int()}
    if centred:
        sampler = (hidden @ weight.t() + torch.randn(N, V, generator=generator)).log_softmax(-1).topk(20, -1)
        rest |= {"sampling_topk_ids": sampler.indices, "sampling_topk_logprobs": sampler.values}
        config = GRPOLossConfig(score_centering="topk", sampling_correction=None)
        rest |= {"sampling_logprobs": sampler.values[:, -1], "config": config}

    def solve(dtypes, **options):
        leaves = [x.to(dtype).to(to).requires_grad_() for x, to in zip((hidden, weight), dtypes, strict=True)]
        loss = fused_linear_grpo_loss(*leaves, targets, **rest, num_tokens=1e6, **options).loss
        return torch.autograd.grad(loss, leaves)

    exact = solve([torch.float64] * 2, impl="reference")
    ours = solve([dtype, torch.float32], impl=impl, chunk_bytes=chunk_bytes)
    for one, other in zip(ours, exact, strict=True):
        floor = 2.0**-24 * other.numel() ** 0.5 if one.dtype == torch.float16 else 0.0
        assert (one.double() - other).norm() <= torch.finfo(dtype).eps * other.norm() + floor


def test_gradients_that_cancel_at_the_sampler_s_tokens_leave_no_rounding():
    """The sampler has a tail of a tenth, the policy of 1e-5: c is -1e4 p, of which only what its tail adds remains."""
    generator, (N, V, D, K) = torch.Generator().manual_seed(0), (64, 200, 32, 4)
    hidden, weight = (torch.randn(size, D, generator=generator).bfloat16() for size in (N, V))
    bias, weight = torch.zeros(V).index_fill_(0, torch.arange(K), 14.0), weight / 8
    log_p = (hidden.double() @ weight.double().t() + bias).log_softmax(-1)
    rest = {"advantages": torch.ones(1), "cu_seqlens": torch.tensor([0, N]).int()}
    rest |= {"sampling_logprobs": log_p[:, 0], "sampling_topk_ids": torch.arange(K).expand(N, K)}
    rest |= {"sampling_topk_logprobs": log_p[:, :K] + torch.tensor(0.9).log()}
    rest |= {"config": GRPOLossConfig(score_centering="topk", sampling_correction=None)}

    def solve(*dtypes, impl):
        leaves = [x.to(dtype).requires_grad_() for x, dtype in zip((hidden, weight), dtypes, strict=True)]
        targets = torch.zeros(N, dtype=torch.int64)
        loss = fused_linear_grpo_loss(*leaves, targets, bias=bias.to(dtypes[1]), impl=impl, **rest).loss
        return torch.autograd.grad(loss, leaves)

    exact = solve(torch.float64, torch.float64, impl="reference")
    for one, other in zip(solve(torch.bfloat16, torch.float32, impl="torch"), exact, strict=True):
        assert (one.double() - other).norm() <= torch.finfo(torch.bfloat16).eps * other.norm()


def test_rounded_weights_cost_at_most_half_more_than_rounded_d_logits(monkeypatch):
    """Of dH and dW, RMS: E and `factor * h` in bf16 beside d-logits in bf16, all sums in fp32."""
    generator, (N, V, D) = torch.Generator().manual_seed(0), (256, 8000, 128)
    hidden, weight = torch.randn(N, D, generator=generator), 0.3 * torch.randn(V, D, generator=generator)
    leaves = [x.bfloat16() for x in (hidden, weight)]
    # Sampled tokens, as those of a rollout are.
    targets = torch.multinomial((leaves[0].float() @ leaves[1].float().t()).softmax(1), 1, generator=generator)[:, 0]
    g = torch.randn(N, generator=generator)

    def gradients(dtype, **options):
        own = [x.to(to).requires_grad_() for x, to in zip(leaves, dtype, strict=True)]
        return torch.autograd.grad(linear_logprobs(*own, targets, **options), own, g.to(own[0].dtype))

    exact = gradients([torch.float64] * 2, impl="reference")
    # fp32 master weights, so that the rounding of dW itself is not what is measured; dH is rounded in both.
    as_weights = gradients([torch.bfloat16, torch.float32], impl="torch")
    monkeypatch.setattr(head.Head, "gemm_on_softmax", False)
    monkeypatch.setattr(logprob_plans, "power_of_two_scale", lambda *arguments, **options: None)
    as_dlogits = gradients([torch.bfloat16, torch.float32], impl="torch")
    for actual, other, wanted in zip(as_weights, as_dlogits, exact, strict=True):
        error, allowed = ((x.double() - wanted).square().mean().sqrt() for x in (actual, other))
        print(f"{error / wanted.square().mean().sqrt():.2e}, d-logits {allowed / wanted.square().mean().sqrt():.2e}")
        assert 0 < error <= 1.5 * allowed
