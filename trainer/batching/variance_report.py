"""Where the gradient of an optimizer step comes from: `variance_report=True`.

The loss op gives the squared norm of each token's d loss / d logits. Their sum over a completion is e_i, and over the
completions of a prompt E_p. They stand for squared norms of gradients in the weights, as in arXiv:2602.07078, with
tokens taken for orthogonal. Over all ranks,

    gradient/effective_sequences   (sum sqrt e_i)^2 / sum e_i: B where B completions contribute alike, 1 where one does
    gradient/effective_groups      (sum sqrt E_p)^2 / sum E_p: the same of prompts
    gradient/largest_group_share   max E_p / sum E_p

Completions without a gradient count for nothing: how far these numbers are below those of the batch is what is lost to
groups with equal rewards, clipped tokens, and a few completions that dominate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from math import sqrt

from accelerate.utils import gather_object
from torch import Tensor

from fused_grpo.trainer.batching.micro_batch_metrics import per_sequence
from fused_grpo.trainer.types import MicroBatch, Sample


def variance_report(
    batch: Sequence[Sample], packed: Sequence[MicroBatch], squared: Sequence[Tensor]
) -> dict[str, float]:
    """The metrics above, from the squared norms [N] of each micro-batch. A collective.

    Samples of equal prompts are one group.
    """
    rows = per_sequence(packed, squared, len(batch))
    own = [(tuple(sample.prompt_ids), row.double().sum().item()) for sample, row in zip(batch, rows, strict=True)]
    groups, sequences = defaultdict[tuple[int, ...], float](float), list[float]()
    for prompt, energy in gather_object(own):
        groups[prompt] += energy
        sequences.append(energy)
    total = sum(sequences)
    return {
        "gradient/effective_sequences": effective_number(sequences),
        "gradient/effective_groups": effective_number(groups.values()),
        "gradient/largest_group_share": max(groups.values(), default=0.0) / total if total else 0.0,
    }


def effective_number(squares: Collection[float]) -> float:
    """Kish's effective sample size of contributions with these squared norms; 0 of none.

    >>> effective_number([1.0, 1.0, 1.0, 1.0]), effective_number([9.0, 1.0, 0.0])
    (4.0, 1.6)
    """
    total = sum(squares)
    return sum(map(sqrt, squares)) ** 2 / total if total else 0.0
