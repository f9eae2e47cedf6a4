"""From an effective batch to packed micro-batches.

Sequences are laid end to end: no padding is computed, attention keeps them apart by their position ids, and only the
hidden states that predict completion tokens reach the head. The cut into micro-batches changes memory and nothing
else, because the loss is normalised by the counts of the whole step.
"""

from __future__ import annotations

from itertools import accumulate, chain

import torch

from fused_grpo.trainer.types import EffectiveBatch, MicroBatch


def micro_batches(batch: EffectiveBatch, sequences: int, device: torch.device) -> list[MicroBatch]:
    """The batch in order, `sequences` at a time."""
    total = len(batch.completion_ids)
    return [pack(batch, slice(start, min(start + sequences, total)), device) for start in range(0, total, sequences)]


def pack(batch: EffectiveBatch, chosen: slice, device: torch.device) -> MicroBatch:
    """The chosen sequences as one row of L tokens."""
    prompts, completions = batch.prompt_ids[chosen], batch.completion_ids[chosen]
    lengths = [len(prompt) + len(completion) for prompt, completion in zip(prompts, completions, strict=True)]
    starts = [0, *accumulate(lengths)]
    # The hidden state of a token predicts the next one: completions are predicted from one place earlier.
    predictors = [
        range(start + len(prompt) - 1, start + length - 1)
        for start, prompt, length in zip(starts, prompts, lengths, strict=False)
    ]
    tokens = chain.from_iterable(chain(*pair) for pair in zip(prompts, completions, strict=True))

    def row(values: object, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(list(values), dtype=dtype, device=device)  # type: ignore[call-overload]

    return MicroBatch(
        input_ids=row(tokens)[None],
        position_ids=row(chain.from_iterable(map(range, lengths)))[None],
        predictors=row(chain.from_iterable(predictors)),
        targets=row(chain.from_iterable(completions)),
        cu_seqlens=row([0, *accumulate(map(len, completions))], torch.int32),
        advantages=batch.advantages[chosen].to(device),
        sampling_logprobs=row(chain.from_iterable(batch.sampling_logprobs[chosen]), torch.float32),
    )
