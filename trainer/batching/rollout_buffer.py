"""A generated batch on its way through the optimizer: which part is next, and what a checkpoint keeps of it.

One generation serves `steps` optimizer steps, each with its share of whole groups (of parts of groups, where a step has
fewer sequences), and goes through all of them `iterations` times. Old log-probs are those of the weights at the start
of the first iteration. Its first step needs none, because its policy has these weights. The steps after it get theirs
before the first update, and later iterations reuse what the loss returned. So a forward pass is spent on them only
where the policy will have moved.

Batches and rollouts are saved, and sent between ranks, as tensors. For a field with a row for each sequence,
`<name>.values` holds the rows end to end and `<name>.lengths` the length of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fused_grpo.trainer.types import EffectiveBatch, Rollouts

_PER_SEQUENCE = ("advantages", "rewards", "in_loss", "skipped")
# Fields of batches and rollouts with a row for each sequence: a list, or a tensor for those of _TENSORS.
DTYPES = {
    "prompt_ids": torch.int64,
    "completion_ids": torch.int64,
    "sampling_logprobs": torch.float64,
    "old_logprobs": torch.float32,
    "ref_logprobs": torch.float32,
    "support_ids": torch.int32,
    "support_sizes": torch.int32,
}
_TENSORS = ("old_logprobs", "ref_logprobs", "support_ids", "support_sizes")
_REASONS = ("stop", "length")


@dataclass
class RolloutBuffer:
    """The batches of one generation, one for each optimizer step, and how many steps have been made."""

    batches: list[EffectiveBatch]  # one for each optimizer step
    iterations: int
    weight_version: int  # whose rollouts these are
    metrics: dict[str, float] = field(default_factory=dict)  # of rewards and lengths, over all processes
    done: int = 0  # optimizer steps made from it

    @property
    def is_exhausted(self) -> bool:
        return self.done >= len(self.batches) * self.iterations

    @property
    def current(self) -> EffectiveBatch:
        """The batch of the next optimizer step."""
        return self.batches[self.done % len(self.batches)]

    @property
    def has_more_iterations(self) -> bool:
        """Whether a later iteration uses `current` again."""
        return self.done + len(self.batches) < len(self.batches) * self.iterations

    def advance(self, **known: list[Tensor] | None) -> None:
        """Go on to the next part. The log-probs `known` of the current one are kept for its next iteration."""
        if self.has_more_iterations:
            self.batches[self.done % len(self.batches)] = replace(self.current, **known)  # type: ignore[arg-type]
        self.done += 1

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The buffer as JSON and as tensors, for `from_state`."""
        numbers = {
            "iterations": self.iterations,
            "weight_version": self.weight_version,
            "metrics": self.metrics,
            "done": self.done,
            "batches": len(self.batches),
        }
        tensors: dict[str, Tensor] = {}
        for index, batch in enumerate(self.batches):
            tensors |= {f"{index}.{name}": value for name, value in batch_as_tensors(batch).items()}
        return numbers, tensors

    @classmethod
    def from_state(cls, numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> RolloutBuffer:
        """The inverse of `state`."""
        fields = dict(numbers)
        by_batch: list[dict[str, Tensor]] = [{} for _ in range(fields.pop("batches"))]
        for name, value in tensors.items():
            index, _, field_name = name.partition(".")
            by_batch[int(index)][field_name] = value
        return cls(batches=[batch_from_tensors(some) for some in by_batch], **fields)


def split_groups(batch: EffectiveBatch, steps: int, together: int) -> list[EffectiveBatch]:
    """`batch` in `steps` parts, as equal as they can be, with each `together` sequences of a group in one."""
    groups = len(batch.completion_ids) // together
    cuts = [groups * step // steps * together for step in range(steps + 1)]
    return [batch.take(range(first, last)) for first, last in pairwise(cuts)]


def batch_as_tensors(batch: EffectiveBatch) -> dict[str, Tensor]:
    """A batch as tensors, for `batch_from_tensors`."""
    per_sequence = {name: getattr(batch, name) for name in _PER_SEQUENCE}
    return {name: values for name, values in per_sequence.items() if values is not None} | rows_as_tensors(batch)


def batch_from_tensors(tensors: Mapping[str, Tensor]) -> EffectiveBatch:
    """The inverse of `batch_as_tensors`."""
    per_sequence: dict[str, Any] = {name: tensors.get(name) for name in _PER_SEQUENCE}
    return EffectiveBatch(**per_sequence, **rows_from_tensors(tensors))


def rows_as_tensors(source: EffectiveBatch | Rollouts) -> dict[str, Tensor]:
    """All ragged fields of `source` that it has."""
    tensors: dict[str, Tensor] = {}
    for name, dtype in DTYPES.items():
        rows = getattr(source, name, None)
        tensors |= {} if rows is None else joined_rows(name, rows, dtype)
    return tensors


def rows_from_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The inverse of `rows_as_tensors`: the fields by name."""
    fields: dict[str, Any] = {"sampling_logprobs": None}
    for name in DTYPES:
        if f"{name}.values" in tensors:
            rows = tensors[f"{name}.values"].split(tensors[f"{name}.lengths"].tolist())
            fields[name] = list(rows) if name in _TENSORS else [row.tolist() for row in rows]
    return fields


def joined_rows(name: str, rows: Sequence[Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """`rows` as the two tensors of the field `name`."""
    values = [torch.as_tensor(row, dtype=dtype).cpu() for row in rows]
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return {f"{name}.values": torch.cat([torch.zeros(0, dtype=dtype), *values]), f"{name}.lengths": lengths}


def rollouts_as_tensors(rollouts: Rollouts) -> dict[str, Tensor]:
    """Rollouts as tensors, for `rollouts_from_tensors`; columns of a user's function are not kept."""
    return {
        "numbers": torch.tensor([rollouts.num_generations, rollouts.weight_version]),
        "finish_reasons": torch.tensor([_REASONS.index(reason) for reason in rollouts.finish_reasons]),
        "failed": torch.tensor(sorted(rollouts.failures), dtype=torch.int64),
        **rows_as_tensors(rollouts),
    }


def rollouts_from_tensors(tensors: dict[str, Tensor]) -> Rollouts:
    """The inverse of `rollouts_as_tensors`."""
    num_generations, weight_version = tensors["numbers"].tolist()
    return Rollouts(
        finish_reasons=[_REASONS[index] for index in tensors["finish_reasons"].tolist()],  # type: ignore[misc]
        num_generations=num_generations,
        weight_version=weight_version,
        # Older checkpoints have none. The reasons are in the log of the run that sampled them.
        failures=dict.fromkeys(tensors.get("failed", torch.zeros(0)).tolist(), "dropped before the checkpoint"),
        **rows_from_tensors(tensors),
    )
