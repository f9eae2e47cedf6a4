"""One rank of a group that shares a head: `vocab_parallel_run.py RANK FOLDER CASES`, saves what it got in each case."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist

from fused_grpo import linear_logprobs_and_entropy

N, D = 23, 12


def problem(vocab_size: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    targets = torch.randint(0, vocab_size, (N,), generator=generator)
    targets[3], targets[4], targets[5] = -100, 0, vocab_size - 1
    weight, bias = normal(vocab_size, D) / D**0.5, normal(vocab_size)
    upstream = {"g": torch.randn(N, generator=generator), "g_entropy": torch.randn(N, generator=generator)}
    upstream["g"][8:11] = upstream["g_entropy"][8:11] = 0
    return {"hidden": normal(N, D), "weight": weight, "bias": bias, "targets": targets, **upstream}


def run(inputs: dict[str, torch.Tensor], rows: slice, **options) -> dict[str, torch.Tensor]:
    """Outputs and gradients for a head of these rows of the weight."""
    leaves = [inputs["hidden"], inputs["weight"][rows], inputs["bias"][rows]]
    hidden, weight, bias = (x.clone().requires_grad_() for x in leaves)
    head = {"bias": bias, "softcap": 20.0, "temperature": 0.7, "logit_scale": 1.5}
    out = linear_logprobs_and_entropy(hidden, weight, inputs["targets"], **head, **options)
    ((out.logprobs * inputs["g"]).sum() + (out.entropy * inputs["g_entropy"]).sum()).backward()
    gradients = {"hidden": hidden.grad, "weight": weight.grad, "bias": bias.grad}
    return {**{name: x.detach() for name, x in out._asdict().items()}, **gradients}


def main(rank: int, folder: str, cases: list[tuple[list[int], str, str]]) -> None:
    world_size = len(cases[0][0])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    for case, (sizes, dtype, impl) in enumerate(cases):
        inputs, start = problem(sum(sizes), getattr(torch, dtype)), sum(sizes[:rank])
        options = {"process_group": dist.group.WORLD, "impl": impl, "chunk_bytes": 4000}
        torch.save(run(inputs, slice(start, start + sizes[rank]), **options), f"{folder}/{case}-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
