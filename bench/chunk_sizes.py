"""How large a chunk of logits should be: time and memory of ours over `chunk_bytes`, beside the bare products.

    python bench/chunk_sizes.py --device cuda --head Qwen3-8B --tokens 8192 --dtype bfloat16 --output FILE.json
    python bench/chunk_sizes.py --head tiny --tokens 96 --mib 0.1 1        on any CPU, in seconds

Beside each measurement is what a roofline predicts from two ceilings of the same run, the products' time and the
bandwidth of a copy. Every sweep over the vocabulary reads W, for the logits and for dH, and reads and writes dW: that
is hidden behind the products (`at_least`) or not at all (`at_most`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fused_grpo import chunking, linear_logprobs
from fused_grpo.bench.contenders import Contender, ours_loss
from fused_grpo.bench.memory import allocations_of
from fused_grpo.bench.peers import named
from fused_grpo.bench.turns import take_turns
from fused_grpo.bench.work import HEADS, Work, batch_of
from fused_grpo.env import environment

MIB = 2**20


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--head", choices=HEADS, default="GPT-2")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kind", choices=["loss", "logprobs"], default="loss")
    parser.add_argument("--direction", choices=["trainable", "frozen", "no_grad"], default="trainable")
    parser.add_argument("--mib", type=float, nargs="+", default=[64, 128, 256, 512, 1024, 2048])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="a JSON file; without, it is printed alone")
    given = parser.parse_args(arguments)
    names = ("kind", "head", "tokens", "dtype", "direction")
    work = Work(**{name: getattr(given, name) for name in names})
    result = measure(work, given.device, [int(size * MIB) for size in given.mib], given.rounds)
    for size in result["sizes"]:
        print(json.dumps(size))
    if given.output is not None:
        given.output.write_text(json.dumps(result, indent=1) + "\n")
    return result


def measure(work: Work, device: str, sizes: list[int], rounds: int) -> dict[str, Any]:
    """Everyone takes turns, after a run each that is not counted; bytes are counted last."""
    batch, floor = batch_of(work, device), named("products alone")
    ours = {size: of_size(size) for size in sizes}
    runs: dict[str, Callable[[], object]] = {"products alone": partial(floor.run, batch, work)}
    runs |= {str(size): partial(one.run, batch, work) for size, one in ours.items()}
    take_turns(runs, rounds=1)
    seconds = take_turns(runs, rounds=rounds)
    products, bandwidth = statistics.median(seconds["products alone"]), copy_bandwidth(device)
    found = []
    for size, one in ours.items():
        traffic = sweeps(work, device, size) * bytes_of_a_sweep(work)
        batch.hidden.grad = batch.weight.grad = None
        found.append(
            {
                "chunk_bytes": size,
                "seconds": seconds[str(size)],
                "of_products": statistics.median(seconds[str(size)]) / products,
                "at_least": max(products, traffic / bandwidth) / products,
                "at_most": 1 + traffic / bandwidth / products,
                "peak_bytes": allocations_of(partial(one.run, batch, work), device).peak,
            }
        )
    ceilings = {"products": seconds["products alone"], "bytes_per_second": bandwidth}
    return {"environment": environment(), "work": work.described(), "ceilings": ceilings, "sizes": found}


def of_size(size: int) -> Contender:
    """Ours, with chunks of so many bytes."""

    def logprobs(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, work: Work) -> torch.Tensor:
        return linear_logprobs(hidden, weight, targets, softcap=work.shape.softcap, chunk_bytes=size)

    loss = ours_loss(chunk_bytes=size)
    return Contender(name=f"chunks of {size}", version=None, setting="", logprobs=logprobs, loss=loss)


def sweeps(work: Work, device: str, size: int) -> int:
    """How often the loss goes through the vocabulary; the log-prob op in its tall tiles, once for all of them."""
    options: dict[str, Any] = {"device": torch.device(device), "itemsize": 4, "chunk_bytes": size}
    sizes = (work.tokens, work.shape.vocab)
    rows = chunking.chunk_rows(*sizes, **options) if work.kind == "loss" else chunking.tile_shape(*sizes, **options)[0]
    return -(-work.tokens // rows)


def bytes_of_a_sweep(work: Work) -> int:
    """W for the logits and for dH, where there is one, and dW in fp32, there and back."""
    dtype: torch.dtype = getattr(torch, work.dtype)
    reads = {"no_grad": 1, "frozen": 2, "trainable": 2}[work.direction]
    there_and_back = 8 if work.direction == "trainable" else 0
    return work.shape.hidden * work.shape.vocab * (reads * dtype.itemsize + there_and_back)


def copy_bandwidth(device: str) -> float:
    """Bytes read and written by a copy that no cache holds, in a second."""
    source = torch.zeros((2**30 if device == "cuda" else 2**26) // 4, device=device)
    target, seconds = torch.empty_like(source), []
    for _ in range(6):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * source.nbytes / statistics.median(seconds[1:])


if __name__ == "__main__":
    main()
