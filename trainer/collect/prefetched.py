"""Rollouts that `Collector.prefetch` has requested: a vLLM server samples them while the optimizer learns.

Each collection waits for the rollouts that the last one requested, sends the current weights to the engine, requests
the next rollouts, and scores. So every batch but the first was sampled from weights that are one generation old,
never older, and the loss corrects for it (`vllm_importance_sampling_correction`): the old policy is the current one,
and rho is its ratio to the policy that sampled. The metric `off_policy_steps` is the age of the weights in steps.

A checkpoint waits for the prefetched rollouts and stores them. Where the engine has failed, or SIGTERM leaves no time,
it stores the position before them instead, and the resumed run samples the same rows with the same seed.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_grpo.trainer.batching.rollout_buffer import rows_as_tensors, rows_from_tensors
from fused_grpo.trainer.data.datasets import Row
from fused_grpo.trainer.types import Rollouts

_REASONS = ("stop", "length")


@dataclass(frozen=True)
class Prefetched:
    """Rollouts that the engine is sampling."""

    rows: list[Row]
    rollouts: Future[Rollouts]
    before: dict[str, Any]  # the position of the collector before the rows were drawn


def finished(rollouts: Rollouts) -> Future[Rollouts]:
    """A future that holds these rollouts already."""
    future: Future[Rollouts] = Future()
    future.set_result(rollouts)
    return future


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
