"""The keys under which Triton would look for compiled kernels, for row counts and slices that must share them.

Run as a script in a process without TRITON_INTERPRET. Prints one JSON object per launch: its call, its kernel, and the
specialisation key together with the signature, constants and attributes that it would be compiled from.
"""

import json
import sys
from typing import Any

import torch
from compile_all import record_launches, specialise

from fused_grpo import kernels
from fused_grpo.kernels import tuning

D, V = 64, 304


def vector(N: int, offset: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows offset..offset + N of a longer vector: 16-byte aligned for some offsets only."""
    return torch.ones(N + 16, dtype=dtype)[offset : offset + N]


def call_head(N: int, offset: int, dtype: torch.dtype) -> None:
    hidden, weight = torch.ones(N + 16, D, dtype=dtype)[offset : offset + N], torch.ones(V, D, dtype=dtype)
    kernels.logprob_forward(hidden, weight, vector(N, offset, torch.int64), temperature=vector(N, offset), entropy=True)


def call_weights(N: int, offset: int, dtype: torch.dtype) -> None:
    hidden, weight = torch.ones(N + 16, D, dtype=dtype)[offset : offset + N], torch.ones(V, D, dtype=dtype)
    if dtype == torch.bfloat16 and tuning.architecture(hidden.device) in tuning.WEIGHTS:
        out, targets = kernels.empty_tile(N, V, dtype=dtype, device=hidden.device), vector(N, offset, torch.int64)
        kernels.softmax_weights_forward(hidden, weight, targets, out=out, temperature=vector(N, offset), entropy=True)


def call_passes(N: int, offset: int, dtype: torch.dtype) -> None:
    logits, targets = torch.ones(N, V), vector(N, offset, torch.int64)
    known = tuple(vector(N, offset) for _ in range(4))
    grads = {"grad_logprobs": vector(N, offset), "grad_entropy": vector(N, offset)}
    kernels.row_statistics(logits, targets, temperature=vector(N, offset), entropy=True)
    for some in (None, known):
        kernels.softmax_weights_(logits, targets, statistics=some, temperature=vector(N, offset), dtype=dtype)
    kernels.logits_gradient_(logits, targets, statistics=known, temperature=vector(N, offset), dtype=dtype, **grads)
    hidden = torch.ones(N, D, dtype=dtype)
    kernels.scale_hidden(hidden, vector(N, offset), vector(N, offset))
    kernels.scale_(hidden, vector(N, offset)[0])
    kernels.finish_rows([known], entropy=True)
    heads = {f"{model}_head": {"temperature": vector(N, offset)} for model in ("student", "teacher")}
    given = {"targets": targets, "grad_logprobs": vector(N, offset), "upstream": vector(N, offset)}
    kernels.divergence_gradient_(torch.ones(N, V), torch.ones(N, V), kind="jsd", beta=0.3, **given, **heads)


def call_support(N: int, offset: int, dtype: torch.dtype) -> None:
    """As many entries as there are rows, each a segment of its own."""
    hidden, weight = torch.ones(N, D, dtype=dtype), torch.ones(V, D, dtype=dtype)
    rows, tokens = (vector(N, offset, torch.int64) for _ in range(2))
    kernels.entry_logits(hidden, weight, rows, tokens, dtype=torch.float32)
    ends = vector(N + 1, offset, torch.int64)
    kernels.weighted_rows_(weight, tokens, ends, rows, vector(N, offset), hidden, cast=dtype)


def describe(launch: Any, arch: str) -> dict[str, str]:
    source, _, key = specialise(launch, arch)
    return {"kernel": launch[0].__name__, "key": f"{key} {source.signature} {source.constants} {source.attrs}"}


def main(arch: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for N in (512, 513, 1000, 1):
            for offset in (0, 1, 2, 5):
                for call in (call_head, call_passes, call_support, call_weights):
                    launches = record_launches(lambda: call(N, offset, dtype), arch)  # noqa: B023
                    for number, launch in enumerate(launches):
                        facts = {"dtype": str(dtype), "N": N, "offset": offset, "number": f"{call.__name__} {number}"}
                        print(json.dumps(facts | describe(launch, arch)))


if __name__ == "__main__":
    main(*sys.argv[1:])
