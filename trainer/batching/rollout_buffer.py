"""A generated batch on its way through the optimizer: which part is next, and what a checkpoint keeps of it.

One generation serves `steps` optimizer steps, each with its share of whole groups, and goes through all of them
`iterations` times. Old log-probs are those of the weights that sampled. The first step of the first iteration needs
none, because its policy is that one; the steps after it get theirs before the first update, and later iterations reuse
what the loss returned. So a forward pass is spent on them only where the policy will have moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fused_grpo.trainer.types import EffectiveBatch

# Per-sequence fields of a batch, and what their values are kept as; tensors stay what they are.
RAGGED = {
    "prompt_ids": torch.int64,
    "completion_ids": torch.int64,
    "sampling_logprobs": torch.float64,
    "old_logprobs": torch.float32,
    "ref_logprobs": torch.float32,
}
_TENSORS = ("old_logprobs", "ref_logprobs")


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
        """What the next optimizer step learns from."""
        return self.batches[self.done % len(self.batches)]

    @property
    def has_more_iterations(self) -> bool:
        """Whether a later iteration learns from `current` again."""
        return self.done + len(self.batches) < len(self.batches) * self.iterations

    def advance(self, **known: list[Tensor] | None) -> None:
        """Go on to the next part. The log-probs `known` of the current one are kept for its next iteration."""
        if self.has_more_iterations:
            self.batches[self.done % len(self.batches)] = replace(self.current, **known)  # type: ignore[arg-type]
        self.done += 1

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """As JSON and as tensors, from which `from_state` makes the same buffer again."""
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
    def from_state(cls, numbers: dict[str, Any], tensors: dict[str, Tensor]) -> RolloutBuffer:
        numbers = dict(numbers)
        count = numbers.pop("batches")
        batches = []
        for index in range(count):
            start = f"{index}."
            mine = {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
            batches.append(batch_from_tensors(mine))
        return cls(batches=batches, **numbers)


def split_groups(batch: EffectiveBatch, steps: int, num_generations: int) -> list[EffectiveBatch]:
    """`batch` in `steps` parts of whole groups, as equal as they can be."""
    groups = len(batch.completion_ids) // num_generations
    cuts = [groups * step // steps * num_generations for step in range(steps + 1)]
    return [batch.take(range(first, last)) for first, last in pairwise(cuts)]


def batch_as_tensors(batch: EffectiveBatch) -> dict[str, Tensor]:
    """What `batch_from_tensors` makes the same batch of."""
    per_sequence = {"advantages": batch.advantages, "rewards": batch.rewards, "in_loss": batch.in_loss}
    tensors = {name: values for name, values in per_sequence.items() if values is not None}
    for name, dtype in RAGGED.items():
        rows = getattr(batch, name)
        if rows is not None:
            tensors[f"{name}.values"], tensors[f"{name}.lengths"] = _flat(rows, dtype)
    return tensors


def _flat(rows: Sequence[Any], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    values = [torch.as_tensor(row, dtype=dtype).cpu() for row in rows]
    return torch.cat([torch.zeros(0, dtype=dtype), *values]), torch.tensor(
        [len(row) for row in rows], dtype=torch.int64
    )


def batch_from_tensors(tensors: dict[str, Tensor]) -> EffectiveBatch:
    """The inverse of `batch_as_tensors`."""
    ragged: dict[str, Any] = {"sampling_logprobs": None}
    for name in RAGGED:
        if f"{name}.values" in tensors:
            rows = list(tensors[f"{name}.values"].split(tensors[f"{name}.lengths"].tolist()))
            ragged[name] = rows if name in _TENSORS else [row.tolist() for row in rows]
    ragged |= {name: tensors.get(name) for name in ("rewards", "in_loss")}
    return EffectiveBatch(advantages=tensors["advantages"], **ragged)
