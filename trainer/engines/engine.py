"""The contract between the loop and whatever samples completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from fused_grpo.trainer.types import Rollouts, SamplingParams


class RolloutEngine(Protocol):
    """Samples completions and takes new weights. One `generate` call serves one whole effective batch.

    `weight_version` is -1 where the engine has weights that are not the trainer's: sync before `generate`.
    """

    name: str
    weight_version: int

    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: SamplingParams) -> Rollouts:
        """`sampling.n` completions for each prompt, from the weights of `weight_version`."""
        ...

    def load_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Serve these weights (Hugging Face names, full tensors) from the next `generate` on, as `version`."""
        ...

    def sleep(self) -> None:
        """Give back what memory can be had again: no `generate` until `wake`. Nothing, unless an engine can."""
        return None

    def wake(self) -> None:
        """Be ready for `load_weights` and `generate` again. An engine that dropped its weights has version -1."""
        return None

    def close(self) -> None:
        """Give back processes, memory and files. Safe to call twice."""
        ...
