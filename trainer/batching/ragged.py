"""Per-sequence lists of different lengths as tensors: how batches and rollouts are saved, and sent between ranks.

`<name>.values` holds the rows of a field end to end, `<name>.lengths` the length of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fused_grpo.trainer.types import EffectiveBatch, Rollouts

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
