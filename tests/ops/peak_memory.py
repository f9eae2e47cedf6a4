"""Peak resident memory of an op and its backward pass, in bytes above its inputs: `peak_memory.py CHUNK_BYTES`.

Prints a JSON object per case: the peak, and what of it are the gradients that the caller gets.
"""

import ctypes
import json
import re
import sys
from pathlib import Path

import torch

from fused_grpo import fused_linear_grpo_loss, linear_logprobs
from fused_grpo.passes import buffers

N, V, D = 2048, 50304, 128


def resident(field: str) -> int:
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def run(case: str, chunk_bytes: int) -> dict[str, int | str]:
    hidden = torch.randn(N, D, requires_grad=True)
    weight = torch.randn(V, D).mul_(0.05).requires_grad_()
    targets, upstream = torch.randint(0, V, (N,)), torch.randn(N)
    cu_seqlens = torch.arange(0, N + 1, N // 8, dtype=torch.int32)
    ctypes.CDLL(None).malloc_trim(0)  # or what an earlier case freed would count as there already
    buffers._free_pages.clear()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    if case == "loss":
        options = {"advantages": upstream[:8], "cu_seqlens": cu_seqlens, "chunk_bytes": chunk_bytes}
        loss = fused_linear_grpo_loss(hidden, weight, targets, **options).loss
    else:
        loss = linear_logprobs(hidden, weight, targets, chunk_bytes=chunk_bytes) @ upstream
    (loss * 2).backward()
    peak = resident("VmHWM") - before
    return {"case": case, "peak": peak, "gradients": hidden.grad.nbytes + weight.grad.nbytes}


if __name__ == "__main__":
    torch.manual_seed(0)
    for name in ("loss", "logprobs"):
        # The first run also makes thread pools and library workspaces, which are not ours to count.
        print(json.dumps([run(name, int(sys.argv[1])) for _ in range(2)][-1]), flush=True)
