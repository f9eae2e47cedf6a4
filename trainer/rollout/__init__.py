"""Rollout engines: what samples completions from the trainer's weights. `make_engine` picks one.

engine.py                 the contract
vllm_inprocess.py         vLLM in the trainer's process, started by vllm_start.py, contained by isolation.py
transformers_generate.py  `model.generate` on the trainer's own model
sampling.py weights.py    what engines share: prompts, seeds, stop tokens; names of weights, tied heads
agreement.py              whether engine and trainer still have the same weights
"""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING, Any, Literal

import torch

from fused_grpo.errors import InputError
from fused_grpo.trainer.rollout.agreement import check_agreement
from fused_grpo.trainer.rollout.engine import RolloutEngine
from fused_grpo.trainer.rollout.weights import checkpoint_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["EngineName", "RolloutEngine", "check_agreement", "checkpoint_weights", "make_engine"]

EngineName = Literal["auto", "vllm", "transformers"]

_log = logging.getLogger(__name__)


def make_engine(
    name: EngineName,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_model_len: int,
    dtype: str | torch.dtype,
    gpu_memory_utilization: float = 0.3,
    seed: int = 0,
    trust_remote_code: bool = False,
    engine_options: dict[str, Any] | None = None,
) -> RolloutEngine:
    """The engine called `name`; "auto" is vLLM where it is installed and transformers otherwise.

    Arguments after `tokenizer` are those of VLLMEngine; TransformersEngine uses `seed` alone, since it samples from
    `model` as it is.

    Errors:
        InputError: an unknown name, or an engine option that the engine decides itself.
        UnavailableError: the engine is not installed or cannot start here.
    """
    if name not in ("auto", "vllm", "transformers"):
        raise InputError(f"got rollout engine {name!r}, want 'auto', 'vllm' or 'transformers'; fix: choose one of them")
    if name == "auto":
        name = "vllm" if importlib.util.find_spec("vllm") is not None else "transformers"
        _log.info("rollout engine: %s, by what is installed", name)
    if name == "transformers":
        from fused_grpo.trainer.rollout.transformers_generate import TransformersEngine

        return TransformersEngine(model, tokenizer, seed=seed)
    from fused_grpo.trainer.rollout.vllm_inprocess import VLLMEngine

    return VLLMEngine(
        model,
        tokenizer,
        max_model_len=max_model_len,
        dtype=dtype,
        gpu_memory_utilization=gpu_memory_utilization,
        seed=seed,
        trust_remote_code=trust_remote_code,
        engine_options=engine_options,
    )
