"""Rollout engines: they sample completions from the trainer's weights. Every one follows `RolloutEngine`.

engine_choice.py          the engine for the options of a run
vllm/                     vLLM in the trainer's process
server/                   vLLM servers over HTTP
transformers_generate.py  `model.generate` on the trainer's own model
rollout_func.py           a `rollout_func` of the user
checked_engine.py         the trainer calls engines through this module, which checks what they return
turns.py                  turns of episodes, sampled as they come; an engine with a `turn_session` has its own way
sampling.py               prompts, stop tokens, seeds, sampling options and listed tokens, the same for all engines
weight_files.py           files of weights for other processes, tied heads, adapters that vLLM serves
abandoned.py              folders of such files that a killed process has left
changed_weights.py        what changed since the last sync, and the worker extension of vLLM that makes weights of it
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from fused_grpo.trainer.types import Rollouts, SamplingParams


class SamplingEngine(Protocol):
    """Samples completions, with the weights of `weight_version`."""

    name: str

    @property
    def weight_version(self) -> int: ...

    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: SamplingParams) -> Rollouts: ...


class RolloutEngine(Protocol):
    """Samples completions and loads new weights. One `generate` call serves a whole generated batch.

    `weight_version` is -1 while the engine does not have the trainer's weights: then `load_weights` comes first.
    """

    name: str
    weight_version: int
    weight_dtype: torch.dtype | None = None  # matrices are sent in it if it is smaller than theirs; None: as they are
    takes_adapter: bool = False  # True: it has the base model, and `load_weights` is given the trained adapter alone
    has_own_weights: bool = True  # False: it samples with the trainer's tensors, and `load_weights` is given none
    can_sleep: bool = True  # False: it has nothing to free, and `sleep` and `wake` are not called between steps
    why_no_support: str | None = None  # of rollouts without the support of each token: what the engine needs for it
    samples_in_background: bool = False  # True: it may sample, and load weights, in another thread than the trainer's
    first_rank_sends: bool = False  # True: `load_weights` reads those of the first rank alone
    sync_metrics: Mapping[str, float] = MappingProxyType({})  # of the last `load_weights`, logged with its samples
    own_prompts: bool = False  # True: `generate` takes `rows` of the dataset with their numbers, and may encode them

    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: SamplingParams) -> Rollouts:
        """Sample `sampling.n` completions for each prompt, with the weights of `weight_version`.

        Log-probs are those of the distribution after temperature and truncation; with temperature 0, of the untempered.
        An engine that can returns `listed_tokens`: the support of each token where `sampling.wants_support`; and where
        `sampling.wants_logprobs`, its log-probs of them, or of the `sampling.top_k_listed` most likely tokens. With
        `sampling.routed_experts` it returns the experts of each token (types.py).
        """
        ...

    def load_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Use these weights (Hugging Face names, full tensors) from the next `generate` on, as `version`.

        They can be read once. Each may be made when it is read: an engine that keeps one before it reads the next needs
        memory for both.
        """
        ...

    def sleep(self) -> None:
        """Free memory until `wake`, where the engine can. There is no `generate` while it sleeps."""
        return None

    def wake(self) -> None:
        """Allocate the memory again. An engine that dropped its weights has version -1 afterwards.

        It is called behind `close` too, which ends a `train`: where a script evaluates then, or trains once more.
        """
        return None

    def close(self) -> None:
        """Stop processes, free memory and remove files. A second call does nothing."""
        ...
