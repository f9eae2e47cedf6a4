"""Batches of samples, written as columns."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_grpo.trainer.types import Sample, samples_from


def batch_of(**columns: Any) -> list[Sample]:
    """Samples from columns under the names of their fields, lists or tensors. All have ended, with version 0."""
    given = {name: values.tolist() if isinstance(values, Tensor) else values for name, values in columns.items()}
    count = len(given["prompt_ids"])
    return samples_from({"finish_reason": ["stop"] * count, "weight_version": [0] * count, **given})


def column(batch: Sequence[Sample], name: str) -> Any:
    """One field of all samples: a tensor of numbers, a list of rows, or None where all are None."""
    values = [getattr(sample, name) for sample in batch]
    if values and all(value is None for value in values):
        return None
    return torch.tensor(values) if values and isinstance(values[0], float | bool) else values
