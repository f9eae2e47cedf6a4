"""Every kernel at small shapes: `[compute-sanitizer --tool memcheck] python tests/gpu/launch_all.py`.

compute-sanitizer looks for races and accesses out of bounds. With PYTORCH_NO_CUDA_MEMORY_CACHING=1 memory beside a
tensor is not allocated; no shape is a multiple of a tile. With an odd D the forward kernel loads through pointers, not
descriptors.
"""

import json
import time
from typing import Any

import torch

from fused_grpo import kernels

SIZES = {"cuda": ((37, 136, 1003), (5, 131, 257)), "cpu": ((2, 24, 131),)}  # (N, D, V)


def launch(device: str, dtype: torch.dtype, size: tuple[int, int, int], **options: Any) -> None:
    N, D, V = size
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=device).to(dtype)

    hidden, weight, rows = normal(N, D, dtype=dtype), normal(V, D, dtype=dtype), normal(N)
    targets = torch.randint(V, (N,), generator=generator, device=device)
    given = {"temperature": torch.ones(N, device=device), **options}
    for entropy in (False, True):
        kernels.logprob_forward(hidden, weight, targets, entropy=entropy, **given)
        if kernels.prefers_softmax_weights(hidden, weight, 10**9):
            out = kernels.empty_tile(N, V, dtype=dtype, device=hidden.device)
            kernels.softmax_weights_forward(hidden, weight, targets, out=out, entropy=entropy, **given)
        state = kernels.row_statistics(normal(N, V), targets, entropy=entropy, **given)
        statistics = kernels.finish_rows([state, state], entropy=entropy)
        kernels.softmax_weights_(normal(N, V), targets, entropy=entropy, dtype=dtype, **given)
        upstream = {"grad_logprobs": rows, "grad_entropy": rows if entropy else None, "statistics": statistics}
        kernels.logits_gradient_(normal(N, V), targets, dtype=dtype, **upstream, **given)
    kernels.row_statistics(normal(N, V), targets, moments=lambda fields, columns: None, **given)
    kernels.softmax_weights_(normal(N, V), targets, statistics=statistics, dtype=dtype, **given)
    for kind in ("reverse_kl", "forward_kl", "jsd"):
        heads = {"student_head": given, "teacher_head": given, "targets": targets, "grad_logprobs": rows}
        divergence = {"kind": kind, "beta": 0.5, "upstream": rows, "dtype": dtype}
        kernels.divergence_gradient_(normal(N, V), normal(N, V), **divergence, **heads)
    kernels.scale_hidden(hidden, rows, rows)
    kernels.scale_(hidden, rows[0])
    kernels.clean_targets(targets, ignore_index=0, vocab_size=V)
    tokens = targets.unique()
    kernels.entry_logits(hidden, weight, targets % N, targets, dtype=torch.float32)
    ends = torch.tensor([0, *[1] * (len(tokens) - 1), N], device=device)
    kernels.weighted_rows_(weight, tokens, ends, targets % N, rows, hidden, cast=dtype, accumulate=True)
    inputs = {"advantages": rows, "weights": rows.abs(), "mask": targets % 3 > 0, "old_logprobs": -rows.abs()}
    terms = ("clipped", 0.2, 0.28, None, (1.0, 1.05), 0.1, "k3", True, None, None, None, 0.1)
    kernels.token_statistics([kernels.grpo_token_loss(-rows.abs(), inputs=inputs, terms=terms)[-1]] * 2)


def launch_all(device: str) -> None:
    start = time.perf_counter()
    for dtype in (torch.bfloat16, torch.float32) if device == "cuda" else (torch.float32,):
        for size in SIZES[device]:
            launch(device, dtype, size)
            launch(device, dtype, size, bias=torch.ones(size[2], device=device), softcap=9.0, logit_scale=0.7)
            if device == "cuda":
                torch.cuda.synchronize()
            shape = {"dtype": str(dtype), **dict(zip("NDV", size, strict=True))}
            figure = {"figure": "every kernel was launched", "value": time.perf_counter() - start, "unit": "s"}
            print(json.dumps(figure | {"shape": shape}), flush=True)


if __name__ == "__main__":
    launch_all("cuda" if torch.cuda.is_available() else "cpu")
