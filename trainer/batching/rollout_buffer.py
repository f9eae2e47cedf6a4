"""A generated batch on its way through the optimizer: which part is next, and what a checkpoint keeps of it.

One generation serves `steps` optimizer steps, and goes through all of them `iterations` times.

Samples have one serialised form, in checkpoints, between ranks and beside a step that was not finite: a table of
tensors, without the columns of the dataset and of the user's functions. A field with one value for each sample is one
tensor. Of a field with several, `<name>.values` holds the rows end to end and `<name>.lengths` the length of each; of
one that no sample has, the table holds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor

from fused_grpo.trainer.types import FinishReason, ListedTokens, Sample, samples_from

# Fields with a row of values: tensors, or lists of numbers for those of _LISTS.
ROWS = {
    "prompt_ids": torch.int64,
    "completion_ids": torch.int64,
    "completion_mask": torch.bool,
    "sampling_logprobs": torch.float64,
    "old_logprobs": torch.float32,
    "ref_logprobs": torch.float32,
    "token_advantages": torch.float32,
    "support_ids": torch.int32,
    "support_sizes": torch.int32,
    "support_logprobs": torch.float32,
    "routed_experts": None,  # as it is
}
_LISTS = {"prompt_ids", "completion_ids", "completion_mask", "sampling_logprobs"}
# Fields with one value. Of a finish reason that is its place in FinishReason, of a failure that there is one; without
# lists of likely tokens there is no `is_top_k`.
VALUES = {
    "advantage": torch.float32,
    "reward": torch.float32,
    "in_loss": torch.bool,
    "skipped": torch.bool,
    "finish_reason": torch.int64,
    "weight_version": torch.int64,
    "failure": torch.bool,
    "is_top_k": torch.bool,
}
# The fields of `Sample.listed_tokens`, which a table has beside those of samples.
_LISTED = {"support_ids": "ids", "support_sizes": "sizes", "support_logprobs": "logprobs", "is_top_k": "is_top_k"}
_REASONS = get_args(FinishReason)
GREEDY = "greedy."  # before the names of completions that ReMax compares with, in the table of what it compares


@dataclass
class RolloutBuffer:
    """The batches of one generation, one for each optimizer step, and how many steps have been made."""

    batches: list[list[Sample]]
    iterations: int
    weight_version: int  # of the oldest of these rollouts
    has_support: bool = False  # whether the sampler's kept tokens are known
    metrics: dict[str, float] = field(default_factory=dict)  # of rewards and lengths, over all processes
    done: int = 0  # optimizer steps made from it

    @property
    def is_exhausted(self) -> bool:
        return self.done >= len(self.batches) * self.iterations

    @property
    def current(self) -> list[Sample]:
        """The batch of the next optimizer step."""
        return self.batches[self.done % len(self.batches)]

    def advance(self, learned: list[Sample]) -> None:
        """Go on to the next part. The current one, as it was `learned` from, is kept for its next iteration."""
        if self.done + len(self.batches) < len(self.batches) * self.iterations:
            self.batches[self.done % len(self.batches)] = learned
        self.done += 1

    def state(self) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
        """The buffer as JSON and as tables of tensors, "buffer.0" and so on, for `from_state`."""
        tables = {f"buffer.{index}": as_tensors(batch) for index, batch in enumerate(self.batches)}
        return {**vars(self), "batches": len(self.batches)}, tables

    @classmethod
    def from_state(cls, numbers: Mapping[str, Any], tables: Mapping[str, Mapping[str, Tensor]]) -> RolloutBuffer:
        """The inverse of `state`."""
        batches = [from_tensors(tables[f"buffer.{index}"]) for index in range(numbers["batches"])]
        return cls(**{**numbers, "batches": batches})


def as_tensors(batch: Sequence[Sample]) -> dict[str, Tensor]:
    """Samples as a table of tensors, for `from_tensors`."""
    fields = [
        {**vars(sample), **{name: getattr(sample.listed_tokens, part, None) for name, part in _LISTED.items()}}
        for sample in batch
    ]
    columns = {name: [one[name] for one in fields] for name in (*VALUES, *ROWS)}
    columns["finish_reason"] = [_REASONS.index(reason) for reason in columns["finish_reason"]]
    columns["failure"] = [failure is not None for failure in columns["failure"]]
    columns["is_top_k"] = list(map(bool, columns["is_top_k"]))
    table = {name: torch.tensor(columns[name], dtype=dtype) for name, dtype in VALUES.items()}
    if not table["is_top_k"].any():
        del table["is_top_k"]
    for name, dtype in ROWS.items():
        table |= {} if any(row is None for row in columns[name]) else joined_rows(name, columns[name], dtype)
    return table


def without_prefix(table: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(the table of the samples alone, that of their greedy completions, empty where there is none)."""
    greedy = {name.removeprefix(GREEDY): tensor for name, tensor in table.items() if name.startswith(GREEDY)}
    return {name: tensor for name, tensor in table.items() if not name.startswith(GREEDY)}, greedy


def joined_rows(name: str, rows: Sequence[Any], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """`rows` as the two tensors of the field `name`; without a dtype in that of the rows."""
    values = [torch.as_tensor(row, dtype=dtype).cpu() for row in rows]
    dtype = dtype or next((row.dtype for row in values), torch.uint8)
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return {f"{name}.values": torch.cat([torch.zeros(0, dtype=dtype), *values]), f"{name}.lengths": lengths}


def from_tensors(table: Mapping[str, Tensor]) -> list[Sample]:
    """The inverse of `as_tensors`. The reason of a failure is in the log of the run that sampled it."""
    columns: dict[str, list[Any]] = {name: table[name].tolist() for name in VALUES if name in table}
    columns["finish_reason"] = [_REASONS[place] for place in columns["finish_reason"]]
    columns["failure"] = ["dropped before the checkpoint" if failed else None for failed in columns["failure"]]
    for name in ROWS:
        if f"{name}.values" in table:
            rows = table[f"{name}.values"].split(table[f"{name}.lengths"].tolist())
            columns[name] = [row.tolist() for row in rows] if name in _LISTS else list(rows)
    listed = {part: columns.pop(name) for name, part in _LISTED.items() if name in columns}
    if listed:
        each = zip(*listed.values(), strict=True)
        columns["listed_tokens"] = [ListedTokens(**dict(zip(listed, values, strict=True))) for values in each]
    return samples_from(columns)
