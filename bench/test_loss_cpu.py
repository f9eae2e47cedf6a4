"""Loss, forward and backward, on the CPU: ours against full logits, in time and in bytes.

    pytest bench --benchmark-group-by=func

Each contender is checked against fp64 before it is timed; a wrong result is never timed.
"""

from __future__ import annotations

import pytest
import torch

from fused_grpo import GRPOLossConfig, fused_linear_grpo_loss

N, V, D = 1024, 32000, 256
CONFIG = GRPOLossConfig()


def problem(rows: int, vocabulary: int, dtype: torch.dtype) -> dict:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(0, rows, 9).int()
    return {
        "hidden": torch.randn(rows, D, generator=generator).to(dtype).requires_grad_(),
        "weight": torch.randn(vocabulary, D, generator=generator).mul_(0.05).to(dtype).requires_grad_(),
        "targets": torch.randint(0, vocabulary, (rows,), generator=generator),
        "advantages": torch.randn(8, generator=generator),
        "cu_seqlens": lengths,
    }


def loss_and_backward(inputs: dict, impl: str) -> torch.Tensor:
    inputs["hidden"].grad = inputs["weight"].grad = None
    loss = fused_linear_grpo_loss(**inputs, config=CONFIG, impl=impl).loss
    loss.backward()
    return loss


@pytest.mark.parametrize("impl", ["torch", "reference"], ids=["fused", "full-logits"])
def test_loss_and_backward(benchmark, impl):
    small, exact = problem(64, 1000, torch.float32), problem(64, 1000, torch.float64)
    torch.testing.assert_close(loss_and_backward(small, impl).double(), loss_and_backward(exact, "reference"))
    torch.testing.assert_close(small["weight"].grad.double(), exact["weight"].grad, rtol=1e-4, atol=1e-7)
    inputs = problem(N, V, torch.float32)
    benchmark.extra_info |= {"tokens": N, "vocab": V, "hidden": D, "gemm_flop": 3 * 2 * N * V * D}
    benchmark.pedantic(loss_and_backward, args=(inputs, impl), rounds=5, warmup_rounds=1)
