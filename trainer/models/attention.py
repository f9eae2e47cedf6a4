"""What a model's attention takes and costs: what decides which tokens are packed into which rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from transformers import PreTrainedModel

# How the configs of all families end the names of what limits how far back a token sees.
_LIMITS = ("window", "window_size", "chunk_size")


def takes_any_lengths(model: PreTrainedModel) -> bool:
    """True where attention is a variable-length kernel, which takes packed sequences without a mask."""
    return "flash" in str(model.config._attn_implementation)


def sees_all(model: PreTrainedModel) -> bool:
    """True where every layer attends to all tokens before, through a function that takes a mask.

    False where a buffer has something for each place of a row, such as a causal mask of the model's own: it ends where
    the longest sequence does, and a row of several may be longer.
    """
    config = model.config.get_text_config()
    longest, kinds = getattr(config, "max_position_embeddings", None), getattr(config, "layer_types", None) or ()
    is_limited = any(value for name, value in vars(config).items() if name.endswith(_LIMITS))
    by_place = any(buffer.shape[-1:] == (longest,) for buffer in model.buffers())
    takes_mask = config._attn_implementation in ("eager", "sdpa")
    return takes_mask and not is_limited and not by_place and {"full_attention"}.issuperset(kinds)


def attention_cost(hidden_size: int) -> float:
    """Cost of attention to one token, relative to that of a token in the rest of a layer: 4 D to 24 D^2 FLOP."""
    return 1.0 / (6.0 * hidden_size)


def tree_cost(places: int, completions: int, attention: float) -> float:
    """Of a prompt with so many completions behind it, in units of a token's in the rest of a layer.

    A sequence alone attends to half of its square, which is causal; the mask of several hides nothing from the work.
    """
    return places * (1 + attention * places * (0.5 if completions == 1 else 1.0))


def tree_sizes(
    prompt: int, completions: Sequence[int], *, attention: float, max_tokens: int | None = None, most: int | None = None
) -> list[int]:
    """How many of a prompt's completions share it at a time, in order: 1, 2, 4, ... equal parts, or each by itself.

    No tree of several has more than `max_tokens` places, and none more than `most` completions.
    """
    count, ends = len(completions), [0, *accumulate(completions)]
    best, cheapest, parts = [1] * count, sum(tree_cost(prompt + length, 1, attention) for length in completions), 1
    while parts < count:
        cuts = [count * part // parts for part in range(parts + 1)]
        sizes = [stop - start for start, stop in pairwise(cuts)]
        places = [prompt + ends[stop] - ends[start] for start, stop in pairwise(cuts)]
        cost = sum(tree_cost(length, size, attention) for length, size in zip(places, sizes, strict=True))
        fits = (max_tokens is None or max(places) <= max_tokens) and (most is None or max(sizes) <= most)
        if cost < cheapest and fits:
            best, cheapest = sizes, cost
        parts *= 2
    return best
