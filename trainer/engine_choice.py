"""Which rollout engine the options of a run ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fused_grpo.errors import InputError
from fused_grpo.trainer.config import GRPOConfig
from fused_grpo.trainer.data import is_stream
from fused_grpo.trainer.models import wants_bf16
from fused_grpo.trainer.prompts import longest_prompt
from fused_grpo.trainer.rollout import EngineName, RolloutEngine, make_engine
from fused_grpo.trainer.rollout.function import FunctionEngine

if TYPE_CHECKING:
    from fused_grpo.trainer.loop import GRPOTrainer


def engine_name(args: GRPOConfig) -> EngineName:
    """What `make_engine` calls it."""
    if args.vllm_mode == "server":
        return "server"
    return "auto" if args.use_vllm is None else "vllm" if args.use_vllm else "transformers"


def choose_engine(trainer: GRPOTrainer, rollout_func: Any = None) -> RolloutEngine:
    """The engine, started; or the user's function, around an engine that was asked for by name.

    Raises:
        InputError: a dataset without random access, whose longest prompt is not known.
        UnavailableError: the engine is not installed, cannot start here, or does not answer.
    """
    if rollout_func is None:
        return _named_engine(trainer)
    wants_inner = trainer.args.use_vllm or trainer.args.vllm_mode == "server"
    return FunctionEngine(rollout_func, trainer, inner=_named_engine(trainer) if wants_inner else None)


def _named_engine(trainer: GRPOTrainer) -> RolloutEngine:
    args = trainer.args
    urls = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
    return make_engine(
        engine_name(args),
        trainer.model,
        trainer.processing_class,
        max_model_len=args.vllm_max_model_length or _longest_prompt(trainer) + args.max_completion_length,
        dtype=torch.bfloat16 if wants_bf16(args) else torch.float32,
        gpu_memory_utilization=args.vllm_gpu_memory_utilization,
        seed=args.seed,
        trust_remote_code=args.trust_remote_code,
        enable_sleep_mode=args.vllm_enable_sleep_mode,
        adapter_sync=args.vllm_adapter_sync,
        engine_options=args.vllm_engine_kwargs,
        base_urls=[urls] if isinstance(urls, str) else urls,
        server_timeout=args.vllm_server_timeout,
        allow_remote=args.vllm_server_allow_remote,
        weight_transfer=args.vllm_weight_transfer,
    )


def _longest_prompt(trainer: GRPOTrainer) -> int:
    """Tokens; of both datasets, so that neither meets an engine that is too small for it."""
    datasets = [dataset for dataset in (trainer.dataset, trainer.eval_dataset) if dataset is not None]
    if engine_name(trainer.args) == "transformers":
        return 0  # which has no limit to set
    if any(map(is_stream, datasets)):
        raise InputError("got a dataset without random access; fix: set vllm_max_model_length")
    options: Any = {"chat_template_kwargs": trainer.args.chat_template_kwargs}
    return max(longest_prompt(dataset, trainer.processing_class, **options) for dataset in datasets)
