"""What a model's attention takes and costs: what decides which tokens are packed into which rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from transformers import PreTrainedModel


def takes_any_lengths(model: PreTrainedModel) -> bool:
    """True where attention is a variable-length kernel, which takes packed sequences without a mask."""
    return "flash" in str(model.config._attn_implementation)


def sees_all(model: PreTrainedModel) -> bool:
    """True where every layer attends to all tokens before, through a function that takes a mask."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ()
    windows = any(getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    takes_mask = config._attn_implementation in ("eager", "sdpa")
    return takes_mask and not windows and {"full_attention"}.issuperset(kinds)


def attention_cost(model: PreTrainedModel) -> float:
    """Cost of attention to one token, relative to that of a token in the rest of a layer: 4 D to 24 D^2 FLOP."""
    head: Any = model.get_output_embeddings()
    return 1.0 / (6.0 * int(head.weight.shape[1]))


def sequence_costs(lengths: Sequence[int], attention: float) -> list[float]:
    """Of each sequence by itself, in units of a token's in the rest of a layer; `attention` is `attention_cost`."""
    # Causal attention looks at half of its square.
    return [length * (1 + attention * length / 2) for length in lengths]


def tree_sizes(
    prompt: int, completions: Sequence[int], *, attention: float, max_tokens: int | None = None
) -> list[int]:
    """How many of a prompt's completions share it at a time, in order: 1, 2, 4, ... equal parts, or each by itself.

    A tree of T places costs T (1 + attention T), since its mask hides nothing from the work; a sequence alone half of
    that square. No tree has more than `max_tokens` places.
    """
    count, ends = len(completions), [0, *accumulate(completions)]
    best = [1] * count
    cheapest = sum(sequence_costs([prompt + length for length in completions], attention))
    parts = 1
    while parts < count:
        cuts = [count * part // parts for part in range(parts + 1)]
        places = [prompt + ends[stop] - ends[start] for start, stop in pairwise(cuts)]
        cost = sum(length * (1 + attention * length) for length in places)
        if cost < cheapest and (max_tokens is None or max(places) <= max_tokens):
            best, cheapest = [stop - start for start, stop in pairwise(cuts)], cost
        parts *= 2
    return best
