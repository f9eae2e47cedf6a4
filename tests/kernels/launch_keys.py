"""The keys under which Triton would look for compiled kernels, for row counts and slices that must share them.

Run as a script in a process without TRITON_INTERPRET: `launch_keys.py architecture [plans]`. Prints one JSON object per
launch: its call, its kernel, and the specialisation key together with the signature, constants and attributes that it
would be compiled from. With `plans`, those of the calls of each plan through the head, for many more row counts.
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
    state = tuple(vector(N, offset) for _ in range(4))
    grads = {"grad_logprobs": vector(N, offset), "grad_entropy": vector(N, offset)}
    passed = {"entropy": True, "moments": lambda fields, columns: None}
    kernels.row_statistics(logits, targets, temperature=vector(N, offset), **passed)
    for statistics in (None, state):
        kernels.softmax_weights_(logits, targets, statistics=statistics, temperature=vector(N, offset), dtype=dtype)
    kernels.logits_gradient_(logits, targets, statistics=state, temperature=vector(N, offset), dtype=dtype, **grads)
    hidden = torch.ones(N, D, dtype=dtype)
    kernels.clean_targets(targets, ignore_index=-100, vocab_size=V)
    kernels.scale_hidden(hidden, vector(N, offset), vector(N, offset))
    kernels.scale_(hidden, vector(N, offset)[0])
    kernels.finish_rows([state], entropy=True)
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


def call_loss(N: int) -> None:
    row, targets, hidden = torch.ones(N), torch.ones(N, dtype=torch.int64), torch.ones(N, D, dtype=torch.bfloat16)
    scale = kernels.softmax_weights_(torch.ones(N, V), targets, temperature=row, dtype=torch.bfloat16)[1]
    inputs = {"advantages": row, "weights": row, "mask": row.bool(), "old_logprobs": row}
    terms = ("clipped", 0.2, 0.2, None, (1.0, 1.05), 0.0, "k3", False, None, None, None, 0.0)
    kernels.token_statistics([kernels.grpo_token_loss(row, inputs=inputs, terms=terms)[2]])
    kernels.scale_hidden(hidden, scale, row)
    kernels.scale_(hidden, row[0], torch.ones(V, D, dtype=torch.bfloat16))


def call_logprobs(N: int) -> None:
    """By tiles, of which a row has the more the more rows there are."""
    row, targets, logits = torch.ones(N), torch.ones(N, dtype=torch.int64), torch.ones(N, V)
    parts = [kernels.row_statistics(logits, targets, temperature=row) for _ in range(1 + N % 8)]
    statistics = kernels.finish_rows(parts, entropy=False)
    kernels.softmax_weights_(logits, targets, statistics=statistics, temperature=row, dtype=torch.bfloat16)
    kernels.scale_hidden(torch.ones(N, D, dtype=torch.bfloat16), row, row)


def call_without_gradient(N: int) -> None:
    """By the kernel, and by tiles."""
    row, targets = torch.ones(N), torch.ones(N, dtype=torch.int64)
    hidden, weight = torch.ones(N, D, dtype=torch.bfloat16), torch.ones(V, D, dtype=torch.bfloat16)
    kernels.logprob_forward(hidden, weight, targets, temperature=row)
    parts = [kernels.row_statistics(torch.ones(N, V), targets, temperature=row) for _ in range(1 + N % 8)]
    kernels.finish_rows(parts, entropy=False)


PLANS = {"loss": call_loss, "log-probs": call_logprobs, "no gradient": call_without_gradient}
# On both sides of what a specialisation may depend on: 1, multiples of 16, and the sizes of blocks.
ROW_COUNTS = (1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256, 257, 300, 500)
ROW_COUNTS += (511, 512, 513, 700, 777, 1000, 1023, 1024, 1025, 1500, 2047, 2048, 2049, 4096)


def describe(launch: Any, arch: str) -> dict[str, str]:
    source, _, key = specialise(launch, arch)
    return {"kernel": launch[0].__name__, "key": f"{key} {source.signature} {source.constants} {source.attrs}"}


def print_plans(arch: str) -> None:
    for plan, call in PLANS.items():
        for N in ROW_COUNTS:
            for launch in record_launches(lambda: call(N), arch):  # noqa: B023
                print(json.dumps({"plan": plan, "N": N} | describe(launch, arch)))


def main(arch: str, which: str = "") -> None:
    if which == "plans":
        return print_plans(arch)
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
