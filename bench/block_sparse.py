"""What a block-sparse backward pass could leave out: the measurement behind there being none.

    python bench/block_sparse.py      measure, write bench/results/<machine>/block-sparse-<date>.json, print the table

d-logits of a row are g (1 - p) times minus the softmax of the tokens that were not sampled. A tile of them, some rows
by some of the vocabulary, could be left out of dH and dW if the mass that all its rows lose by it is within a budget.
The mass is measured here exactly, tile by tile, and the tiles with the least are left out first, as many as every row's
budget allows. What remains is the density; logits -> dH, dW is then (1 + 2 density) / 3 of three products at best, with
nothing charged for finding the tiles.

Two budgets: a share of the whole row's probability, which bounds nothing about a row whose p is near 1, since its
gradient is of the size 1 - p; and the same share of 1 - p, which bounds the relative error of each row's gradient.

Logits are drawn, as no model ships with this package. The tokens are sampled from them.

    normal         independent normal numbers
    Zipf           -a log(rank), other ranks in each row
    Zipf, sorted   the same ranks in each row, but for the 32 most likely tokens, and a vocabulary sorted by them: the
                   best that a tile can hope for, as tails of text are alike only in part, and no vocabulary is sorted
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_grpo.bench.accuracy import commit
from fused_grpo.bench.accuracy_page import ROOT
from fused_grpo.env import environment

VOCAB, ROWS, COLUMNS = 151936, 128, 128
ENTROPIES = (0.1, 0.5, 2.0)  # nats, mean over rows
BUDGETS = (1e-2, 1e-3, 1e-4)
OWN = 32  # tokens whose rank is the row's own where the vocabulary is sorted


class Family(NamedTuple):
    """Logits [R, V] for a width: more of it is less entropy."""

    name: str
    draw: Callable[[float, torch.Generator], Tensor]


def normal(width: float, generator: torch.Generator) -> Tensor:
    return width * torch.randn(ROWS, VOCAB, generator=generator)


def zipf(width: float, generator: torch.Generator) -> Tensor:
    ranks = torch.stack([torch.randperm(VOCAB, generator=generator) for _ in range(ROWS)])
    return -width * torch.log1p(ranks.float())


def zipf_sorted(width: float, generator: torch.Generator) -> Tensor:
    logits = (-width * torch.log1p(torch.arange(VOCAB).float())).repeat(ROWS, 1)
    for row in logits:
        places = torch.randperm(VOCAB, generator=generator)[:OWN]
        values = row[:OWN].clone()
        row[:OWN] = row[places]
        row[places] = values
    return logits


FAMILIES = (Family("normal", normal), Family("Zipf", zipf), Family("Zipf, sorted", zipf_sorted))


def probabilities(family: Family, entropy: float) -> Tensor:
    """[R, V] in fp64 with this mean entropy, the width found by halving."""
    low, high = 0.5, 40.0
    for _ in range(16):
        width = (low + high) / 2
        log_p = family.draw(width, torch.Generator().manual_seed(0)).double().log_softmax(-1)
        found = -(log_p.exp() * log_p).sum(-1).mean()
        low, high = (width, high) if found > entropy else (low, width)
    return log_p.exp()


def masses(p: Tensor) -> tuple[Tensor, Tensor]:
    """(mass of each row in each tile without its sampled token [R, V / C], 1 - p of that token [R])."""
    sampled = torch.multinomial(p, 1, generator=torch.Generator().manual_seed(1))
    others = p.scatter(1, sampled, 0.0)
    return others.view(ROWS, -1, COLUMNS).sum(-1), others.sum(1)


def density(mass: Tensor, budget: Tensor) -> float:
    """The share of tiles that stay where no row [R] may lose more than its budget."""
    order = (mass / budget[:, None]).amax(0).argsort()
    lost = mass[:, order].cumsum(1)
    left_out = (lost <= budget[:, None]).all(0).sum()
    return 1.0 - left_out.item() / mass.shape[1]


def measure() -> list[dict[str, Any]]:
    found = []
    for family in FAMILIES:
        for entropy in ENTROPIES:
            mass, rest = masses(probabilities(family, entropy))
            for share in BUDGETS:
                whole, relative = torch.full_like(rest, share), share * rest
                row = {"logits": family.name, "entropy": entropy, "budget": share, "median 1 - p": rest.median().item()}
                kinds = {"of the row": density(mass, whole), "of 1 - p": density(mass, relative)}
                found.append(row | {"density": kinds, "time": {k: (1 + 2 * d) / 3 for k, d in kinds.items()}})
    return found


def main() -> None:
    today, rows = datetime.date.today().isoformat(), measure()
    path = ROOT / "bench" / "results" / f"cpu-{os.cpu_count()}-cores" / f"block-sparse-{today}.json"
    shape = {"vocab": VOCAB, "rows of a tile": ROWS, "columns of a tile": COLUMNS}
    about = {"made_by": "bench/block_sparse.py", "date": today, "commit": commit(), "environment": environment()}
    path.write_text(json.dumps({**about, **shape, "rows": rows}, indent=1) + "\n")
    print(
        "| logits | entropy | budget | density, of the row | of 1 - p | time, of the row | of 1 - p |\n"
        + "|---" * 7
        + "|"
    )
    for row in rows:
        cells = [*row["density"].values(), *row["time"].values()]
        numbers = " | ".join(f"{cell:.2f}" for cell in cells)
        print(f"| {row['logits']} | {row['entropy']:g} | {row['budget']:g} | {numbers} |")


if __name__ == "__main__":
    main()
