"""The metrics of an optimizer step, merged from those of its micro-batches and of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

# Each is a count, or divided by a count of the whole step.
SUMMED = frozenset({"num_tokens", "loss", "policy_loss", "aux_loss"})


def merge_metrics(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """The metrics of an optimizer step from those of its micro-batches, with one wait for the device.

    Those in SUMMED and `*_sum` are summed, `*_max` and `*_min` are extremes, all others are means weighted by
    `num_tokens`. A micro-batch without tokens has no weight in a mean, whatever its value is.

    Args:
        parts: per micro-batch, 0-d tensors of one device, with `num_tokens` among them where there are means. A metric
            that a micro-batch lacks is merged over the others.

    Returns:
        Python floats, in the order in which the names first appear.
    """
    names = list(dict.fromkeys(name for part in parts for name in part))
    if not names:
        return {}
    merged = [_merge(name, [part for part in parts if name in part]) for name in names]
    return dict(zip(names, torch.stack(merged).tolist(), strict=True))


def merge_floats(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """`merge_metrics` of the ranks' own results."""
    return merge_metrics([{name: torch.tensor(value) for name, value in part.items()} for part in parts])


def _merge(name: str, parts: list[Mapping[str, Tensor]]) -> Tensor:
    values = torch.stack([part[name].detach().float() for part in parts])
    if name in SUMMED or name.endswith("_sum"):
        return values.sum()
    if name.endswith("_max"):
        return values.amax()
    if name.endswith("_min"):
        return values.amin()
    weights = torch.stack([part["num_tokens"].detach().float() for part in parts])
    return torch.where(weights > 0, values * weights, 0.0).sum() / weights.sum().clamp(min=1.0)
