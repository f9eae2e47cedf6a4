"""One rank of a group that shares a head: `vocab_parallel_run.py FOLDER`, as torchrun starts it. Saves its results."""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fused_grpo import FusedLinearGRPOLoss, GRPOLossConfig, linear_logprobs_and_entropy
from fused_grpo.errors import InputError

N, D, V = 23, 12, 101
# The second of four sequences is empty, the third has no advantage.
STARTS, ADVANTAGES = [0, 6, 6, 15, N], [1.0, -2.0, 0.0, -0.5]


class Case(NamedTuple):
    """A head in shards of these sizes; what is computed under it, from what."""

    sizes: tuple[int, ...]
    config: dict[str, Any] | None = None  # of the loss; None for log-probs and entropy
    dtype: torch.dtype = torch.float64
    impl: str = "torch"
    without: tuple[str, ...] = ()  # leaves that need no gradient
    options: tuple[tuple[str, Any], ...] = ()  # of the loss
    tokens: int = N
    several: tuple[int, ...] = ()  # (K,) for K targets per row


EVEN, ODD, EMPTY = (60, 41), (37, 1, 63), (50, 0, 51)
BONUS = {"beta": 0.1, "entropy_coef": 0.1, "top_entropy_quantile": 0.4}
CASES = {
    2: {
        "log-probs": Case(EVEN, dtype=torch.float32),
        "log-probs by kernels": Case(EVEN, dtype=torch.float32, impl="triton"),
        "log-probs in bf16": Case((37, 64), dtype=torch.bfloat16),
        "several targets": Case(EVEN, several=(4,)),
        "several targets by kernels": Case(EVEN, dtype=torch.float32, impl="triton", several=(3,)),
        "tokens": Case(EVEN, {"beta": 0.1}),
        "tokens in fp32": Case(EVEN, {}, dtype=torch.float32),
        "tokens in bf16": Case(EVEN, {"beta": 0.1}, dtype=torch.bfloat16),
        "tokens by kernels": Case(EVEN, {}, dtype=torch.float32, impl="triton"),
        "threshold and bonus": Case(EVEN, BONUS, options=(("entropy_threshold", 4.0), ("num_entropy_tokens", 9.0))),
        "quantile and bonus": Case(EVEN, BONUS),
        "nothing measured": Case(EVEN, {}, options=(("entropy", False),)),
        "centred": Case(EVEN, {"score_centering": "topk"}),
        "centred by kernels": Case(EVEN, {"score_centering": "kept"}, dtype=torch.float32, impl="triton"),
        "frozen head": Case(EVEN, {}, without=("weight", "bias")),
        "frozen backbone": Case(EVEN, {}, without=("hidden",)),
        "no gradient": Case(EVEN, {}, without=("hidden", "weight", "bias")),
    },
    3: {
        "log-probs": Case(ODD, dtype=torch.float32),
        "log-probs of an empty shard": Case(EMPTY, dtype=torch.float32),
        "log-probs of no tokens": Case(ODD, tokens=0),
        "several targets": Case(ODD, dtype=torch.float32, several=(4,)),
        "several targets of an empty shard": Case(EMPTY, several=(5,)),
        "several targets of no tokens": Case(ODD, tokens=0, several=(2,)),
        "sequences": Case(ODD, {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
        "sequences of an empty shard": Case(EMPTY, {"importance_sampling_level": "sequence"}),
        "tokens of an empty shard": Case(EMPTY, {}),
        "masks": Case(ODD, {"off_policy_mask_threshold": 0.05, "sampling_correction": "sequence_mask"}),
        "centred sequences of an empty shard": Case(
            EMPTY, {"score_centering": "topk", "importance_sampling_level": "sequence"}
        ),
        "only what is needed": Case(ODD, {}, options=(("score", "needed"),)),
        "no tokens": Case(ODD, {}, tokens=0),
        "no tokens of sequences": Case(ODD, {"importance_sampling_level": "sequence"}, tokens=0),
    },
}


def problem(case: Case, rows: slice) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
    """(leaves, with these rows of the weight; the rest of the head; what a loss takes, and an upstream gradient)."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    leaves = {"hidden": normal(N, D), "weight": normal(V, D) / D**0.5, "bias": normal(V)}
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[3], targets[4], targets[5] = -100, 0, V - 1
    head = {"targets": targets, "temperature": 0.7 + torch.rand(N, generator=generator)}
    near = linear_logprobs_and_entropy(**leaves, **head).logprobs
    rest = {name: near + 0.2 * normal(N) for name in ("old_logprobs", "ref_logprobs", "sampling_logprobs")}
    rest |= {"mask": torch.rand(N, generator=generator) > 0.1, "upstream": normal(2, N) * (normal(N) > -1.0)}
    if case.several:
        head["targets"] = torch.randint(0, V, (N, *case.several), generator=generator)
        head["targets"][::4, 0], head["targets"][3], head["targets"][5] = -100, -100, head["targets"][6, 1]
        rest["of_targets"] = normal(N, *case.several)
    leaves = {name: leaf[: case.tokens if name == "hidden" else None].to(case.dtype) for name, leaf in leaves.items()}
    leaves |= {name: leaves[name][rows] for name in ("weight", "bias")}
    leaves = {name: leaf.clone().requires_grad_(name not in case.without) for name, leaf in leaves.items()}
    head, rest = (
        {name: x[: case.tokens] if name.endswith("targets") else x[..., : case.tokens] for name, x in tensors.items()}
        for tensors in (head, rest)
    )
    if "score_centering" in (case.config or {}):
        ids = torch.stack([torch.randperm(V, generator=generator)[:4] for _ in range(case.tokens)])
        rest |= {"sampling_topk_ids": ids, "sampling_topk_logprobs": normal(case.tokens, 4).log_softmax(-1) - 0.2}
    return leaves, {**head, "logit_scale": 1.5, "softcap": 20.0}, rest


def solve(case: Case, group: Any = None, chunk_bytes: int | None = None) -> dict[str, Tensor]:
    """Outputs and gradients: under the whole head, or under this rank's shard of it."""
    rank = 0 if group is None else dist.get_rank(group)
    start = sum(case.sizes[:rank])
    leaves, head, rest = problem(case, slice(None) if group is None else slice(start, start + case.sizes[rank]))
    upstream = rest.pop("upstream")
    options = {"process_group": group, "impl": case.impl, "chunk_bytes": chunk_bytes}
    if case.config is None:
        values = linear_logprobs_and_entropy(**leaves, **head, **options)
        target_gradient = rest.get("of_targets", upstream[0])
        results, loss = (
            values._asdict(),
            (values.logprobs * target_gradient).sum() + (values.entropy * upstream[1]).sum(),
        )
    else:
        cu_seqlens = torch.tensor(STARTS, dtype=torch.int32).clamp_max(case.tokens)
        rest |= {"advantages": torch.tensor(ADVANTAGES), "cu_seqlens": cu_seqlens, **dict(case.options)}
        out = FusedLinearGRPOLoss(GRPOLossConfig(**case.config), **options)(**leaves, **head, **rest)
        results, loss = {"loss": out.loss, "logprobs": out.logprobs, **out.metrics}, 3.0 * out.loss
    if loss.requires_grad:
        loss.backward()
    results |= {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {name: x.detach() for name, x in results.items()}


def quarrel(group: Any) -> str:
    """The errors of a rank if the last rank has other arguments."""
    last, said = dist.get_rank(group) == dist.get_world_size(group) - 1, []
    other = [(Case(EVEN, {}, tokens=N - last), 4000), (Case(EVEN, {}), 4000 + last)]
    for case, chunk_bytes in [*other, (Case(EVEN, without=("hidden",) * last), 4000)]:
        try:
            solve(case, group, chunk_bytes)
        except InputError as error:
            said.append(str(error))
    return "\n".join(said)


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), dist.group.WORLD
    if dist.get_world_size() == 2:
        (folder / f"quarrel-{rank}.txt").write_text(quarrel(group))
        half_frozen = Case(EVEN, {}, without=("hidden", "weight", "bias") if rank else ("hidden",))
        torch.save(solve(half_frozen, group, 4000), folder / f"half frozen-{rank}.pt")
    for name, case in CASES[dist.get_world_size()].items():
        # Chunks of a few rows; of more where each launch takes long.
        chunk_bytes = 4000 if case.impl == "torch" else 20000
        torch.save(solve(case, group, chunk_bytes), folder / f"{name}-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
