"""Prompt tuning and P-tuning by PEFT: trained embeddings of n virtual tokens before every sequence, and a frozen model.

    inputs_embeds = cat(prompt [n, D], embed(tokens) [T, D])

Rows of token ids have n places in front of each sequence, so that positions, attention and the places of predictors
count them. Whatever runs the model puts the trained embeddings there. Sequences may be packed or padded: the result is
that of PEFT's own forward on each sequence alone. (PEFT itself has the virtual tokens before the padding on the left,
so with prompts of different lengths its log-probs depend on the other rows of a batch.)

A model whose adapter is disabled, as the reference is, has no virtual tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def is_prompt_tuned(model: Any) -> bool:
    """True for a PeftModel with virtual tokens."""
    return bool(getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False))


def num_virtual_tokens(model: Any) -> int:
    """How many virtual tokens every sequence begins with now: n, or 0."""
    enabled = is_prompt_tuned(model) and model.has_active_enabled_adapter
    return int(model.active_peft_config.num_virtual_tokens) if enabled else 0


def with_virtual_places(prompts: Sequence[list[int]], model: Any) -> list[list[int]]:
    """Prompts with n more tokens in front: repetitions of the first one, of which a penalty knows already."""
    count = num_virtual_tokens(model)
    return [prompt[:1] * count + prompt for prompt in prompts]


def model_inputs(model: Any, input_ids: Tensor, position_ids: Tensor) -> dict[str, Tensor]:
    """`input_ids` [R, L] or, where there are virtual tokens, `inputs_embeds` [R, L, D] with theirs at positions 0..n-1.

    `position_ids` [R, L] are -1 where there is padding on the left, whose embeddings attention does not see.
    """
    count = num_virtual_tokens(model)
    if not count:
        return {"input_ids": input_ids}
    embeddings: Tensor = model.get_input_embeddings()(input_ids)
    prompt = model.get_prompt(batch_size=1)[0].to(embeddings.dtype)  # [n, D]
    virtual = position_ids < count
    return {"inputs_embeds": embeddings.index_put((virtual,), prompt[position_ids[virtual]])}
