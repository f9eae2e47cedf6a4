"""Tiles folded one by one against the softmax of the whole row in fp64, through Triton's interpreter."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_grpo.kernels import fold_tile_

R, V = 7, 130


def problem() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    # Targets in the first, the second and the last tile, and one that is nowhere.
    return 3 * torch.randn(R, V, generator=generator), torch.tensor([0, 49, 50, 99, 100, 129, -1])


def fold(
    logits: Tensor, targets: Tensor, edges: list[int], dtype: torch.dtype, **options: Any
) -> tuple[Any, list[Tensor]]:
    """(the state after all tiles, the weights of each, relative to the maximum of all)."""
    state = tuple(torch.full((len(logits),), value) for value in (float("-inf"), 0.0, 0.0, float("-inf")))
    bias, weights = options.pop("bias", None), []
    for first, last in pairwise(edges):
        here = torch.where((targets >= first) & (targets < last), targets - first, -1)
        before = state[0].clone()
        tile = logits[:, first:last].clone()
        stretch = None if bias is None else bias[first:last]
        new = fold_tile_(tile, here, state, bias=stretch, entropy=True, weights=dtype, **options)
        weights = [w * torch.exp(before - state[0])[:, None] for w in weights] + [new.float()]
    return state, weights


@pytest.mark.parametrize("edges", [[0, 130], [0, 50, 100, 130], [0, 1, 2, 130]])
@pytest.mark.parametrize("names", ["", "bias softcap scale temperature"])
def test_tiles_give_the_softmax_of_the_whole_row(oracle: Any, head_options: Any, edges: list[int], names: str) -> None:
    logits, targets = problem()
    options = head_options(R, V, names)
    state, weights = fold(logits, targets, edges, torch.float32, **options)
    z, plain = (oracle.transform(x, options) for x in (logits.double(), logits))
    others = torch.arange(V) != targets[:, None]
    exact_lse, plain_lse = (x.masked_fill(~others, -torch.inf).logsumexp(-1) for x in (z, plain))
    oracle.assert_as_exact_as_torch(state[0] + state[1].log(), plain_lse, exact_lse, magnitude=30)
    softcap = options.get("softcap")
    slope = 1 - (z * options["temperature"].double()[:, None] / softcap) ** 2 if softcap else torch.ones_like(z)
    exact = torch.where(others, (z - exact_lse[:, None]).exp() * slope, 0.0)
    plain_p = torch.where(others, (plain - plain_lse[:, None]).exp() * slope.float(), 0.0)
    ours = torch.cat(weights, 1) / state[1][:, None]
    oracle.assert_as_exact_as_torch(ours, plain_p, exact)
    here = targets >= 0
    at_target = plain.gather(1, targets.clamp_min(0)[:, None])[:, 0]
    torch.testing.assert_close(state[3][here], at_target[here], rtol=1e-6, atol=1e-6)
    assert (state[3][~here] == -torch.inf).all()


def test_the_entropys_sum_survives_a_growing_maximum(head_options: Any) -> None:
    logits, targets = problem()
    logits = logits.sort(-1).values  # every tile raises the maximum
    state, _ = fold(logits, targets, [0, 50, 100, 130], torch.float32, **head_options(R, V))
    z = logits.double().masked_fill(torch.arange(V) == targets[:, None], -torch.inf)
    centred = z - z.amax(-1, keepdim=True)
    exact = torch.where(centred.isinf(), 0.0, centred.exp() * centred).sum(-1)
    torch.testing.assert_close(state[2].double(), exact, rtol=1e-6, atol=1e-6)


def test_half_width_weights_take_the_front_of_each_row_and_nothing_else(head_options: Any) -> None:
    logits, targets = problem()
    wide = torch.full((R, V + 6), 7.0)
    wide[:, :V] = logits
    state = tuple(torch.full((R,), value) for value in (float("-inf"), 0.0, 0.0, float("-inf")))
    options = head_options(R, V)
    ours = fold_tile_(wide[:, :V], targets, state, weights=torch.float16, weights_scale=1024.0, **options)
    z = logits.masked_fill(torch.arange(V) == targets[:, None], -torch.inf)
    torch.testing.assert_close(ours, (1024 * (z - z.amax(-1, keepdim=True)).exp()).half(), rtol=2e-3, atol=1e-7)
    assert ours.data_ptr() == wide.data_ptr()
    assert (wide[:, V:] == 7).all()


def test_rows_of_banned_tokens_alone_are_nothing_yet(head_options: Any) -> None:
    logits = torch.full((1, 4), float("-inf"))
    state = tuple(torch.full((1,), value) for value in (float("-inf"), 0.0, 0.0, float("-inf")))
    weights = fold_tile_(logits, torch.tensor([2]), state, entropy=True, weights=torch.float32, **head_options(1, 4))
    assert [x.item() for x in state] == [float("-inf"), 0.0, 0.0, float("-inf")]
    assert torch.equal(weights, torch.zeros(1, 4))


def test_without_weights_the_state_is_the_same_and_the_tile_stays(head_options: Any) -> None:
    (logits, targets), options = problem(), head_options(R, V, "bias softcap scale temperature")
    wanted, _ = fold(logits, targets, [0, V], torch.float32, **options)
    state = tuple(torch.full((R,), value) for value in (float("-inf"), 0.0, 0.0, float("-inf")))
    before = logits.clone()
    assert fold_tile_(logits, targets, state, entropy=True, **options) is None
    assert torch.equal(logits, before)
    assert all(torch.equal(a, b) for a, b in zip(state, wanted, strict=True))
