"""Two processes that share the parameters of a tiny causal LM: `fsdp_run.py FOLDER` saves gradients and refusals there.

Run by test_pytorch.py, which takes model, batch and loss from here for its own process, the only one.
"""

import multiprocessing
import sys
from datetime import timedelta
from itertools import product, starmap
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3Config, Qwen3ForCausalLM

from fused_grpo import GRPOLossConfig, fused_linear_grpo_loss, grpo_loss, linear_logprobs
from fused_grpo.errors import InputError
from fused_grpo.integrations.transformers import return_logprobs

PROCESSES, B, T, VOCAB_SIZE, TEMPERATURE = 2, 8, 9, 37, 0.7
CONFIG = GRPOLossConfig(loss_type="dapo", entropy_coef=0.05)


class Case(NamedTuple):
    way: str  # to the loss: from "log-probs" of the model, or in a module around it, by how that gets the head's weight
    shared: (
        str  # "copies" (DDP), the head in the group of the "root", in one of its own ("head"), and layers too ("all")
    )
    tied: bool = False
    checkpointing: bool = False

    @property
    def name(self) -> str:
        flags = [name for name in ("tied", "checkpointing") if getattr(self, name)]
        return ", ".join([self.way, self.shared, *flags])


WAYS = list(starmap(Case, product(("log-probs", "unshard"), ("copies", "root", "head", "all"), (False, True))))
WAYS += [Case(way, "all", checkpointing=True) for way in ("log-probs", "unshard")]
CASES = {case.name: case for case in [*WAYS, Case("full_tensor", "head"), Case("bare full_tensor", "head")]}


class PolicyLoss(nn.Module):
    """A causal LM, and the loss in its forward."""

    def __init__(self, model: Qwen3ForCausalLM, way: str) -> None:
        super().__init__()
        self.model, self.way = model, way

    def forward(self, batch: dict[str, Tensor], num_tokens: int) -> Tensor:
        hidden = self.model.model(batch["ids"], use_cache=False).last_hidden_state[:, :-1]
        inputs = {name: batch[name] for name in ("advantages", "mask", "old_logprobs")}
        options = {**inputs, "num_tokens": num_tokens, "config": CONFIG, "temperature": TEMPERATURE}
        return fused_linear_grpo_loss(hidden, self.head_weight(), batch["ids"][:, 1:], **options).loss

    def head_weight(self) -> Tensor:
        head = self.model.lm_head
        if self.way == "unshard" and isinstance(head.weight, DTensor):
            head.unshard()
        if self.way == "full_tensor":
            return head.weight.full_tensor(grad_placements=[Partial("avg")] * head.weight.device_mesh.ndim)
        return head.weight.full_tensor() if self.way == "bare full_tensor" else head.weight


def make_model(*, tied: bool) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3}
    config = Qwen3Config(vocab_size=VOCAB_SIZE, tie_word_embeddings=tied, use_cache=False, **shape)
    return Qwen3ForCausalLM(config).double().train()


def make_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    batch = {"ids": torch.randint(0, VOCAB_SIZE, (B, T), generator=generator)}
    batch["mask"] = torch.rand(B, T - 1, generator=generator) < 0.8
    batch["advantages"] = torch.randn(B, generator=generator).double()
    batch["old_logprobs"] = -3.6 + 0.5 * torch.randn(B, T - 1, generator=generator).double()
    return batch


def loss_of(logprobs: Tensor, entropy: Tensor, batch: dict[str, Tensor], num_tokens: int, **options: Any) -> Tensor:
    inputs = {name: batch[name] for name in ("advantages", "mask", "old_logprobs")}
    return grpo_loss(logprobs, entropy=entropy, **inputs, num_tokens=num_tokens, config=CONFIG, **options).loss


def share(model: Qwen3ForCausalLM, case: Case) -> nn.Module:
    """What a loop calls."""
    outer = model if case.way == "log-probs" else PolicyLoss(model, case.way)
    if case.shared == "copies":
        return DistributedDataParallel(outer)
    if case.shared in ("head", "all"):
        # Of a parameter that both have, there can be one group.
        fully_shard([model.model.embed_tokens, model.lm_head] if case.tied else model.lm_head)
    for layer in model.model.layers if case.shared == "all" else ():
        fully_shard(layer, reshard_after_forward=True)
    return fully_shard(outer, reshard_after_forward=case.shared == "all")


def gradients(case: Case, rank: int) -> dict[str, Tensor]:
    """Of two micro-batches in each process."""
    model, batch = make_model(tied=case.tied), make_batch()
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    outer, num_tokens = share(model, case), int(batch["mask"].sum())
    for rows in torch.arange(B).view(PROCESSES, 2, -1)[rank]:
        part = {name: x[rows] for name, x in batch.items()}
        if case.way == "log-probs":
            with return_logprobs(outer, temperature=TEMPERATURE):
                output = outer(part["ids"], labels=part["ids"])
            loss = loss_of(output.log_probs, output.entropy, part, num_tokens)
        else:
            loss = outer(part, num_tokens)
        (PROCESSES * loss).backward()  # of which DDP and FSDP take the mean over processes
    sharded = {name: x.grad for name, x in model.named_parameters()}
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in sharded.items()}


def refusals() -> dict[str, str]:
    """What our ops say to a sharded weight."""
    head, hidden, ids = fully_shard(nn.Linear(8, VOCAB_SIZE, bias=False)), torch.ones(1, 3, 8), torch.ones(1, 3).long()
    errors = {}
    for op, options in ((linear_logprobs, {}), (fused_linear_grpo_loss, {"advantages": torch.ones(1)})):
        try:
            op(hidden, head.weight, ids, **options)
        except InputError as error:
            errors[op.__name__] = str(error)
    return errors


def main(rank: int, folder: str) -> None:
    options = {"rank": rank, "world_size": PROCESSES, "timeout": timedelta(seconds=60)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", **options)
    results = {"gradients": {name: gradients(case, rank) for name, case in CASES.items()}, "refusals": refusals()}
    if rank == 0:
        torch.save(results, Path(folder, "results.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    # Forked, so that everything is imported once.
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=main, args=(rank, sys.argv[1])) for rank in range(PROCESSES)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))
