"""Rollout engines: what samples completions from the trainer's weights. `make_engine` picks one.

engine.py                 the contract
engine_choice.py          which engine the options of a run ask for
vllm/                     vLLM in the trainer's process: inprocess.py; adapter.py, with a LoRA adapter beside the base
server/                   vLLM servers over HTTP: engine.py; weights through files or by NCCL; serve.py starts one
transformers_generate.py  `model.generate` on the trainer's own model
function.py               a function of the user's
answers.py                what the trainer asks engines through: their answers are whole, or an error
sampling.py weights.py    what engines share: prompts, seeds, stop tokens; names of weights, tied heads
weight_files.py           weights as safetensors, for servers and adapters
agreement.py              whether engine and trainer still have the same weights
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from fused_grpo.errors import InputError
from fused_grpo.trainer.engines.agreement import check_agreement
from fused_grpo.trainer.engines.engine import RolloutEngine
from fused_grpo.trainer.engines.weights import checkpoint_weights
from fused_grpo.trainer.models.adapters import base_model, is_adapted

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from fused_grpo.trainer.engines.server.weight_transfer import TransferName

__all__ = ["EngineName", "RolloutEngine", "check_agreement", "checkpoint_weights", "make_engine"]

EngineName = Literal["auto", "vllm", "server", "transformers"]

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
    enable_sleep_mode: bool = False,
    engine_options: dict[str, Any] | None = None,
    adapter_sync: bool = False,
    base_urls: Sequence[str] = (),
    server_timeout: float = 240.0,
    allow_remote: bool = False,
    weight_transfer: TransferName = "auto",
) -> RolloutEngine:
    """The engine called `name`; "auto" is vLLM in process where it is installed and transformers otherwise.

    Arguments after `tokenizer` are those of VLLMEngine, the last four of VLLMServerEngine. TransformersEngine uses
    `seed` alone, since it samples from `model` as it is. With `adapter_sync`, vLLM in process is given the adapter of
    a PeftModel and not merged weights (VLLMAdapterEngine).

    Errors:
        InputError: an unknown name, or options that the engine cannot take.
        UnsupportedError: an option that the engine does not have on this machine.
        UnavailableError: the engine is not installed, cannot start here, or does not answer.
    """
    if name not in get_args(EngineName):
        raise InputError(f"got rollout engine {name!r}, want one of {get_args(EngineName)}; fix: choose one of them")
    if name == "auto":
        name = "vllm" if importlib.util.find_spec("vllm") is not None else "transformers"
        _log.info("rollout engine: %s, by what is installed", name)
    if adapter_sync and not (name == "vllm" and is_adapted(model)):
        raise InputError(
            f"got vllm_adapter_sync with the engine {name!r} and a {type(model).__name__}, want vLLM in process and a "
            "model with an adapter; fix: leave it out: other engines are given merged weights"
        )
    policy, model = model, base_model(model)
    if name == "transformers":
        from fused_grpo.trainer.engines.transformers_generate import TransformersEngine

        return TransformersEngine(model, tokenizer, seed=seed)
    if name == "server":
        from fused_grpo.trainer.engines.server.engine import VLLMServerEngine

        return VLLMServerEngine(
            model,
            tokenizer,
            base_urls=base_urls,
            timeout=server_timeout,
            max_model_len=max_model_len,
            seed=seed,
            allow_remote=allow_remote,
            weight_transfer=weight_transfer,
        )
    options: dict[str, Any] = {
        "max_model_len": max_model_len,
        "dtype": dtype,
        "gpu_memory_utilization": gpu_memory_utilization,
        "seed": seed,
        "trust_remote_code": trust_remote_code,
        "enable_sleep_mode": enable_sleep_mode,
        "engine_options": engine_options,
    }
    if adapter_sync:
        from fused_grpo.trainer.engines.vllm.adapter import VLLMAdapterEngine

        return VLLMAdapterEngine(policy, tokenizer, **options)
    from fused_grpo.trainer.engines.vllm.inprocess import VLLMEngine

    return VLLMEngine(model, tokenizer, **options)
