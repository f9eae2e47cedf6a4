"""The contract between the loop and whatever samples completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from fused_grpo.trainer.types import Rollouts, SamplingParams


class RolloutEngine(Protocol):
    """Samples completions and takes new weights. One `generate` call serves one whole effective batch."""

    name: str
    weight_version: int

    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: SamplingParams) -> Rollouts:
        """`sampling.n` completions for each prompt, from the weights of `weight_version`."""
        ...

    def load_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Serve these weights (Hugging Face names, full tensors) from the next `generate` on, as `version`."""
        ...

    def close(self) -> None:
        """Give back processes, memory and files. Safe to call twice."""
        ...
