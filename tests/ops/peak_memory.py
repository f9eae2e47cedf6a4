"""Peak resident memory of one loss and backward, in bytes above what the inputs take: run as a script, prints JSON."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch

from fused_grpo import fused_linear_grpo_loss

N, V, D = 4096, 50304, 256


def resident(field: str) -> int:
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def loss_and_backward(rows: int, vocabulary: int, chunk_bytes: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = torch.randn(rows, D, requires_grad=True)
    weight = torch.randn(vocabulary, D).mul_(0.05).requires_grad_()
    targets = torch.randint(0, vocabulary, (rows,))
    cu_seqlens = torch.arange(0, rows + 1, rows // 8, dtype=torch.int32)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    loss = fused_linear_grpo_loss(
        hidden, weight, targets, advantages=torch.randn(8), cu_seqlens=cu_seqlens, chunk_bytes=chunk_bytes
    ).loss
    (loss * 2).backward()
    return resident("VmHWM") - before, hidden.grad.nbytes + weight.grad.nbytes


if __name__ == "__main__":
    torch.manual_seed(0)
    loss_and_backward(64, 1000, None)  # thread pools and library workspaces, which are not ours to count
    peak, gradients = loss_and_backward(N, V, int(sys.argv[1]))
    print(json.dumps({"peak": peak, "gradients": gradients}))
