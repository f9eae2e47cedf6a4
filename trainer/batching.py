"""From an effective batch to packed micro-batches.

Sequences are laid end to end in rows; attention keeps them apart by their position ids, and only the hidden states
that predict completion tokens reach the head. How long a row may be depends on the attention. A variable-length kernel
(flash attention) knows where sequences end and wants one long row without a single padding token. Any other computes a
square of the row's length, so there a row is as long as the longest sequence and holds as many others as fit: the
square of padded batches, without most of their padding.

The cut into micro-batches changes memory and nothing else, because the loss is normalised by the counts of the whole
step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor

from fused_grpo.trainer.types import EffectiveBatch, MicroBatch


def micro_batches(batch: EffectiveBatch, sequences: int, *, one_row: bool, device: torch.device) -> list[MicroBatch]:
    """The batch in order, `sequences` at a time. `one_row`: for attention that takes sequences of any lengths."""
    total = len(batch.completion_ids)
    cuts = (slice(start, min(start + sequences, total)) for start in range(0, total, sequences))
    return [pack(batch, cut, one_row=one_row, device=device) for cut in cuts]


def pack(batch: EffectiveBatch, chosen: slice, *, one_row: bool, device: torch.device) -> MicroBatch:
    """The chosen sequences in R rows of L tokens. Their completion tokens keep the order of the sequences."""
    prompts, completions = batch.prompt_ids[chosen], batch.completion_ids[chosen]
    lengths = [len(prompt) + len(completion) for prompt, completion in zip(prompts, completions, strict=True)]
    row_length = sum(lengths) if one_row else max(lengths)
    starts, num_rows = ([0, *accumulate(lengths[:-1])], 1) if one_row else place(lengths, row_length)
    # Left-over places are sequences of one token each: position 0, seen by nobody.
    input_ids = torch.zeros(num_rows * row_length, dtype=torch.int64)
    position_ids = torch.zeros_like(input_ids)
    for start, prompt, completion in zip(starts, prompts, completions, strict=True):
        tokens = torch.tensor([*prompt, *completion])
        input_ids[start : start + len(tokens)] = tokens
        position_ids[start : start + len(tokens)] = torch.arange(len(tokens))
    # The hidden state of a token predicts the next one: completions are predicted from one place earlier.
    predictors = (
        range(start + len(prompt) - 1, start + length - 1)
        for start, prompt, length in zip(starts, prompts, lengths, strict=True)
    )
    return MicroBatch(
        input_ids=input_ids.view(num_rows, row_length).to(device),
        position_ids=position_ids.view(num_rows, row_length).to(device),
        predictors=_flat(predictors, torch.int64).to(device),
        targets=_flat(completions, torch.int64).to(device),
        cu_seqlens=torch.tensor([0, *accumulate(map(len, completions))], dtype=torch.int32, device=device),
        advantages=batch.advantages[chosen].to(device),
        sampling_logprobs=_flat(batch.sampling_logprobs[chosen], torch.float32).to(device),
    )


def place(lengths: Sequence[int], row_length: int) -> tuple[list[int], int]:
    """Where each sequence starts in rows laid end to end, and how many rows: the longest first, each where it fits."""
    starts, filled = [0] * len(lengths), list[int]()
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        row = next((row for row, used in enumerate(filled) if used + length <= row_length), len(filled))
        if row == len(filled):
            filled.append(0)
        starts[index] = row * row_length + filled[row]
        filled[row] += length
    return starts, len(filled)


def _flat(lists: Iterable[Iterable[float]], dtype: torch.dtype) -> Tensor:
    return torch.tensor(list(chain.from_iterable(lists)), dtype=dtype)
